"""What several tensor-parallel ranks hold stays the same bits under data parallelism too, where
each of them adds up its copy's gradients with other ranks and in another buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.parity import everything
from kilter.mesh.layout import Layout
from kilter.models.spec import ModelSpec
from kilter.parallel.shared import SharedGrads, may_differ
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import train_step
from tests.parallel.gradients import Parts, document, spread_model
from tests.ranks import RankPool


def one_kv_head(heads: int) -> ModelSpec:
    """With norms and biases everywhere; ranks have other numbers of vocabulary rows."""
    spec = everything()
    return replace(spec, num_heads=heads, layers=spec.layers[:2])


def after_steps(spec: ModelSpec, layout: Layout, steps: int) -> Parts:
    """Every element that a rank has after some steps of AdamW."""
    spread = spread_model(spec, layout)
    optimizer = Optimizer(spread.held, OptimizerConfig(lr=1e-2), spread.mesh.axis("dp_cp_tp"))
    dp = spread.mesh.axis("dp")
    for step in range(steps):
        draw = torch.Generator().manual_seed(step * dp.size + dp.index)
        train_step(spread, optimizer, [document(
            torch.randint(spec.vocab_size, (24,), generator=draw).tolist())])
    return {h.name: [(box.slices, part.detach().clone())
                     for box, _, part in h.shard.parts(h.tensor)] for h in spread.held}


def test_copies_do_not_drift_apart(ranks: RankPool) -> None:
    """Case 26, where three data-parallel ranks are added up."""
    spec, layout = one_kv_head(4), Layout(dp=3, tp=2)
    found = ranks.run(layout.world, after_steps, spec, layout, 8, timeout=300)
    for name, [(_, whole)] in after_steps(spec, Layout(), 0).items():
        values = torch.full(whole.shape, torch.nan)
        for rank in found:
            for place, part in rank[name]:
                known = ~values[place].isnan()
                assert torch.equal(values[place][known], part[known]), name
                values[place] = part


def ranks_numbers(spec: ModelSpec, layout: Layout) -> tuple[Parts, Parts]:
    """All this rank's gradients, first this rank's number, after they agreed; and the elements
    that count, of this rank's place on the tensor axis."""
    spread = spread_model(spec, layout)
    for h in spread.held:
        h.tensor.grad = torch.full_like(h.tensor, spread.mesh.rank)
    SharedGrads(spread.held, spread.shards, spread.mesh).agree()
    own = {name: [(box.slices, torch.tensor(own)) for box, own in
                  zip(shard.boxes, shard.owned, strict=True)]
           for name, shard in spread.shards.items()}
    return {h.name: [(box.slices, part.clone()) for box, _, part in h.shard.parts(h.tensor.grad)
                     if h.tensor.grad is not None] for h in spread.held}, own


@pytest.mark.parametrize("layout", [
    Layout(dp=2, tp=4),
    Layout(dp=2, tp=4, zero=2),  # ranks have 2 and 1 query heads: cut in other places
    Layout(dp=4, tp=2, replicate=2, zero=3)], ids=str)
def test_all_take_the_gradient_of_the_rank_that_counts(ranks: RankPool, layout: Layout) -> None:
    """Of each element, within each copy of the model."""
    spec = one_kv_head(6)
    found = ranks.run(layout.world, ranks_numbers, spec, layout, timeout=300)
    whole = {name: part.shape for name, [(_, part)] in after_steps(spec, Layout(), 0).items()}
    copies: dict[int, list[int]] = {}
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        copies.setdefault(at["replicate" if layout.zero else "dp"], []).append(rank)
    taken = 0
    for members in copies.values():
        for name, shape in whole.items():
            wanted = torch.full(shape, torch.nan)
            for rank in members:
                counts = torch.zeros(shape, dtype=torch.bool)
                for place, own in found[rank][1][name]:
                    counts[place] = own
                for place, _ in found[rank][0][name]:
                    wanted[place] = torch.where(counts[place], float(rank), wanted[place])
            for rank in members:
                for place, part in found[rank][0][name]:
                    assert torch.equal(part, wanted[place]), name
                    taken += int((part != rank).sum())
    assert taken > 32 * 10


def test_sums_of_two_need_no_agreement() -> None:
    assert not any(map(may_differ, [
        Layout(tp=8), Layout(dp=8), Layout(dp=2, tp=2), Layout(dp=2, tp=2, zero=3),
        Layout(dp=4, tp=2, replicate=2, zero=3), Layout(pp=4, dp=2, tp=2)]))
    assert all(map(may_differ, [
        Layout(dp=3, tp=2), Layout(dp=2, cp=2, tp=2), Layout(dp=2, cp=2, tp=2, zero=1),
        Layout(dp=6, tp=2, replicate=2, zero=2), Layout(dp=3, tp=2, replicate=3, zero=1)]))
