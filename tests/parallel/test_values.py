"""Value heads: one device's values and gradients under any layout, and where they come from."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.parity import MODELS, Rows
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.value import ValueModel, add_value_head
from kilter.parallel.apply import Spread, apply
from kilter.parallel.norm import gradient_norm
from kilter.parallel.pipeline.executor import PipelineConfig
from kilter.parallel.recompute import Recompute
from kilter.parallel.values import token_values
from kilter.train.export import whole_parameters
from kilter.train.step import local_rows
from kilter.weights.bridge import open_model
from kilter.weights.export import State, export_hf
from tests.parallel.gradients import Gradients, assert_same
from tests.ranks import RankPool

CPU = torch.device("cpu")
PACKS = [Rows([[7, 30, 11], [5] * 8, [1, 2, 3, 4]], torch.full((15,), -100)),
         Rows([list(range(40, 53))], torch.full((13,), -100)),
         Rows([[9, 8], [100, 3, 99, 3, 98]], torch.full((7,), -100)),
         Rows([[77, 1, 76, 2, 75, 3]], torch.full((6,), -100))]


def weights(width: int) -> Tensor:
    """Of a head that is not zero."""
    return torch.linspace(-1.0, 1.0, width)[None] ** 3


def wanted(rows: int) -> Tensor:
    return torch.linspace(-2.0, 3.0, rows)


def spread_over(model: str, layout: Layout, schedule: str = "1f1b",
                recompute: Recompute | None = None) -> Spread:
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        decoder = add_value_head(Decoder(MODELS[model]()))
    pipeline = PipelineConfig(schedule) if layout.pp > 1 else None
    spread = apply(decoder, mesh, pipeline=pipeline, recompute=recompute)
    spread.initialise(seed=1, std=0.2)
    spread.fill({"value.weight": weights(decoder.spec.hidden_size)})
    return spread


def values(model: str, layout: Layout, schedule: str) -> list[Tensor | None]:
    """Of the packs' own rows."""
    spread = spread_over(model, layout, schedule)
    rows = [local_rows(spread, pack, CPU) for pack in PACKS]
    found = spread.forward_all([batch for batch, _ in rows],
                               lambda forward, k: forward(rows[k][0]))
    return [None if x_T is None else x_T[:len(pack.targets_T)]
            for x_T, pack in zip(found, PACKS, strict=True)]


@pytest.mark.parametrize(("model", "layout", "schedule"), [
    ("tied", Layout(tp=2), ""), ("untied", Layout(tp=4, sequence_parallel=False), ""),
    ("everything", Layout(tp=4), ""), ("tied", Layout(dp=2, tp=2, zero=3), ""),
    ("tied", Layout(pp=2), "1f1b"), ("untied", Layout(pp=2, tp=2), "zb-v")], ids=str)
def test_values_have_one_devices_bits(ranks: RankPool, model: str, layout: Layout, schedule: str
                                      ) -> None:
    one = values(model, Layout(), "")
    by_rank = ranks.run(layout.world, values, model, layout, schedule)
    told = [found for found in by_rank if found[0] is not None]
    assert len(told) == layout.world // layout.pp
    for found in told:
        assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))


def gradients(model: str, layout: Layout, schedule: str, recompute: Recompute | None = None
              ) -> Gradients:
    """Of the sum of squared distances to `wanted`, in this rank."""
    spread = spread_over(model, layout, schedule, recompute)
    dp = spread.mesh.axis("dp")
    packs = PACKS[dp.index::dp.size]
    rows = [local_rows(spread, pack, CPU) for pack in packs]

    def loss(forward, k: int) -> Tensor:  # type: ignore[no-untyped-def]
        own = len(packs[k].targets_T)
        return (forward(rows[k][0])[:own] - wanted(own)).square().sum()

    total = spread.backward_all([batch for batch, _ in rows], loss, lambda _: nullcontext())
    spread.finish()
    world = spread.mesh.axis("world")
    found = Gradients(float(total), gradient_norm(spread.held, world),
                      gradient_norm(spread.held, world, float("inf")))
    for held in spread.held:
        assert held.tensor.grad is not None, held.name
        found.parts[held.name] = [(box.slices, part.clone())
                                  for box, _, part in held.shard.parts(held.tensor.grad)]
    return found


def oracle(model: str) -> Gradients:
    """By torch's own kernels and autograd, with the head as a plain product."""
    decoder = init_weights(Decoder(MODELS[model](), exact=False), 1, std=0.2)
    head = weights(decoder.spec.hidden_size)[0].requires_grad_()
    losses = [(decoder.hidden(pack.batch(CPU)) @ head - wanted(len(pack.targets_T))).square().sum()
              for pack in PACKS]
    loss = torch.stack(losses).sum()
    loss.backward()
    whole = {name: p.grad for name, p in decoder.named_parameters() if name != "head.weight"}
    whole["value.weight"] = head.grad[None]  # type: ignore[index]
    flat = torch.cat([grad.flatten() for grad in whole.values()])  # type: ignore[union-attr]
    return Gradients(float(loss.detach()), float(flat.norm()), float(flat.abs().max()),
                     {name: [(tuple(slice(0, n) for n in grad.shape), grad)]  # type: ignore[union-attr,misc]
                      for name, grad in whole.items()})


