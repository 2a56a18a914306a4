"""The true norm of a gradient that is spread over ranks, and what is done with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from kilter.comm.axis import Axis
from kilter.parallel.data import Held


@torch.no_grad()
def gradient_norm(held: Sequence[Held], world: Axis, order: float = 2.0,
                  device: torch.device | str = "cpu", finite: bool = True) -> float:
    """Norm of the whole model's gradient, the same number on every rank.

    Every element counts once: of ranks that hold the same one, its owner counts it. One all-reduce
    over all ranks, in double. NaN anywhere makes it NaN or infinite.

    Args:
        order: p of the p-norm, ``inf`` too.
        device: of the model; a rank may hold nothing that is trained.
        finite: False on a rank where something else is not, and the norm is not on any rank: all
            learn at once that the step is not to be taken.
    """
    parts = [part for h in held if h.tensor.grad is not None
             for _, own, part in h.shard.parts(h.tensor.grad) if own and part.numel()]
    device = held[0].tensor.device if held else device
    total = torch.full((), 0.0 if finite else torch.nan, dtype=torch.float64, device=device)
    if math.isinf(order):
        for part in parts:
            total = torch.maximum(total, part.abs().max().double())
        total.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks may drop NaN
    else:
        for part in parts:
            total += torch.linalg.vector_norm(part, order, dtype=torch.float64) ** order
    if world.size > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM,
                        group=world.group)
    return total.item() if math.isinf(order) else total.item() ** (1.0 / order)


@torch.no_grad()
def clip_gradients(held: Sequence[Held], norm: float, max_norm: float) -> None:
    """Scales the gradient to ``max_norm`` if its norm is larger."""
    if norm > max_norm:
        for h in held:
            if h.tensor.grad is not None:
                h.tensor.grad.mul_(max_norm / (norm + 1e-6))


def culprits(held: Sequence[Held]) -> list[str]:
    """Names of parameters whose gradient on this rank is not finite, as backward comes to them: it
    spoils what lies before, so where it began is first."""
    return [h.name for h in reversed(held)
            if h.tensor.grad is not None and not bool(torch.isfinite(h.tensor.grad).all())]
