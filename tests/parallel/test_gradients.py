"""Gradients and their norms are one device's: on every rank, however a step is cut up."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.parity import Rows, everything, tiny
from kilter.comm.axis import Axis
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.data import Held
from kilter.parallel.norm import gradient_norm
from kilter.parallel.shards import Shard
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import train_step
from tests.parallel.gradients import (
    Gradients,
    Parts,
    assert_same,
    document,
    gradients,
    packed,
    spread_model,
)
from tests.ranks import RankPool


def documents(vocab: int, count: int = 8, seed: int = 0) -> list[Rows]:
    """Of 3 to 14 tokens, each with some labels masked."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        tokens = [draw.randrange(vocab) for _ in range(draw.randint(3, 14))]
        found.append(document(tokens, [t if draw.random() < 0.7 else -100
                                       for t in tokens[1:]] + [-100]))
    return found


def short(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=spec.layers[:2])


def oracle(spec: ModelSpec, micro_batches: list[Rows]) -> Gradients:
    """By torch's own kernels and cross entropy, over all documents' targets at once."""
    model = init_weights(Decoder(spec, exact=False), 1, std=0.1)
    losses = [torch.nn.functional.cross_entropy(
        model(m.batch(torch.device("cpu"))), m.targets_T, reduction="sum", ignore_index=-100)
        for m in micro_batches]
    loss = torch.stack(losses).sum() / sum(m.valid for m in micro_batches)
    loss.backward()
    parts: Parts = {n: [(tuple(slice(0, s) for s in p.shape), p.grad)]  # type: ignore[misc]
                    for n, p in model.named_parameters()}
    grads = torch.cat([g.flatten() for [(_, g)] in parts.values()])
    return Gradients(float(loss.detach()), float(grads.norm()), float(grads.abs().max()), parts)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=2),
                                    Layout(dp=2, zero=3), Layout(dp=2, tp=2, zero=2)], ids=str)
def test_every_target_weighs_the_same(ranks: RankPool, layout: Layout) -> None:
    """1 and 9 targets, over 2 ranks and 2 micro-batches; norms too do not know the layout."""
    spec = short(tiny(True))
    made = []
    for m, valid in enumerate((1, 9, 9, 1)):
        tokens = [(31 * m + 7 * i) % 331 for i in range(10)]
        made.append(document(tokens, tokens[1:1 + valid] + [-100] * (10 - valid)))
    found = ranks.run(layout.world, gradients, spec, layout, made)
    one = oracle(spec, made)
    assert_same(found, one, 1e-5)
    assert sum(g.loss for g in found) / layout.tp == pytest.approx(one.loss, rel=1e-6)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_spread_vocabularys_loss_is_cross_entropy(ranks: RankPool, tp: int) -> None:
    spec = short(tiny(False))
    made = documents(spec.vocab_size, 2)
    one = oracle(spec, made)
    for found in ranks.run(tp, gradients, spec, Layout(tp=tp), made):
        assert found.loss == pytest.approx(one.loss, rel=1e-6)


@pytest.mark.parametrize(("kv", "layout"), [
    (1, Layout(tp=2)), (1, Layout(tp=4)), (2, Layout(tp=4)),
    (2, Layout(tp=4, sequence_parallel=False)), (1, Layout(tp=2, dp=2, zero=3))], ids=str)
def test_what_ranks_share_has_the_whole_gradient_on_each(ranks: RankPool, kv: int, layout: Layout
                                                         ) -> None:
    """Norms (the last one, of queries and keys, after blocks), biases, and KV heads of which there
    are fewer than ranks."""
    spec = short(replace(everything(), num_kv_heads=kv))
    made = documents(spec.vocab_size, 4)
    one = gradients(spec, Layout(), made, clip=0.1)
    assert one.norm > 0.1
    assert_same(ranks.run(layout.world, gradients, spec, layout, made, clip=0.1), one, 2e-6)


@pytest.mark.parametrize("layout", [Layout(dp=2, tp=2, zero=3), Layout(tp=2)], ids=str)
def test_rounded_weights_are_rounded_alike(ranks: RankPool, layout: Layout) -> None:
    spec, bf16 = short(tiny(True)), torch.bfloat16
    made = documents(spec.vocab_size, 4)
    one = gradients(spec, Layout(), made, weights=bf16)
    assert one.loss != gradients(spec, Layout(), made).loss
    assert_same(ranks.run(layout.world, gradients, spec, layout, made, weights=bf16), one, 2e-6)


@pytest.mark.parametrize(("heads", "layout"), [(1, Layout(tp=2)), (2, Layout(dp=2, tp=2, zero=3))],
                         ids=str)
def test_keys_are_rounded_and_their_gradients_are_not(ranks: RankPool, heads: int, layout: Layout
                                                      ) -> None:
    """Also where several ranks have a part of a KV head's gradient."""
    spec, bf16 = short(replace(everything(), num_kv_heads=heads)), torch.bfloat16
    made = documents(spec.vocab_size, 4)
    one = gradients(spec, Layout(), made, kv=bf16)
    assert one.loss != gradients(spec, Layout(), made).loss
    assert_same(ranks.run(layout.world, gradients, spec, layout, made, kv=bf16), one, 2e-6)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, zero=2), Layout(dp=2, zero=3)],
                         ids=str)
def test_frozen_parameters_have_none(ranks: RankPool, layout: Layout) -> None:
    spec = short(tiny(False))
    made = documents(spec.vocab_size, 4)
    one = gradients(spec, Layout(), made, frozen="layers.0")
    assert not any(name.startswith("layers.0") for name in one.parts)
    assert_same(ranks.run(2, gradients, spec, layout, made, frozen="layers.0"), one, 2e-6)


