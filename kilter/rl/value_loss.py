"""The critic's loss per token, with PPO's clip around the values it had, as the first
implementations of arXiv 1707.06347 have it:

    ½ · max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kilter.rl.masks import check_mask, only


def value_losses(*, values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor,
                 clip: float | None = None) -> tuple[Tensor, Tensor]:
    """(losses, clipped): float [T], 0 where the mask is False, with the gradient by ``values_T``;
    and how many tokens the clip took the gradient of, float64 scalar, a sum.

    Args:
        values_T: the critic's, at the action they are about (`Experience.at_actions`).
        clip: ε; None for the plain squared error.

    Raises:
        ValueError: for a mask that is not bool, other shapes, or a clip that is not positive.
    """
    check_mask(mask_T, values_T=values_T, old_values_T=old_values_T, returns_T=returns_T)
    if clip is not None and clip <= 0.0:
        raise ValueError(f"clip is {clip} but must be positive, or None.")
    values_T = only(values_T, mask_T)
    old_T, returns_T = (only(x.detach(), mask_T) for x in (old_values_T, returns_T))
    plain_T = (values_T - returns_T).square()
    if clip is None:
        return 0.5 * plain_T, torch.zeros((), dtype=torch.float64, device=values_T.device)
    clipped_T = (values_T.clamp(old_T - clip, old_T + clip) - returns_T).square()
    return 0.5 * torch.maximum(plain_T, clipped_T), (clipped_T > plain_T).double().sum().detach()
