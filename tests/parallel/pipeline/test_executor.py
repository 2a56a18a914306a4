"""Pipelines on real ranks: the schedule's order, one device's bits and gradients, tied heads."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from bench.parity import MODELS, data, tiny
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.parallel.apply import Spread, apply
from kilter.parallel.norm import gradient_norm
from kilter.parallel.pipeline.check import activations_in_flight
from kilter.parallel.pipeline.executor import Part, PipelineConfig
from kilter.parallel.pipeline.generators import NAMES, make_schedule
from kilter.parallel.pipeline.schedule import Action
from kilter.parallel.pipeline.stage import DeferredGrads, Stage, cut, head_layers, split_layers
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import evaluate, local_rows, token_loss, train_step
from tests.ranks import RankPool

CPU = torch.device("cpu")


def spread_over(model: str, layout: Layout, schedule: str, frozen: tuple[str, ...] = ()
                ) -> Spread:
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        decoder = Decoder(MODELS[model]())
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or "-"))
    spread = apply(decoder, mesh, pipeline=PipelineConfig(schedule))
    spread.initialise(seed=1, std=0.2)
    return spread


def logprobs(model: str, layout: Layout, schedule: str) -> list[Tensor | None]:
    """Of the targets of 4 micro-batches."""
    spread = spread_over(model, layout, schedule)
    rows = [local_rows(spread, m, CPU) for m in data(spread.model.spec.vocab_size)[0][:4]]
    return spread.forward_all([batch for batch, _ in rows],
                              lambda forward, k: forward(*rows[k]))


@pytest.mark.parametrize(("model", "layout", "schedule"), [
    ("tied", Layout(pp=2), "1f1b"), ("untied", Layout(pp=4), "gpipe"),
    ("tied", Layout(pp=2), "zb-v"), ("deep", Layout(pp=4), "interleaved"),
    ("tied", Layout(pp=2, tp=2), "zb-v"), ("tied", Layout(pp=2, dp=2, zero=3), "1f1b"),
    ("everything", Layout(pp=2, tp=2), "1f1b"),
], ids=str)
def test_forward_has_the_bits_of_one_rank(ranks: RankPool, model: str, layout: Layout,
                                          schedule: str) -> None:
    one = logprobs(model, Layout(), schedule)
    by_rank = ranks.run(layout.world, logprobs, model, layout, schedule)
    told = [found for found in by_rank if found[0] is not None]
    assert len(told) == layout.world // layout.pp
    for found in told:
        for a, b in zip(found, one, strict=True):
            assert torch.equal(a[:len(b)], b)


def order_of(layout: Layout, schedule: str, micro_batches: int) -> list[Action]:
    spread = spread_over("deep", layout, schedule)
    one = data(spread.model.spec.vocab_size)[0][0]
    rows = [local_rows(spread, one, CPU)] * micro_batches
    spread.backward_all([batch for batch, _ in rows],
                        lambda forward, k: token_loss(forward, *rows[k]), lambda _: nullcontext())
    spread.finish()
    assert spread.pipeline is not None
    times = [t for _, start, end in spread.pipeline.trace for t in (start, end)]
    assert times == sorted(times)
    return [action for action, _, _ in spread.pipeline.trace]


@pytest.mark.parametrize("schedule", NAMES)
def test_ranks_do_what_the_schedule_says(ranks: RankPool, schedule: str) -> None:
    """At p = 4, m = 8, in its order."""
    orders = ranks.run(4, order_of, Layout(pp=4), schedule, 8)
    assert tuple(map(tuple, orders)) == make_schedule(schedule, 4, 8).actions


def norms(layout: Layout, schedule: str, frozen: tuple[str, ...] = ()) -> list[float]:
    spread = spread_over("tied", layout, schedule, frozen)
    backward(spread, 4)
    spread.finish()
    assert sum(whole_bytes(part) for part in spread.parts) == 0
    return [gradient_norm(spread.held, spread.mesh.axis("world"), p) for p in (2.0, math.inf)]


def backward(spread: Spread, micro_batches: int) -> None:
    rows = [local_rows(spread, m, CPU)
            for m in data(spread.model.spec.vocab_size)[0][:micro_batches]]
    spread.backward_all([batch for batch, _ in rows],
                        lambda forward, k: token_loss(forward, *rows[k], 0.01),
                        lambda _: nullcontext())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_norms_count_all_stages_and_the_tied_head_once(ranks: RankPool, schedule: str) -> None:
    """Case 3, and tied weights."""
    one = norms(Layout(), schedule)
    for found in ranks.run(2, norms, Layout(pp=2), schedule):
        assert found == pytest.approx(one, rel=1e-6)


FIRST_HALF = ("embed", "layers.0.", "layers.1.")


@pytest.mark.parametrize(("layout", "schedule", "frozen"), [
    (Layout(pp=2), "1f1b", FIRST_HALF), (Layout(pp=2), "zb-h1", FIRST_HALF),
    (Layout(pp=2, dp=2, zero=3), "zb-h1", FIRST_HALF), (Layout(pp=2), "zb-v", ("embed",)),
    (Layout(pp=2), "zb-v", ("layers", "norm")), (Layout(pp=2, dp=2, zero=3), "gpipe", ("layers",)),
], ids=str)
def test_parameters_may_be_frozen(ranks: RankPool, layout: Layout, schedule: str,
                                  frozen: tuple[str, ...]) -> None:
    """All of a first stage too, whose output then has no gradient."""
    one = norms(Layout(), schedule, frozen)
    for found in ranks.run(layout.world, norms, layout, schedule, frozen):
        copies = layout.dp  # each has all micro-batches here
        assert found == pytest.approx([copies * norm for norm in one], rel=1e-6)


def whole_bytes(part: Part) -> int:
    """Of parameters that FSDP has gathered and not let go."""
    return sum(parameter._unsharded_param.untyped_storage().nbytes()
               for module in part.stage.modules() if isinstance(module, FSDPModule)
               for group in module._get_fsdp_state()._fsdp_param_groups
               for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param"))


def gathered(schedule: str) -> tuple[bool, list[int]]:
    """Whether parameters were whole at some time, and bytes of those that still are after a step
    and after an evaluation."""
    spread = spread_over("tied", Layout(pp=2, dp=2, zero=3), schedule)
    optimizer = Optimizer(spread.held, OptimizerConfig(), spread.mesh.axis("dp_cp_tp"))
    micro_batches, seen = data(spread.model.spec.vocab_size)[0][:4], []

    def phase(name: str) -> Any:
        seen.append(sum(map(whole_bytes, spread.parts)))
        return nullcontext()

    train_step(spread, optimizer, micro_batches, phase=phase)
    after = [sum(map(whole_bytes, spread.parts))]
    evaluate(spread, micro_batches)
    return any(seen), [*after, sum(map(whole_bytes, spread.parts))]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
def test_no_parameter_stays_whole(ranks: RankPool, schedule: str) -> None:
    by_rank = ranks.run(4, gathered, schedule)
    assert all(after == [0, 0] for _, after in by_rank)
    assert any(some for some, _ in by_rank)


def held_at_once(schedule: str) -> tuple[int, int]:
    """(the most micro-batches times stages whose activations this rank held at once, how many it
    still holds at the end)."""
    spread = spread_over("deep", Layout(pp=4), schedule)
    pipeline = spread.pipeline
    assert pipeline is not None
    live: Counter[tuple[int, int]] = Counter()
    most = 0

    class Saved:
        def __init__(self, tensor: Tensor, key: tuple[int, int]) -> None:
            self.tensor = tensor
            live[key] += 1
            weakref.finalize(self, live.subtract, [key])

    through = pipeline._through

    def noted(stage: int, batch: Any, x_TD: Tensor | None, score: Any, k: int) -> Tensor:
        nonlocal most
        with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: Saved(tensor, (stage, k)), lambda saved: saved.tensor):
            out = through(stage, batch, x_TD, score, k)
        live[stage, k] += 1
        weakref.finalize(out, live.subtract, [(stage, k)])
        most = max(most, sum(count > 0 for count in live.values()))
        return out

    with mock.patch.object(pipeline, "_through", noted):
        backward(spread, 8)
    return most, sum(count > 0 for count in live.values())


@pytest.mark.parametrize("schedule", NAMES)
def test_activations_live_as_long_as_the_schedule_says(ranks: RankPool, schedule: str) -> None:
    """At p = 4, m = 8: 1f1b's first rank holds 4 and gpipe's 8. Where the backward is split,
    only the inputs of products wait for its second part."""
    made = make_schedule(schedule, 4, 8)
    by_rank = ranks.run(4, held_at_once, schedule)
    assert [left for _, left in by_rank] == [0, 0, 0, 0]
    for (most, _), bound in zip(by_rank, activations_in_flight(made), strict=True):
        assert 0 < most <= bound if made.splits_backward else most == bound


def kept_of_a_dropped_model(layout: Layout) -> int:
    """Parameters that are still in memory when nobody has the model any more."""

    def trained() -> list[weakref.ref[Any]]:
        spread = spread_over("tied", layout, "zb-v")
        optimizer = Optimizer(spread.held, OptimizerConfig(), spread.mesh.axis("dp_cp_tp"))
        train_step(spread, optimizer, data(spread.model.spec.vocab_size)[0][:4])
        return [weakref.ref(parameter) for parameter in spread.model.parameters()]

    found = trained()
    deadline = time.monotonic() + 60.0  # gloo's threads may have tensors some time longer
    while True:
        gc.collect()
        left = sum(reference() is not None for reference in found)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2, zero=2),
                                    Layout(pp=2, dp=2, zero=3)], ids=str)
def test_a_dropped_model_leaves_memory(ranks: RankPool, layout: Layout) -> None:
    assert ranks.run(layout.world, kept_of_a_dropped_model, layout) == [0] * layout.world


def test_deferred_gradients_are_those_of_a_whole_backward() -> None:
    def gradients(deferred: bool) -> dict[str, Tensor]:
        model = init_weights(Decoder(MODELS["everything"]()), 3, std=0.2)
        batch = data(model.spec.vocab_size)[0][2].batch(CPU)
        later = DeferredGrads(model) if deferred else None
        recorded = later.record() if later is not None else []
        loss = model(batch).square().mean()
        if later is not None:
            later.stop()
        loss.backward()
        if deferred:
            assert all(p.grad is None for p in model.parameters())
            assert any(products for _, _, products in recorded)
            DeferredGrads.make(recorded)
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    whole, apart = gradients(False), gradients(True)
    assert whole.keys() == apart.keys()
    for name, grad in whole.items():
        torch.testing.assert_close(apart[name], grad, rtol=1e-6, atol=1e-7, msg=name)


def test_one_gradient_of_a_head_waits_and_not_one_of_each_micro_batch() -> None:
    def gradients(deferred: bool) -> dict[str, Tensor]:
        model = init_weights(Decoder(MODELS["untied"]()), 3, std=0.2)
        later = DeferredGrads(model) if deferred else None
        waiting = []
        for micro_batch in data(model.spec.vocab_size)[0][:3]:
            recorded = later.record() if later is not None else []
            stage = Stage(model, Mesh.single().axis("tp"), False, True)
            loss = stage(micro_batch.batch(CPU), micro_batch.targets_T, torch.full((48,), 0.01))
            loss.backward()
            if later is not None:
                later.stop()
                if waiting:
                    later.join(recorded, waiting[0])
                waiting.append(recorded)
                rows = [leaf.grad is not None for one in waiting for _, leaf, _ in one
                        if leaf.shape[0] == model.spec.vocab_size]
                assert sum(rows) == 2  # the embedding's and the head's
        arrived: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
        for recorded in waiting:
            DeferredGrads.make(recorded)
        assert len(arrived) == len(waiting) * len(list(model.parameters()))
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    whole, apart = gradients(False), gradients(True)
    assert whole.keys() == apart.keys()
    for name, grad in whole.items():
        torch.testing.assert_close(apart[name], grad, rtol=1e-6, atol=1e-7, msg=name)


@given(st.integers(1, 24), st.integers(1, 8), st.sampled_from([64, 2000, 40000]))
def test_the_default_cut_is_the_cheapest(layers: int, stages: int, vocab: int) -> None:
    from dataclasses import replace

    spec = replace(tiny(True, layers), vocab_size=vocab)
    if layers < stages:
        with pytest.raises(ValueError, match="needs as many layers"):
            split_layers(spec, stages)
        return
    cuts = split_layers(spec, stages)
    assert [i for part in cuts for i in part] == list(range(layers))
    head = head_layers(spec)

    def dearest(counts: Any) -> float:
        return max([*counts[:-1], counts[-1] + head])

    if layers <= 9 and stages <= 4:
        best = min(dearest(counts) for counts in product(range(1, layers + 1), repeat=stages)
                   if sum(counts) == layers)
        assert dearest([len(part) for part in cuts]) == best


def test_a_given_cut_has_to_add_up() -> None:
    spec = tiny(True, 4)
    assert [list(r) for r in split_layers(spec, 2, (3, 1))] == [[0, 1, 2], [3]]
    with pytest.raises(ValueError, match="2 numbers from 1 up that add up to 4"):
        split_layers(spec, 2, (3, 2))


def test_layers_keep_their_names() -> None:
    """Case 12: a stage's layers are called what they are called in the whole model."""
    whole = Decoder(tiny(False))
    names = {name for name, _ in whole.named_parameters()}
    stages = [cut(whole, range(0, 1), True, False), cut(whole, range(1, 3), False, False),
              cut(whole, range(3, 4), False, True)]
    found = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(found) == sorted(names)
    assert "layers.2.attn.qkv.weight" in dict(stages[1].named_parameters())