def narrow() -> ModelSpec:
    """Matrices and norms of 2 to 6 rows, for 8 ranks."""
    return ModelSpec("Qwen3ForCausalLM", 5, 6, 3, 2, 1, 2, (LayerSpec(RopeSpec()),) * 2, 32,
                     qk_norm=True)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_fewer_rows_than_ranks(ranks: RankPool, zero: int) -> None:
    made = documents(5, 16)
    found = ranks.run(8, gradients, narrow(), Layout(dp=8, zero=zero), made)
    assert_same(found, gradients(narrow(), Layout(), made), 2e-6)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_cuts_and_order_change_nothing(count: int) -> None:
    """Eight documents in 1 to 8 micro-batches, in any order in their packs, and one by one."""
    spec = short(tiny(True))
    made = documents(spec.vocab_size)
    one = gradients(spec, Layout(), made)
    draw = random.Random(count)
    draw.shuffle(made)
    packs = [packed(made[i::count]) for i in range(count)]
    assert_same([gradients(spec, Layout(), packs)], one)


def in_a_pack(spec: ModelSpec, layout: Layout, pack: list[list[int]]) -> Tensor:
    """Log-probabilities [T] of every next token (the first one's after the last)."""
    spread = spread_model(spec, layout)
    batch = Batch.of(pack)
    with torch.no_grad():
        return spread.forward(batch, torch.cat([torch.tensor(d).roll(-1) for d in pack]))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_documents_of_a_pack_do_not_see_each_other(ranks: RankPool, layout: Layout) -> None:
    """Alone, or after a document whose tokens change: the same bits."""
    spec = everything()
    a, b, c = ([(p * i) % 200 for i in range(n)] for p, n in ((7, 10), (11, 14), (13, 6)))
    packs = [[a, b, c], [[t + 1 for t in a], b, c], [c, b, a], [b]]
    rows = [slice(10, 24), slice(10, 24), slice(6, 20), slice(0, 14)]
    seen = []
    for pack, mine in zip(packs, rows, strict=True):
        whole = (in_a_pack(spec, layout, pack) if layout.world == 1
                 else ranks.run(2, in_a_pack, spec, layout, pack)[0])
        seen.append(whole[mine])
    assert all(torch.equal(seen[0], other) for other in seen[1:])


def after_steps(spec: ModelSpec, layout: Layout, steps: int) -> Parts:
    """Every element that a rank has after some steps of AdamW."""
    spread = spread_model(spec, layout)
    optimizer = Optimizer(spread.held, OptimizerConfig(lr=1e-2), spread.mesh.axis("dp_cp_tp"))
    dp = spread.mesh.axis("dp")
    for step in range(steps):
        mine = packed(documents(spec.vocab_size, 3, seed=step * dp.size + dp.index))
        train_step(spread, optimizer, [mine])
    return {h.name: [(box.slices, part.detach().clone())
                     for box, _, part in h.shard.parts(h.tensor)] for h in spread.held}


@pytest.mark.parametrize(("layout", "steps"), [
    (Layout(tp=2), 50), (Layout(tp=4, sequence_parallel=False), 50), (Layout(dp=3), 10),
    (Layout(dp=4, replicate=2, zero=2), 10), (Layout(dp=4, replicate=2, zero=3), 10)], ids=str)
def test_ranks_do_not_drift_apart(ranks: RankPool, layout: Layout, steps: int) -> None:
    """Case 26: what several ranks hold is the same bits after many steps: norms, biases and the one
    KV head of tensor-parallel ranks, everything of copies."""
    spec = short(everything())
    found = ranks.run(layout.world, after_steps, spec, layout, steps)
    shared = 0
    for name, whole_parts in after_steps(spec, Layout(), 0).items():
        values = torch.full(whole_parts[0][1].shape, torch.nan)
        for rank in found:
            for place, part in rank[name]:
                known = ~values[place].isnan()
                shared += int(known.sum())
                assert torch.equal(values[place][known], part[known]), name
                values[place] = part
    assert shared > 32 * 10


def test_t_that_does_not_divide_is_said(ranks: RankPool) -> None:
    assert "multiple of tp = 2, but a batch has 7" in ranks.run(2, refusal)[0]


def refusal() -> str:
    spread = spread_model(short(tiny(True)), Layout(tp=2))
    with pytest.raises(ValueError) as error:
        spread.forward(Batch.of([list(range(7))]), torch.zeros(7, dtype=torch.int64))
    return str(error.value)


def norm_of(value: float, order: float, world: Axis) -> float:
    held = Held("x", torch.nn.Parameter(torch.ones(3)), Shard.whole((3,)))
    held.tensor.grad = torch.tensor([1.0, -3.0, value])
    return gradient_norm([held], world, order)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_no_norm_hides_what_is_not_finite(ranks: RankPool, order: float) -> None:
    alone = Axis("world", (0,), 0)
    assert norm_of(2.0, order, alone) == pytest.approx({1: 6, 2: 14 ** 0.5}.get(order, 3))
    assert not torch.tensor(norm_of(float("nan"), order, alone)).isfinite()
    for bad in (0, 1, 2):
        assert not torch.tensor(ranks.run(3, norm_of_one_rank, order, bad)).isfinite().any()


def norm_of_one_rank(order: float, bad: int) -> float:
    mesh = Mesh(Layout(dp=3))
    return norm_of(float("nan") if mesh.rank == bad else 2.0, order, mesh.axis("world"))
