"""Pipelines on real ranks: the schedule's order, one device's bits and gradients, tied heads."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.parity import MODELS, data, tiny
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.parallel.apply import Spread, apply
from kilter.parallel.norm import gradient_norm
from kilter.parallel.pipeline.executor import PipelineConfig
from kilter.parallel.pipeline.generators import NAMES, make_schedule
from kilter.parallel.pipeline.schedule import Action
from kilter.parallel.pipeline.stage import DeferredGrads, cut, head_layers, split_layers
from kilter.train.step import local_rows, token_loss
from tests.ranks import RankPool

CPU = torch.device("cpu")


def spread_over(model: str, layout: Layout, schedule: str) -> Spread:
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        decoder = Decoder(MODELS[model]())
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


def norms(layout: Layout, schedule: str) -> list[float]:
    spread = spread_over("tied", layout, schedule)
    rows = [local_rows(spread, m, CPU) for m in data(spread.model.spec.vocab_size)[0][:4]]
    spread.backward_all([batch for batch, _ in rows],
                        lambda forward, k: token_loss(forward, *rows[k], 0.01),
                        lambda _: nullcontext())
    spread.finish()
    return [gradient_norm(spread.held, spread.mesh.axis("world"), p) for p in (2.0, math.inf)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_norms_count_all_stages_and_the_tied_head_once(ranks: RankPool, schedule: str) -> None:
    """Case 3, and tied weights."""
    one = norms(Layout(), schedule)
    for found in ranks.run(2, norms, Layout(pp=2), schedule):
        assert found == pytest.approx(one, rel=1e-6)


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
