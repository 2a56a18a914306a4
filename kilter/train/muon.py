"""Muon (github.com/KellerJordan/Muon): the momentum of a matrix, made nearly orthogonal.

That takes whole matrices. The elements of each meet on one of the ranks that hold it, while the
others do the same with other ones, and all get back what they hold of the result:

    round 0    rank 0: layers.0.attn.qkv     rank 1: layers.0.attn.out
    round 1    rank 0: layers.0.mlp.gate_up  rank 1: layers.0.mlp.down

A fused matrix is several to Muon: q, k, v, gate and up are made orthogonal each by itself, as they
are where a model has them apart. So what is learned does not depend on what is fused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_to_all_rows
from kilter.comm.objects import gather_objects
from kilter.parallel.data import Held
from kilter.parallel.shards import Box, Shard

Adjustment = Literal["original", "match_rms_adamw"]
ADJUSTMENTS: tuple[Adjustment, ...] = ("original", "match_rms_adamw")


class Muon:
    """Steps the matrices that a rank holds elements of.

    Args:
        held: what this rank holds. All ranks of the axis hold some of the same matrices, in the
            same order.
        stepped: the tensors that are stepped, each of the shape of ``held``'s.
        holders: the ranks that together hold every matrix; they make their `Muon` together.
        adjustment: see `scale`.

    Attributes:
        momentum: of every tensor in ``stepped``.
    """

    def __init__(self, held: Sequence[Held], stepped: Sequence[nn.Parameter], holders: Axis, *,
                 momentum: float, weight_decay: float, adjustment: Adjustment) -> None:
        self._held, self._stepped, self._axis = list(held), list(stepped), holders
        self._beta, self._decay, self._adjustment = momentum, weight_decay, adjustment
        self.momentum = {p: torch.zeros_like(p) for p in stepped}
        mine = [h.shard for h in held]
        every = gather_objects(mine, holders) if held else [mine]
        self._shards = list(zip(*every, strict=True))  # of every matrix, what each rank has of it

    @torch.no_grad()
    def step(self, lr: float) -> None:
        size = self._axis.size
        for first in range(0, len(self._held), size):
            turns = range(first, min(first + size, len(self._held)))
            updates = self._orthogonal(turns, [self._wanted(self._stepped[i]) for i in turns])
            for i, update in zip(turns, updates, strict=True):
                self._stepped[i].mul_(1.0 - lr * self._decay).add_(update, alpha=-lr)

    def _wanted(self, parameter: nn.Parameter) -> Tensor:
        """The momentum with Nesterov's correction."""
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        momentum = self.momentum[parameter].lerp_(grad, 1.0 - self._beta)
        return grad.lerp(momentum, self._beta)

    def _orthogonal(self, turns: range, local: list[Tensor]) -> list[Tensor]:
        """This rank's elements of some matrices, from those before: made orthogonal. The first is
        the work of the first rank, and so on."""
        axis = self._axis
        if axis.size == 1:
            return [self._made(self._held[i], x) for i, x in zip(turns, local, strict=True)]
        whole = self._gathered(turns, local)
        back: list[list[Tensor]] = []
        if whole is not None:
            mine = turns[axis.index]
            whole = self._made(self._held[mine], whole)
            back = [[whole[box.slices] for box in shard.boxes] for shard in self._shards[mine]]
        made = _exchange(back, [x.numel() for x in local], axis, local[0])
        return [flat.view(x.shape) for flat, x in zip(made, local, strict=False)]

    def _gathered(self, turns: range, local: list[Tensor]) -> Tensor | None:
        """The whole matrix of this rank's turn, if it has one. All ranks call."""
        give, take, mine = [], [], None
        for rank, (i, x) in enumerate(zip(turns, local, strict=True)):
            missing = self._shards[i][rank].numel < math.prod(self._shards[i][rank].shape)
            give.append([part for _, own, part in self._held[i].shard.parts(x) if own and missing])
            if rank == self._axis.index:
                mine = x
                take = [_owned(shard) if missing else [] for shard in self._shards[i]]
        came = _exchange(give, [sum(box.numel for box in boxes) for boxes in take], self._axis,
                         local[0])
        if mine is None:
            return None
        shard = self._held[turns[self._axis.index]].shard
        whole = mine.new_empty(shard.shape)
        for box, _, part in shard.parts(mine):
            whole[box.slices] = part
        for boxes, flat in zip(take, came, strict=True):
            for box, some in zip(boxes, flat.split([box.numel for box in boxes]), strict=True):
                whole[box.slices] = some.view(box.size)
        return whole

    def _made(self, held: Held, whole: Tensor) -> Tensor:
        """A matrix with all that it is made of orthogonal and scaled."""
        groups, widths = held.fused or (1, (whole.shape[0],))
        made = []
        for part_GWK in whole.view(groups, sum(widths), -1).split(widths, dim=1):
            part_NK = part_GWK.reshape(-1, whole.shape[1])
            update_NK = orthogonalise(part_NK) * scale(part_NK.shape, self._adjustment)
            made.append(update_NK.view(part_GWK.shape))
        return torch.cat(made, dim=1).view(whole.shape)


def takes(held: Held) -> bool:
    """Whether a parameter is Muon's: matrices of the layers are; embedding and head are not."""
    return len(held.shard.shape) == 2 and held.name.startswith("layers.")


def orthogonalise(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """About U V^T of a matrix's singular value decomposition, by quintic Newton–Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm().clamp(min=eps)
    if tall := x.shape[0] > x.shape[1]:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT.contiguous() if tall else x


def scale(shape: Sequence[int], adjustment: Adjustment) -> float:
    """What an orthogonal matrix [N, K] is multiplied by, so that one rate does for all shapes.

    ``original``: sqrt(max(1, N / K)), Keller Jordan's. ``match_rms_adamw``: 0.2 sqrt(max(N, K)),
    after which a step is about as large as AdamW's, and AdamW's rate does (arXiv 2502.16982).
    """
    n, k = shape
    return max(1.0, n / k) ** 0.5 if adjustment == "original" else 0.2 * max(n, k) ** 0.5


def _owned(shard: Shard) -> list[Box]:
    return [box for box, own in zip(shard.boxes, shard.owned, strict=True) if own]


def _exchange(give: Sequence[Sequence[Tensor]], take: Sequence[int], axis: Axis, like: Tensor
              ) -> list[Tensor]:
    """Sends rank i of the axis the elements of the tensors in ``give[i]``; returns what came,
    ``take[i]`` elements of rank i. Where a list ends, there is nothing for or from the rest."""
    none = [0] * axis.size
    send = [*(sum(x.numel() for x in some) for some in give), *none][:axis.size]
    receive = [*take, *none][:axis.size]
    flat = torch.cat([like.new_empty(0), *(x.reshape(-1) for some in give for x in some)])
    return list(all_to_all_rows(flat, axis, send, receive).split(receive))