@pytest.mark.parametrize("model", ["tied", "untied", "everything"])
def test_gradients_are_autograds_of_a_plain_head(model: str) -> None:
    assert_same([gradients(model, Layout(), "")], oracle(model), 1e-5)


@pytest.mark.parametrize(("model", "layout", "schedule"), [
    ("tied", Layout(tp=2), ""), ("everything", Layout(tp=4, sequence_parallel=False), ""),
    ("untied", Layout(dp=2), ""), ("tied", Layout(dp=2, zero=1), ""),
    ("tied", Layout(dp=2, zero=2), ""), ("untied", Layout(dp=2, tp=2, zero=3), ""),
    ("tied", Layout(pp=2), "zb-h1"), ("tied", Layout(pp=2, dp=2, zero=3), "1f1b"),
    ("untied", Layout(pp=2, tp=2), "1f1b")], ids=str)
def test_gradients_are_one_devices(ranks: RankPool, model: str, layout: Layout, schedule: str
                                   ) -> None:
    """The head's too, and its part of the norm counts once."""
    found = ranks.run(layout.world, gradients, model, layout, schedule)
    if layout.pp > 1:  # a rank has the parameters of its stages only
        one = gradients(model, Layout(), "")
        assert found[0].norm == pytest.approx(one.norm, rel=1e-6)
        for rank in found:
            for name, parts in rank.parts.items():
                [(_, whole)] = one.parts[name]
                for place, part in parts:
                    torch.testing.assert_close(part, whole[place], rtol=2e-6,
                                               atol=2e-6 * one.largest)
        assert any("value.weight" in rank.parts for rank in found)
    else:
        assert_same(found, gradients(model, Layout(), ""), 2e-6)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_recompute_changes_no_bit(ranks: RankPool, layout: Layout) -> None:
    def found(recompute: Recompute) -> Gradients:
        if layout.world == 1:
            return gradients("tied", layout, "", recompute)
        first: Gradients = ranks.run(layout.world, gradients, "tied", layout, "", recompute)[0]
        return first

    plain, again = (found(Recompute(mode)) for mode in ("none", "full"))  # type: ignore[arg-type]
    for name, parts in plain.parts.items():
        assert all(torch.equal(a, b) for (_, a), (_, b) in
                   zip(parts, again.parts[name], strict=True)), name


def test_values_do_not_depend_on_company() -> None:
    spread = spread_over("everything", Layout())
    with torch.no_grad():
        together = spread.forward(Batch.of(PACKS[0].sequences))
        alone = spread.forward(Batch.of([PACKS[0].sequences[1]]))
    assert torch.equal(together[3:11], alone)
    decoder = spread.model
    assert isinstance(decoder, ValueModel)
    direct = token_values(decoder, Batch.of(PACKS[0].sequences), None, spread.mesh.axis("tp"),
                          False)
    assert torch.equal(direct, together) and torch.equal(decoder(Batch.of(PACKS[0].sequences)),
                                                         together)


# Where a head comes from


def after_load(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """All parameters after the files were read, on rank 0."""
    source = open_model(folder, reward=True)
    with torch.device("meta"):
        decoder = add_value_head(Decoder(source.spec))
    spread = apply(decoder, Mesh(layout) if layout.world > 1 else Mesh.single())
    spread.load(source)
    return {name: whole.clone() for name, whole in whole_parameters(spread) if whole is not None}


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_heads_are_zero_or_what_the_files_have(ranks: RankPool, tmp_path: Path, model: str
                                               ) -> None:
    spec = MODELS[model]()
    language = {name: p.detach() for name, p in
                init_weights(Decoder(spec), 3).named_parameters()}
    export_hf(State(spec, language), tmp_path / "language")
    reward = {name: p for name, p in language.items() if name != "head.weight"}
    reward["value.weight"] = weights(spec.hidden_size)
    export_hf(State(spec, reward), tmp_path / "reward")
    for folder, head in (("language", torch.zeros(1, spec.hidden_size)),
                         ("reward", weights(spec.hidden_size))):
        expected = {**reward, "value.weight": head}
        for layout in (Layout(), Layout(dp=2, zero=3), Layout(pp=2, tp=2)):
            found = (after_load(tmp_path / folder, layout) if layout.world == 1 else
                     ranks.run(layout.world, after_load, tmp_path / folder, layout)[0])
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_a_value_model_cannot_do_is_said() -> None:
    spread = spread_over("tied", Layout())
    batch = Batch.of(PACKS[3].sequences)
    with pytest.raises(ValueError, match="gives no probabilities of targets"):
        spread.forward(batch, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match="no output head"):
        spread.model.logits(torch.zeros(1, 32))
    with pytest.raises(ValueError, match="has a value head already"):
        add_value_head(spread.model)
    initial = add_value_head(Decoder(MODELS["tied"]()))
    assert not init_weights(initial, 5).values(torch.randn(4, 32)).any()
