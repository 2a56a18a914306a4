"""Policy losses: golden numbers, gradients of written-out references, masks and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilter.rl.aggregation import Counts, aggregation_weights, weighted_sum
from kilter.rl.policy_loss import (
    DIAGNOSTICS,
    PolicyLoss,
    cispo,
    diagnostic_means,
    entropy_bonus,
    gspo,
    ppo,
    reinforce,
)
from tests.rl.flat import GOLDEN, Step, gradient, leaf

LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def one(ratio: float, advantage: float, **options: float) -> float:
    """The PPO loss of one action."""
    return float(ppo(logprobs_T=torch.tensor([math.log(ratio)], dtype=torch.float64),
                     old_logprobs_T=torch.zeros(1, dtype=torch.float64),
                     advantages_T=torch.tensor([advantage], dtype=torch.float64),
                     mask_T=torch.tensor([True]), eps_low=LOW, eps_high=HIGH,
                     **options).losses_T)


@pytest.mark.parametrize("case", GOLDEN["ppo_clip"]["cases"], ids=str)
def test_golden_ppo_clip(case: dict[str, float]) -> None:
    assert GOLDEN["ppo_clip"]["eps_low"] == LOW and GOLDEN["ppo_clip"]["eps_high"] == HIGH
    assert one(case["ratio"], case["advantage"]) == pytest.approx(case["loss"])


def test_golden_dual_clip() -> None:
    case = GOLDEN["ppo_clip"]["dual_clip_c3"]
    assert one(case["ratio"], case["advantage"], dual_clip=3.0) == pytest.approx(case["loss"])
    for below in GOLDEN["ppo_clip"]["cases"][:4]:
        found = one(below["ratio"], below["advantage"], dual_clip=3.0)
        assert found == pytest.approx(below["loss"])


def test_golden_gspo_ratio() -> None:
    case = GOLDEN["gspo_ratio"]
    logprobs = leaf(torch.tensor(case["log_ratios"], dtype=torch.float64))
    found = gspo(logprobs_T=logprobs, old_logprobs_T=torch.zeros(4, dtype=torch.float64),
                 advantages_T=torch.ones(4, dtype=torch.float64), sequence_T=torch.zeros(4).long(),
                 num_seqs=1, mask_T=torch.ones(4, dtype=torch.bool), eps_low=0.5, eps_high=0.5)
    assert found.losses_T.tolist() == pytest.approx([-case["sequence_ratio"]] * 4, abs=1e-6)
    assert math.exp(sum(case["log_ratios"])) == pytest.approx(case["not_the_product"], abs=1e-6)
    assert diagnostic_means(found.sums)["ratio"] == pytest.approx(case["sequence_ratio"], abs=1e-6)


def ppo_by_loops(step: Step, new: Tensor, old: Tensor, adv: Tensor, dual: float | None) -> Tensor:
    terms = []
    for s in range(step.num_seqs):
        for t in step.actions(s):
            r = torch.exp(new[t] - old[t])
            plain = r * adv[t]
            held = (1 - LOW if r < 1 - LOW else 1 + HIGH if r > 1 + HIGH else r) * adv[t]
            term = plain if plain <= held else held
            if dual is not None and adv[t] < 0 and term < dual * adv[t]:
                term = dual * adv[t]
            terms.append(-term)
    return torch.stack(terms).sum() / len(terms)


def gspo_by_loops(step: Step, new: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    terms = []
    for s in range(step.num_seqs):
        at = step.actions(s)
        r = torch.exp(sum(new[t] - old[t] for t in at) / len(at))
        a = adv[at[0]]
        held = (1 - LOW if r < 1 - LOW else 1 + HIGH if r > 1 + HIGH else r) * a
        terms.append(-(r * a if r * a <= held else held))
    return torch.stack(terms).sum() / len(terms)


def cispo_by_loops(step: Step, new: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    terms = []
    for s in range(step.num_seqs):
        for t in step.actions(s):
            r = math.exp(float(new[t].detach()) - float(old[t]))
            terms.append(-min(max(r, 1 - LOW), 1 + HIGH) * adv[t] * new[t])
    return torch.stack(terms).sum() / len(terms)


def reinforce_by_loops(step: Step, new: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    terms = [-adv[t] * new[t] for s in range(step.num_seqs) for t in step.actions(s)]
    return torch.stack(terms).sum() / len(terms)


Loss = Callable[..., PolicyLoss]
BOUNDS = {"eps_low": LOW, "eps_high": HIGH}
CASES: dict[str, tuple[Loss, dict[str, float], Callable[..., Tensor], str]] = {
    "ppo": (ppo, BOUNDS, lambda *x: ppo_by_loops(*x, None), "token_mean"),
    "dual": (ppo, {**BOUNDS, "dual_clip": DUAL}, lambda *x: ppo_by_loops(*x, DUAL), "token_mean"),
    "gspo": (gspo, BOUNDS, gspo_by_loops, "seq_mean_token_mean"),
    "cispo": (cispo, BOUNDS, cispo_by_loops, "token_mean"),
    "reinforce": (reinforce, {}, reinforce_by_loops, "token_mean"),
}


def call(name: str, step: Step, logprobs: Tensor, old: Tensor, adv: Tensor) -> PolicyLoss:
    function, options, _, _ = CASES[name]
    extra: dict[str, Any] = {}
    if name == "gspo":
        extra = {"sequence_T": step.sequence_T, "num_seqs": step.num_seqs}
    return function(logprobs_T=logprobs, old_logprobs_T=old, advantages_T=adv, mask_T=step.mask_T,
                    **options, **extra)


def data(seed: int, name: str) -> tuple[Step, Tensor, Tensor, Tensor]:
    """Ratios far enough from 1 that every bound holds somewhere."""
    step = Step.random(seed)
    adv = step.values(seed + 1)
    if name == "gspo":
        adv = torch.where(step.mask_T, step.values(seed + 1).nan_to_num()[:8][step.sequence_T],
                          torch.nan)
    scale = 0.5 if name == "gspo" else 1.0
    return step, step.values(seed + 2, scale=scale), step.values(seed + 3, scale=scale), adv


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_losses_and_gradients_are_those_of_loops(name: str, seed: int) -> None:
    step, new, old, adv = data(10 * seed, name)
    _, _, reference, mode = CASES[name]
    mine, theirs = leaf(new), leaf(new)
    weights = aggregation_weights(
        mode, mask_T=step.mask_T, sequence_T=step.sequence_T,  # type: ignore[arg-type]
        group_S=step.group_S, counts=Counts.of(mask_T=step.mask_T, sequence_T=step.sequence_T,
                                               group_S=step.group_S))
    loss = weighted_sum(call(name, step, mine, old, adv).losses_T, weights_T=weights)
    expected = reference(step, theirs, old, adv)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    found, wanted = gradient(loss, mine), gradient(expected, theirs)
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert wanted.abs().sum() > 0.0


@pytest.mark.parametrize("name", CASES)
def test_masked_slots_may_hold_anything(name: str) -> None:
    """NaN, infinite or huge: neither loss nor gradient nor diagnostics know."""
    step, new, old, adv = data(7, name)
    results = []
    for junk in (0.0, torch.nan, torch.inf, -1e30):
        new, old, adv = (torch.where(step.mask_T, x, junk) for x in (new, old, adv))
        logprobs = leaf(new)
        found = call(name, step, logprobs, old, adv)
        assert found.losses_T[~step.mask_T].tolist() == [0.0] * int((~step.mask_T).sum())
        results.append((found.losses_T.sum().detach(), found.sums,
                        gradient(found.losses_T.sum(), logprobs)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        assert all(bool(x.isfinite().all()) for x in other)


@pytest.mark.parametrize("name", ["ppo", "dual", "gspo"])
def test_equal_policies_have_ratio_one_and_the_policy_gradient(name: str) -> None:
    step, new, _, adv = data(3, name)
    logprobs = leaf(new)
    found = call(name, step, logprobs, new, adv)
    mask = step.mask_T
    assert torch.equal(found.losses_T[mask].detach(), -adv[mask])
    assert torch.allclose(gradient(found.losses_T.sum(), logprobs)[mask], -adv[mask])
    means = diagnostic_means(found.sums)
    assert means == {"tokens": float(mask.sum()), "ratio": 1.0, "clipped_low": 0.0,
                     "clipped_high": 0.0, "dual_clipped": 0.0, "kl": 0.0}


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_reaches_old_or_advantages(name: str) -> None:
    step, new, old, adv = data(5, name)
    logprobs, old, adv = leaf(new), leaf(old), leaf(adv)
    call(name, step, logprobs, old, adv).losses_T.sum().backward()
    assert old.grad is None and adv.grad is None and logprobs.grad is not None


def test_diagnostics_count_the_clips_that_hold() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5, 5.0, 9.0])
    adv = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, torch.nan])
    mask = torch.tensor([True] * 6 + [False])
    sums = ppo(logprobs_T=ratio.log(), old_logprobs_T=torch.zeros(7), advantages_T=adv, mask_T=mask,
               dual_clip=3.0).sums
    assert dict(zip(DIAGNOSTICS, sums.tolist(), strict=True)) == pytest.approx({
        "tokens": 6, "ratio": float(ratio[:6].sum()), "clipped_low": 1, "clipped_high": 1,
        "dual_clipped": 1, "kl": float((ratio - 1 - ratio.log())[:6].sum())}, rel=1e-5)
    assert diagnostic_means(torch.zeros(6, dtype=torch.float64))["ratio"] == 0.0


@pytest.mark.parametrize("name", CASES)
def test_diagnostics_of_parts_add_up(name: str) -> None:
    step, new, old, adv = data(9, name)
    whole = call(name, step, new, old, adv).sums
    parts = []
    for share in (range(3), range(3, 8)):
        rows = step.tokens_of(share)
        parts.append(call(name, step.part(share), new[rows], old[rows], adv[rows]).sums)
    assert torch.allclose(torch.stack(parts).sum(0), whole, rtol=1e-12)


@settings(deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(-3.0, 3.0))
def test_losses_are_finite_however_far_the_policy_went(log_ratio: float, advantage: float) -> None:
    logprobs = leaf(torch.tensor([log_ratio]))
    found = ppo(logprobs_T=logprobs, old_logprobs_T=torch.zeros(1), mask_T=torch.tensor([True]),
                advantages_T=torch.tensor([advantage]))
    assert math.isfinite(found.losses_T.item()) and bool(found.sums.isfinite().all())
    assert bool(gradient(found.losses_T.sum(), logprobs).isfinite().all())


def test_cispo_keeps_the_gradient_that_ppo_drops() -> None:
    logprobs = leaf(torch.tensor([math.log(9.0)], dtype=torch.float64))
    where = {"logprobs_T": logprobs, "old_logprobs_T": torch.zeros(1, dtype=torch.float64),
             "advantages_T": torch.ones(1, dtype=torch.float64), "mask_T": torch.tensor([True])}
    assert float(gradient(ppo(**where).losses_T.sum(), logprobs)) == 0.0
    assert float(gradient(cispo(**where).losses_T.sum(), logprobs)) == pytest.approx(-5.0)


@pytest.mark.parametrize("name", CASES)
def test_swapped_arguments_are_refused(name: str) -> None:
    step, new, old, adv = data(1, name)
    function, options, _, _ = CASES[name]
    extra: dict[str, Any] = {}
    if name == "gspo":
        extra = {"sequence_T": step.sequence_T, "num_seqs": step.num_seqs}
    with pytest.raises(ValueError, match="were two arguments swapped"):
        function(logprobs_T=new, old_logprobs_T=old, advantages_T=step.mask_T, mask_T=adv,
                 **options, **extra)
    with pytest.raises(ValueError, match="were two arguments swapped"):
        function(logprobs_T=new, old_logprobs_T=old, advantages_T=adv, mask_T=step.mask_T.float(),
                 **options, **extra)
    with pytest.raises(ValueError, match="give one value per slot"):
        function(logprobs_T=new[:-1], old_logprobs_T=old, advantages_T=adv, mask_T=step.mask_T,
                 **options, **extra)
    with pytest.raises(TypeError):
        function(new, old, adv, step.mask_T)


def test_impossible_bounds_are_refused() -> None:
    for bounds in ({"eps_low": -0.1}, {"eps_low": 1.5}, {"eps_high": -0.1},
                   {"eps_high": math.nan}, {"dual_clip": 1.0}):
        with pytest.raises(ValueError, match="must"):
            ppo(logprobs_T=torch.zeros(1), old_logprobs_T=torch.zeros(1),
                advantages_T=torch.zeros(1), mask_T=torch.tensor([True]), **bounds)


def test_entropy_bonus_rewards_entropy() -> None:
    entropy = leaf(torch.tensor([torch.nan, 1.5]))
    loss = entropy_bonus(entropy, mask_T=torch.tensor([False, True]), coefficient=0.1)
    assert loss.tolist() == pytest.approx([0.0, -0.15])
    assert gradient(loss.sum(), entropy).tolist() == pytest.approx([0.0, -0.1])
