"""Policy losses per token: PPO's clip, dual clip, GSPO, CISPO, REINFORCE.

With the ratio r = π(a) / π_old(a) of an action and its advantage A (numbers are arXiv's):

    ppo        max(−r·A, −clip(r, 1 − ε_low, 1 + ε_high)·A)         1707.06347; two ε: 2503.14476
      dual     min(that, −c·A) where A < 0                          1912.09729
    gspo       ppo with r the geometric mean of the sequence's      2507.18071
    cispo      −sg[clip(r, 1 − ε_low, 1 + ε_high)]·A·log π(a)       2506.13585
    reinforce  −A·log π(a)

Each returns losses [T] that `kilter.rl.aggregation` weighs, 0 where the mask is False whatever
stands there, and sums that say how far the policy has moved. ``old`` is the policy that ratios are
taken against: the one that sampled, or, where old data is corrected for (`kilter.rl.off_policy`),
the one at the start of the step. No gradient flows into ``old`` or into advantages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.rl.masks import check_mask, only, sequence_means

# exp(20) ≈ 5e8: beyond it a ratio stands still instead of overflowing, and carries no gradient.
MAX_LOG_RATIO = 20.0

DIAGNOSTICS = ("tokens", "ratio", "clipped_low", "clipped_high", "dual_clipped", "kl")


@dataclass(frozen=True)
class PolicyLoss:
    """Attributes:
        losses_T: float [T], with the gradient.
        sums: float64 [6], without: sums over tokens of what `DIAGNOSTICS` names, which add up over
            micro-batches and ranks. A token counts as clipped where the clip takes its gradient:
            below 1 − ε_low with a negative advantage, above 1 + ε_high with a positive one. ``kl``
            is the k3 estimate of how far the policy is from ``old``.
    """

    losses_T: Tensor
    sums: Tensor


def diagnostic_means(sums: Tensor) -> dict[str, float]:
    """The sums of `PolicyLoss`, of a whole step, as means over its tokens, by name; ``tokens`` as
    it is."""
    tokens, *others = sums.tolist()
    means = {name: value / tokens if tokens else 0.0
             for name, value in zip(DIAGNOSTICS[1:], others, strict=True)}
    return {"tokens": tokens, **means}


def ppo(*, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
        eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> PolicyLoss:
    """The clipped surrogate; with a higher ``eps_high`` DAPO's clip-higher.

    Args:
        dual_clip: c > 1, the most that a ratio counts for with a negative advantage.

    Raises:
        ValueError: for a mask that is not bool, other shapes, or impossible bounds.
    """
    check_bounds(eps_low, eps_high)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip} but must be above 1 (3 is usual), or None.")
    log_T, advantages_T = _inputs(logprobs_T, old_logprobs_T, advantages_T, mask_T)
    return _clipped(log_T, _exp(log_T), advantages_T, mask_T, eps_low, eps_high, dual_clip)


def gspo(*, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
         sequence_T: Tensor, num_seqs: int, eps_low: float = 3e-4, eps_high: float = 4e-4
         ) -> PolicyLoss:
    """PPO's clip of the sequence's ratio, exp of the mean of its tokens' log-ratios, which every
    token of it has; meant for ``seq_mean_token_mean``. A token's loss has its own gradient only
    (the paper's GSPO-token): with one advantage per sequence and equal weights the sum is GSPO's.

    Raises:
        ValueError: as for `ppo`.
    """
    check_bounds(eps_low, eps_high)
    log_T, advantages_T = _inputs(logprobs_T, old_logprobs_T, advantages_T, mask_T)
    mean_S = sequence_means(log_T.detach(), mask_T=mask_T, sequence_T=sequence_T, num_seqs=num_seqs)
    ratio_T = _exp(mean_S[sequence_T]) * (log_T - log_T.detach()).exp()
    return _clipped(log_T, ratio_T, advantages_T, mask_T, eps_low, eps_high, None)


def cispo(*, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
          eps_low: float = 1.0, eps_high: float = 4.0) -> PolicyLoss:
    """REINFORCE with a clipped, constant importance weight: unlike PPO's, a clipped token keeps its
    gradient. ``eps_low`` of 1 leaves small weights as they are, as the paper does.

    Raises:
        ValueError: as for `ppo`.
    """
    check_bounds(eps_low, eps_high)
    log_T, advantages_T = _inputs(logprobs_T, old_logprobs_T, advantages_T, mask_T)
    ratio_T = _exp(log_T.detach())
    weight_T = ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high)
    losses_T = only(-weight_T * advantages_T * only(logprobs_T, mask_T), mask_T)
    low_T, high_T = ratio_T < 1.0 - eps_low, ratio_T > 1.0 + eps_high
    return PolicyLoss(losses_T, _sums(log_T, ratio_T, mask_T, low_T, high_T, None))


def reinforce(*, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor
              ) -> PolicyLoss:
    """The policy gradient without a ratio: exact on the policy's own samples. ``old`` is only for
    the diagnostics.

    Raises:
        ValueError: for a mask that is not bool, or other shapes.
    """
    log_T, advantages_T = _inputs(logprobs_T, old_logprobs_T, advantages_T, mask_T)
    losses_T = only(-advantages_T * only(logprobs_T, mask_T), mask_T)
    return PolicyLoss(losses_T, _sums(log_T, _exp(log_T), mask_T, None, None, None))


def entropy_bonus(entropy_T: Tensor, *, mask_T: Tensor, coefficient: float) -> Tensor:
    """float [T]: −coefficient · H, to be added to a policy's losses; 0 where the mask is False.

    Args:
        entropy_T: the entropy of the distribution that each action was taken from, in nats.
    """
    check_mask(mask_T, entropy_T=entropy_T)
    return -coefficient * only(entropy_T, mask_T)


def check_bounds(eps_low: float, eps_high: float) -> None:
    """Raises ValueError unless 0 ≤ eps_low ≤ 1 and eps_high ≥ 0."""
    if not 0.0 <= eps_low <= 1.0 or not eps_high >= 0.0:
        raise ValueError(f"eps_low is {eps_low} and eps_high {eps_high}, but the ratio's bounds "
                         "1 − eps_low and 1 + eps_high must lie in 0 … 1 and from 1 on.")


def _clipped(log_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, eps_low: float,
             eps_high: float, dual_clip: float | None) -> PolicyLoss:
    clipped_T = ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high)
    losses_T = torch.maximum(-ratio_T * advantages_T, -clipped_T * advantages_T)
    low_T = (ratio_T < 1.0 - eps_low) & (advantages_T < 0.0)
    high_T = (ratio_T > 1.0 + eps_high) & (advantages_T > 0.0)
    dual_T = None
    if dual_clip is not None:
        dual_T = (ratio_T > dual_clip) & (advantages_T < 0.0)
        losses_T = torch.where(dual_T, -dual_clip * advantages_T, losses_T)
    return PolicyLoss(only(losses_T, mask_T),
                      _sums(log_T, ratio_T, mask_T, low_T, high_T, dual_T))


def _inputs(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor
            ) -> tuple[Tensor, Tensor]:
    """(log-ratios, advantages), 0 where the mask is False."""
    check_mask(mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T,
               advantages_T=advantages_T)
    log_T = only(logprobs_T, mask_T) - only(old_logprobs_T.detach(), mask_T)
    return log_T, only(advantages_T.detach(), mask_T)


def _exp(log_T: Tensor) -> Tensor:
    return log_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def _sums(log_T: Tensor, ratio_T: Tensor, mask_T: Tensor, low_T: Tensor | None,
          high_T: Tensor | None, dual_T: Tensor | None) -> Tensor:
    log_T = log_T[mask_T].double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3_T = log_T.expm1() - log_T  # of samples from old: r − 1 − log r
    columns = [torch.ones_like(log_T), ratio_T[mask_T].double(),
               *(torch.zeros_like(log_T) if x is None else x[mask_T].double()
                 for x in (low_T, high_T, dual_T)), k3_T]
    return torch.stack([column.sum() for column in columns])
