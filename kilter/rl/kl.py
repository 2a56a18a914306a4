"""KL divergence from a reference policy: estimators of one sample, and what steers their weight.

With d = log π(a) − log π_ref(a) of an action that π sampled (Schulman, "Approximating KL
divergence", 2020):

          value              expected value            expected gradient, taken as a loss
    k1    d                  KL(π ‖ π_ref)             0: it does nothing
    k2    d² / 2             near KL(π ‖ π_ref)        that of KL(π ‖ π_ref)
    k3    exp(−d) − 1 + d    KL(π ‖ π_ref), never < 0  that of KL(π_ref ‖ π)

So what is right in a reward need not be right in a loss: k1 and k3 are unbiased values, and k2 has
the gradient that is meant (arXiv 2506.09477, and docs/rl-losses.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from kilter.rl.masks import check_mask, only

Estimator = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0  # of k3's exp, as for the ratios of policy losses


def kl_values(estimator: Estimator, *, logprobs_T: Tensor, ref_logprobs_T: Tensor, mask_T: Tensor,
              clamp: float | None = None) -> Tensor:
    """float [T] without a gradient: the estimate at each action, for a reward's penalty or a
    metric; 0 where the mask is False. k1 may be negative.

    Args:
        clamp: no estimate counts for more than this, or less than minus this.

    Raises:
        ValueError: for an unknown estimator, a mask that is not bool, other shapes, or a clamp that
            is not positive.
    """
    return kl_losses(estimator, logprobs_T=logprobs_T.detach(), ref_logprobs_T=ref_logprobs_T,
                     mask_T=mask_T, clamp=clamp)


def kl_losses(estimator: Estimator, *, logprobs_T: Tensor, ref_logprobs_T: Tensor, mask_T: Tensor,
              clamp: float | None = None) -> Tensor:
    """The same as a loss, with its gradient by ``logprobs_T``: choose ``k2`` for the gradient of
    KL(π ‖ π_ref). Where the clamp holds there is none.

    Raises:
        ValueError: as for `kl_values`.
    """
    check_mask(mask_T, logprobs_T=logprobs_T, ref_logprobs_T=ref_logprobs_T)
    if clamp is not None and clamp <= 0.0:
        raise ValueError(f"clamp is {clamp} but must be positive, or None.")
    d_T = only(logprobs_T, mask_T) - only(ref_logprobs_T.detach(), mask_T)
    if estimator == "k1":
        kl_T = d_T
    elif estimator == "k2":
        kl_T = 0.5 * d_T.square()
    elif estimator == "k3":
        # Never below 0, but its rounding may be.
        kl_T = ((-d_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).expm1() + d_T).clamp_min(0.0)
    else:
        raise ValueError(f"The KL estimator {estimator!r} is not known; it must be one of "
                         f"{', '.join(get_args(Estimator))}.")
    return kl_T if clamp is None else kl_T.clamp(-clamp, clamp)


@dataclass(frozen=True)
class FixedKL:
    """A weight that stays."""

    beta: float

    def __post_init__(self) -> None:
        if self.beta < 0.0:
            raise ValueError(f"beta is {self.beta} but must not be negative.")

    def updated(self, *, kl: float, count: int) -> FixedKL:
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A weight that is led so that the KL divergence comes to a target (arXiv 1909.08593 §2.2):

        β ← β · (1 + clip(kl / target − 1, −0.2, 0.2) · count / horizon)

    Attributes:
        target: KL divergence in nats, in the sense that ``kl`` is measured (per sequence or token).
        horizon: how many samples it takes to answer; larger is slower.
    """

    beta: float
    target: float
    horizon: int = 10_000

    def __post_init__(self) -> None:
        problems = [f"{name} is {getattr(self, name)} but must be positive"
                    for name in ("beta", "target", "horizon") if getattr(self, name) <= 0]
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def updated(self, *, kl: float, count: int) -> AdaptiveKL:
        """The weight after `count` samples with this measured divergence."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, beta=self.beta * (1.0 + error * count / self.horizon))
