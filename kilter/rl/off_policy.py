"""Corrections for actions that another policy sampled: old weights, or an engine that rounds
otherwise.

With the ratio r = π_old(a) / π_behaviour(a), where π_old is the trainer's policy at the start of
the step, an action's loss is multiplied with

    tis        min(r, cap)                              truncated importance sampling
    mis        r in [low, high], else 0                 masked importance sampling
    icepop     the same, with a band such as [0.5, 5]   arXiv 2510.18855
    geometric  1 if the geometric mean of the sequence's r is in [low, high], else 0

No gradient flows through any of them. Where the engine gives the trainer's bits and weights are
fresh, r is exactly 1 and all of them are 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kilter.rl.masks import check_mask, only, sequence_means
from kilter.rl.policy_loss import MAX_LOG_RATIO


@torch.no_grad()
def truncated_weights(*, old_logprobs_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, cap: float
                      ) -> Tensor:
    """float [T]: min(r, cap) at actions, 0 elsewhere (tis).

    Raises:
        ValueError: for a cap that is not positive, a mask that is not bool, or other shapes.
    """
    if not cap > 0.0:
        raise ValueError(f"cap is {cap} but must be positive.")
    ratio_T = _log_ratios(old_logprobs_T, behaviour_T, mask_T).exp()
    return only(ratio_T.clamp_max(cap), mask_T)


@torch.no_grad()
def banded_weights(*, old_logprobs_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, low: float,
                   high: float) -> Tensor:
    """float [T]: r at actions where low ≤ r ≤ high, 0 elsewhere (mis, icepop). A token that is
    left out still counts in what the losses are divided by.

    Raises:
        ValueError: for an empty band, a mask that is not bool, or other shapes.
    """
    _check_band(low, high)
    ratio_T = _log_ratios(old_logprobs_T, behaviour_T, mask_T).exp()
    return only(ratio_T, mask_T & (ratio_T >= low) & (ratio_T <= high))


@torch.no_grad()
def geometric_ratios(*, old_logprobs_T: Tensor, behaviour_T: Tensor, mask_T: Tensor,
                     sequence_T: Tensor, num_seqs: int) -> Tensor:
    """float [S]: exp of the mean of log r over each sequence's actions; 1 for one without."""
    log_T = _log_ratios(old_logprobs_T, behaviour_T, mask_T)
    return sequence_means(log_T, mask_T=mask_T, sequence_T=sequence_T, num_seqs=num_seqs).exp()


@torch.no_grad()
def geometric_weights(*, old_logprobs_T: Tensor, behaviour_T: Tensor, mask_T: Tensor,
                      sequence_T: Tensor, num_seqs: int, low: float, high: float) -> Tensor:
    """float [T]: 1 at the actions of sequences whose `geometric_ratios` lie in [low, high], 0
    elsewhere.

    Raises:
        ValueError: as for `banded_weights`.
    """
    _check_band(low, high)
    ratio_S = geometric_ratios(old_logprobs_T=old_logprobs_T, behaviour_T=behaviour_T,
                               mask_T=mask_T, sequence_T=sequence_T, num_seqs=num_seqs)
    kept_S = (ratio_S >= low) & (ratio_S <= high)
    return (mask_T & kept_S[sequence_T]).to(ratio_S.dtype)


def mismatch(*, old_logprobs_T: Tensor, behaviour_T: Tensor, mask_T: Tensor) -> dict[str, float]:
    """How far the two policies are apart at actions: mean and largest |log r|, and the number of
    actions where it is not exactly 0."""
    log_A = _log_ratios(old_logprobs_T, behaviour_T, mask_T)[mask_T].double().abs()
    count = max(log_A.numel(), 1)
    return {"mean": float(log_A.sum()) / count, "max": float(log_A.max()) if len(log_A) else 0.0,
            "differing": int((log_A != 0.0).sum())}


def effective_sample_share(weights_T: Tensor, *, mask_T: Tensor) -> float:
    """(Σ w)² / (n · Σ w²) in 0 … 1: what share of the actions the weights leave in effect; 0 if
    there is none."""
    check_mask(mask_T, weights_T=weights_T)
    kept = weights_T[mask_T].double()
    squares = float(kept.square().sum()) * kept.numel()
    return float(kept.sum()) ** 2 / squares if squares else 0.0


def _log_ratios(old_logprobs_T: Tensor, behaviour_T: Tensor, mask_T: Tensor) -> Tensor:
    check_mask(mask_T, old_logprobs_T=old_logprobs_T, behaviour_T=behaviour_T)
    log_T = only(old_logprobs_T, mask_T) - only(behaviour_T, mask_T)
    return log_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _check_band(low: float, high: float) -> None:
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"The band of ratios is {low} to {high}, but must hold 1, the ratio of "
                         "equal policies.")
