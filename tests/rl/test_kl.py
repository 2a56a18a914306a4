"""KL estimators as values and as losses, and the controllers of their weight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilter.rl.kl import AdaptiveKL, Estimator, FixedKL, kl_losses, kl_values
from tests.rl.flat import GOLDEN, Step, gradient, leaf

CASE = GOLDEN["kl_estimators"]
P, Q = (torch.tensor(CASE[name], dtype=torch.float64) for name in "pq")
ALL = torch.ones(3, dtype=torch.bool)


def expected_value(kind: Estimator) -> float:
    """Over actions that p samples."""
    values = kl_values(kind, logprobs_T=P.log(), ref_logprobs_T=Q.log(), mask_T=ALL)
    return float((P * values).sum())


def test_golden_values() -> None:
    assert expected_value("k1") == pytest.approx(CASE["kl"], abs=1e-7)
    assert expected_value("k2") == pytest.approx(CASE["expected_k2"], abs=1e-7)
    assert expected_value("k3") == pytest.approx(CASE["expected_k3"], abs=1e-7)


def gradient_by_logits(kind: Estimator) -> list[float]:
    """Expected over samples of p, which are not differentiated."""
    logits = leaf(P.log())
    losses = kl_losses(kind, logprobs_T=logits.log_softmax(-1), ref_logprobs_T=Q.log(), mask_T=ALL)
    return gradient((P * losses).sum(), logits).tolist()


def test_golden_gradients() -> None:
    golden = CASE["gradient_wrt_logits"]
    for kind in ("k1", "k2", "k3"):
        assert gradient_by_logits(kind) == pytest.approx(  # type: ignore[arg-type]
            golden[f"{kind}_as_loss"], abs=1e-6)
    logits = leaf(P.log())
    p = logits.softmax(-1)
    exact = gradient((p * (p.log() - Q.log())).sum(), logits).tolist()
    assert exact == pytest.approx(golden["exact_reverse_kl"], abs=1e-6)


def test_k3_has_the_gradient_of_the_forward_divergence() -> None:
    logits = leaf(P.log())
    forward = (Q * (Q.log() - logits.log_softmax(-1))).sum()
    assert gradient_by_logits("k3") == pytest.approx(gradient(forward, logits).tolist(), abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradients_are_those_of_loops(kind: Estimator) -> None:
    step = Step.random(1)
    new, ref = step.values(2), step.values(3)
    mine, theirs = leaf(new), leaf(new)
    found = gradient(kl_losses(kind, logprobs_T=mine, ref_logprobs_T=ref, mask_T=step.mask_T).sum(),
                     mine)
    terms = []
    for s in range(step.num_seqs):
        for t in step.actions(s):
            d = theirs[t] - ref[t]
            terms.append({"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kind])
    assert torch.allclose(found, gradient(torch.stack(terms).sum(), theirs), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-60, 0, width=32), st.floats(-60, 0, width=32)), min_size=1))
def test_k3_is_never_negative_and_all_are_zero_at_equal(pairs: list[tuple[float, float]]) -> None:
    new, ref = torch.tensor(pairs).unbind(1)
    mask = torch.ones(len(pairs), dtype=torch.bool)

    def values(kind: Estimator, a: Tensor, b: Tensor) -> Tensor:
        return kl_values(kind, logprobs_T=a, ref_logprobs_T=b, mask_T=mask)

    assert bool((values("k3", new, ref) >= 0.0).all())
    nearly = torch.nextafter(new, torch.tensor(-100.0))
    assert bool((values("k3", new, nearly) >= 0.0).all())
    for kind in ("k1", "k2", "k3"):
        assert values(kind, new, new).tolist() == [0.0] * len(pairs)  # type: ignore[arg-type]


def test_k1_may_be_negative() -> None:
    found = kl_values("k1", logprobs_T=torch.tensor([-2.0]), ref_logprobs_T=torch.tensor([-1.0]),
                      mask_T=torch.tensor([True]))
    assert found.tolist() == [-1.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_masked_slots_may_hold_anything(kind: Estimator) -> None:
    mask = torch.tensor([False, True, False])
    new = leaf(torch.tensor([torch.nan, -1.0, -1.0]))
    losses = kl_losses(kind, logprobs_T=new, ref_logprobs_T=torch.tensor([-1.0, -2.0, torch.inf]),
                       mask_T=mask)
    assert losses[0] == losses[2] == 0.0 and bool(losses.isfinite().all())
    found = gradient(losses.sum(), new)
    assert found[0] == found[2] == 0.0 and bool(found.isfinite().all())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_clamp_bounds_value_and_gradient(kind: Estimator) -> None:
    new = leaf(torch.tensor([-100.0, 0.0, -1.1], dtype=torch.float64))
    ref = torch.tensor([0.0, -100.0, -1.0], dtype=torch.float64)
    losses = kl_losses(kind, logprobs_T=new, ref_logprobs_T=ref, mask_T=ALL, clamp=10.0)
    low = -10.0 if kind == "k1" else 10.0
    assert losses[:2].tolist() == [low, 10.0] and abs(float(losses[2].detach())) < 0.2
    found = gradient(losses.sum(), new)
    assert found[:2].tolist() == [0.0, 0.0] and found[2] != 0.0


def test_values_carry_no_gradient_and_wrong_names_are_refused() -> None:
    new = leaf(P.log())
    assert not kl_values("k2", logprobs_T=new, ref_logprobs_T=Q.log(), mask_T=ALL).requires_grad
    with pytest.raises(ValueError, match="one of k1, k2, k3"):
        kl_values("kl", logprobs_T=new, ref_logprobs_T=Q, mask_T=ALL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="arguments swapped"):
        kl_values("k1", logprobs_T=new, ref_logprobs_T=ALL, mask_T=Q)
    with pytest.raises(ValueError, match="clamp"):
        kl_values("k1", logprobs_T=new, ref_logprobs_T=Q, mask_T=ALL, clamp=0.0)


@pytest.mark.parametrize(("kl", "beta"), GOLDEN["adaptive_kl"]["next_beta"].items())
def test_golden_adaptive_kl(kl: str, beta: float) -> None:
    case = GOLDEN["adaptive_kl"]
    control = AdaptiveKL(beta=case["beta"], target=case["target"], horizon=case["horizon"])
    assert control.updated(kl=float(kl), count=case["n"]).beta == pytest.approx(beta, abs=5e-8)


def test_controllers() -> None:
    assert FixedKL(0.1).updated(kl=99.0, count=1).beta == 0.1
    control = AdaptiveKL(0.2, 6.0)
    for _ in range(2000):  # a divergence that answers to its weight
        control = control.updated(kl=1.2 / control.beta, count=256)
    assert math.isclose(1.2 / control.beta, 6.0, rel_tol=1e-3)
    with pytest.raises(ValueError, match="target is 0"):
        AdaptiveKL(0.2, 0.0)
    with pytest.raises(ValueError, match="negative"):
        FixedKL(-1.0)
