"""A step's numbers: every target weighs the same, the norm is the true one on any layout, and
nothing happens before everything is known to be finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilter.mesh import Layout, Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.apply import Spread, apply
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import (
    Loss,
    MicroBatch,
    NotFinite,
    StepResult,
    evaluate,
    token_losses,
    train_step,
)
from tests.ranks import RankPool

SPEC = ModelSpec("LlamaForCausalLM", 61, 16, 32, 4, 2, 4, (LayerSpec(RopeSpec()),) * 2, 64,
                 tied_head=True)


@dataclass(frozen=True)
class Rows:
    """One sequence with the targets that count."""

    tokens: tuple[int, ...]
    keep: int  # the first so many next tokens are targets

    @property
    def targets_T(self) -> Tensor:
        targets = torch.full((len(self.tokens),), -100)
        targets[:self.keep] = torch.tensor(self.tokens[1:self.keep + 1])
        return targets

    @property
    def valid(self) -> int:
        return self.keep

    def batch(self, device: torch.device) -> Batch:
        return Batch.of([self.tokens], device)


def rows(keeps: tuple[int, ...]) -> list[Rows]:
    draw = torch.Generator().manual_seed(1)
    return [Rows(tuple(torch.randint(61, (12,), generator=draw).tolist()), keep)
            for keep in keeps]


def spread_of(layout: Layout) -> Spread:
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        model = Decoder(SPEC)
    spread = apply(model, mesh)
    spread.initialise(seed=2, std=0.2)
    return spread


class Watched(Optimizer):
    """Notes the gradients it is given, by name and place."""

    def step(self, factor: float) -> None:
        self.seen = {h.name: [(box.slices, part.clone()) for box, own, part in
                              h.shard.parts(h.tensor.grad) if own]
                     for h in self._held if h.tensor.grad is not None}
        super().step(factor)


def step(layout: Layout, keeps: tuple[int, ...], max_norm: float | None = None
         ) -> tuple[StepResult, dict[str, Any]]:
    spread = spread_of(layout)
    optimizer = Watched(spread.held, OptimizerConfig(), spread.mesh.axis("dp_cp_tp"))
    dp = spread.mesh.axis("dp")
    result = train_step(spread, optimizer, rows(keeps)[dp.index::dp.size], max_norm=max_norm)
    return result, optimizer.seen


def reference(keeps: tuple[int, ...]) -> tuple[float, dict[str, Tensor]]:
    """Sum of all token losses over their number, by plain autograd on one whole model."""
    model = init_weights(Decoder(SPEC), 2, 0.2)
    losses = []
    for row in rows(keeps):
        logits = model(row.batch(torch.device("cpu")))
        losses.append(torch.nn.functional.cross_entropy(
            logits, row.targets_T, ignore_index=-100, reduction="sum"))
    loss = torch.stack(losses).sum() / sum(keeps)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()
                         if p.grad is not None}


@pytest.mark.parametrize("layout", [
    Layout(), Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=2), Layout(dp=2, zero=3),
    Layout(dp=4, replicate=2, zero=3), Layout(tp=2), Layout(dp=2, tp=2, zero=3)], ids=str)
def test_every_target_weighs_the_same(layout: Layout, ranks: RankPool) -> None:
    """Cases 1 and 6: 1 and 9 targets over ranks and micro-batches; the same true norm for all."""
    keeps = (1, 9, 0, 5)
    loss, grads = reference(keeps)
    outcomes = [step(layout, keeps)] if layout.world == 1 else ranks.run(
        layout.world, step, layout, keeps)
    norm = float(torch.stack([g.double().norm() for g in grads.values()]).norm())
    for result, _ in outcomes:
        assert result == outcomes[0][0]
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert (result.valid, result.tokens) == (sum(keeps), 36)  # without the one that has none
    for name, whole in grads.items():
        seen = torch.zeros_like(whole)
        for _, parts in outcomes:
            for place, part in parts.get(name, []):
                torch.testing.assert_close(part, whole[place], rtol=1e-4, atol=1e-6, msg=name)
                seen[place] += 1
        assert bool((seen == 1).all()), name


def test_held_out_loss_divides_sums_once() -> None:
    """Case 2: packs of very different numbers of targets."""
    spread = spread_of(Layout())
    parts = rows((1, 9))
    each = [evaluate(spread, [row]) for row in parts]
    loss, valid = evaluate(spread, parts)
    assert valid == 10
    assert loss == pytest.approx((each[0][0] + 9 * each[1][0]) / 10)
    assert loss != pytest.approx((each[0][0] + each[1][0]) / 2)


@pytest.mark.parametrize("share", [0.01, 0.9, 1.1])
def test_clipping_is_torchs(share: float) -> None:
    """A norm above and below what is allowed, on one device."""
    _, grads = reference((9, 3))
    parameters = [nn.Parameter(g.clone()) for g in grads.values()]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    norm = float(nn.utils.clip_grad_norm_(parameters, math.inf))
    max_norm = norm * share
    nn.utils.clip_grad_norm_(parameters, max_norm)
    result, seen = step(Layout(), (9, 3), max_norm)
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)  # before clipping
    for (name, whole), clipped in zip(grads.items(), parameters, strict=True):
        [(_, part)] = seen[name]
        torch.testing.assert_close(part, clipped.grad, rtol=1e-4, atol=1e-6)
        assert torch.equal(part == 0, whole == 0), name


def not_finite(layout: Layout, rank: int, what: str, config: OptimizerConfig) -> tuple[str, bool]:
    """Makes what one rank makes NaN, of the loss or of the first layer's gradient; the error, and
    whether all is as it was."""
    spread = spread_of(layout)
    optimizer = Optimizer(spread.held, config, spread.mesh.axis("dp_cp_tp"))
    dp = spread.mesh.axis("dp")
    before = [h.tensor.detach().clone() for h in spread.held]
    if spread.mesh.rank == rank and what == "loss":
        spread.parts[-1].stage.register_forward_hook(lambda *given: given[2] * torch.nan)
    if spread.mesh.rank == rank and what == "gradient":
        layer = spread.parts[0].stage.decoder.layers.get_submodule("0")
        layer.register_forward_hook(
            lambda *given: given[2].register_hook(lambda grad: grad * torch.inf) and None)
    with pytest.raises(NotFinite) as error:
        train_step(spread, optimizer, rows((4, 4, 4, 4))[dp.index::dp.size])
    same = all(torch.equal(h.tensor, old) for h, old in zip(spread.held, before, strict=True))
    clean = all(h.tensor.grad is None for h in spread.held)
    states = any(state.any() for states in optimizer.states().values() for state in states.values())
    return str(error.value), same and clean and not states


EVERY_WAY = [Layout(dp=4), Layout(dp=4, zero=1), Layout(dp=4, replicate=2, zero=2),
             Layout(dp=4, zero=3), Layout(dp=2, tp=2), Layout(dp=2, cp=2), Layout(dp=2, pp=2)]


@pytest.mark.parametrize("layout", EVERY_WAY, ids=str)
def test_nan_stops_all_ranks_and_names_the_one(layout: Layout, ranks: RankPool) -> None:
    outcomes = ranks.run(4, not_finite, layout, 3, "loss", OptimizerConfig())
    assert all(same for _, same in outcomes)
    assert len({text for text, _ in outcomes}) == 1
    assert "rank 3: the loss" in outcomes[0][0] and "rank 0: the loss" not in outcomes[0][0]


@pytest.mark.parametrize(("layout", "config"), [
    *((layout, OptimizerConfig()) for layout in EVERY_WAY),
    (Layout(dp=4, zero=3), OptimizerConfig("muon", offload=True))], ids=str)
def test_a_gradient_that_is_not_finite_is_named(layout: Layout, config: OptimizerConfig,
                                                ranks: RankPool) -> None:
    """The loss is finite; what the first layer gives back on one rank is not. First named is where
    backward came first."""
    outcomes = ranks.run(4, not_finite, layout, 1, "gradient", config)
    assert all(same for _, same in outcomes)
    (text,) = {text for text, _ in outcomes}
    assert "The loss is n" not in text and "the loss and" not in text
    assert "the gradients of layers.0.mlp.down.weight" in text
    assert "layers.1" not in text


def test_a_loss_that_one_rank_alone_sees_stops_all(ranks: RankPool) -> None:
    """Tensor-parallel ranks have the same loss and do not exchange it. Should one have another, its
    peers would step while it waits for them."""
    outcomes = ranks.run(2, stopped, 1)
    assert outcomes == ["rank 1: the loss"] * 2


def stopped(rank: int) -> str:
    """What is not finite, of a step in which only the value of one rank's loss is not."""
    spread = spread_of(Layout(tp=2))
    optimizer = Optimizer(spread.held, OptimizerConfig(), spread.mesh.axis("dp_cp_tp"))

    def losses(spread: Spread, micro_batches: Sequence[MicroBatch],
               rows: Sequence[tuple[Batch, Tensor]]) -> Loss:
        plain = token_losses(spread, micro_batches, rows)
        mine = spread.mesh.rank == rank
        return lambda forward, k, count: plain(forward, k, count) + (torch.inf if mine else 0.0)

    with pytest.raises(NotFinite) as error:
        train_step(spread, optimizer, rows((4, 4)), losses=losses)
    return str(error.value).partition("Not finite: ")[2].rstrip(".")


def test_a_step_without_targets_is_an_error() -> None:
    spread = spread_of(Layout())
    optimizer = Optimizer(spread.held, OptimizerConfig(), spread.mesh.axis("dp_cp_tp"))
    with pytest.raises(ValueError, match="No target of this step counts"):
        train_step(spread, optimizer, rows((0, 0)))
    with pytest.raises(ValueError, match="No target of the evaluation data counts"):
        evaluate(spread, rows((0,)))
