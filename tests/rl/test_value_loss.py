"""The critic's loss: golden numbers, gradients of a written-out reference, masks."""

from __future__ import annotations

import pytest
import torch

from kilter.rl.value_loss import value_losses
from tests.rl.flat import GOLDEN, Step, gradient, leaf


@pytest.mark.parametrize(("value", "loss"), GOLDEN["value_clip"]["cases"].items())
def test_golden_value_clip(value: str, loss: float) -> None:
    case = GOLDEN["value_clip"]
    found, _ = value_losses(values_T=torch.tensor([float(value)]),
                            old_values_T=torch.tensor([case["old"]]),
                            returns_T=torch.tensor([float(case["target"])]),
                            mask_T=torch.tensor([True]), clip=case["eps"])
    assert float(found) == pytest.approx(loss, abs=1e-7)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_losses_gradients_and_counts_are_those_of_loops(clip: float | None) -> None:
    step = Step.random(2)
    values, old, returns = (step.values(seed) for seed in (3, 4, 5))
    mine, theirs = leaf(values), leaf(values)
    losses, clipped = value_losses(values_T=mine, old_values_T=old, returns_T=returns,
                                   mask_T=step.mask_T, clip=clip)
    terms, count = [], 0
    for s in range(step.num_seqs):
        for t in step.actions(s):
            v = theirs[t]
            term = (v - returns[t]) ** 2
            if clip is not None:
                held = v
                if v > old[t] + clip:
                    held = old[t] + clip
                elif v < old[t] - clip:
                    held = old[t] - clip
                if (held - returns[t]) ** 2 > term:
                    term, count = (held - returns[t]) ** 2 + 0.0 * v, count + 1
            terms.append(0.5 * term)
    expected = torch.stack(terms).sum()
    assert losses.sum().item() == pytest.approx(expected.item())
    assert torch.allclose(gradient(losses.sum(), mine), gradient(expected, theirs), atol=1e-12)
    assert int(clipped) == count and (count > 0) == (clip is not None)


def test_masked_slots_may_hold_anything() -> None:
    mask = torch.tensor([True, False])
    nan = torch.tensor([1.0, torch.nan])
    values = leaf(nan)
    losses, clipped = value_losses(values_T=values, old_values_T=nan, returns_T=nan + 1.0,
                                   mask_T=mask, clip=0.2)
    assert losses.tolist() == [0.5, 0.0] and float(clipped) == 0.0
    assert gradient(losses.sum(), values).tolist() == [-1.0, 0.0]


def test_within_the_clip_the_gradient_is_whole() -> None:
    values = leaf(torch.tensor([0.55]))
    losses, clipped = value_losses(values_T=values, old_values_T=torch.tensor([0.5]),
                                   returns_T=torch.tensor([1.0]), mask_T=torch.tensor([True]),
                                   clip=0.2)
    assert float(gradient(losses.sum(), values)) == pytest.approx(-0.45) and float(clipped) == 0.0


def test_what_cannot_be_is_refused() -> None:
    x, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="clip is 0"):
        value_losses(values_T=x, old_values_T=x, returns_T=x, mask_T=mask, clip=0.0)
    with pytest.raises(ValueError, match="arguments swapped"):
        value_losses(values_T=x, old_values_T=x, returns_T=mask, mask_T=x)
