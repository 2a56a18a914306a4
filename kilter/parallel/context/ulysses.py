"""Ulysses attention (arXiv 2309.14509): all tokens of some heads in place of some tokens of all.

    q  [T/n, H, d] ──all-to-all──▶ [T, H/n, d] ─▶ attention ─▶ [T, H/n, d] ──all-to-all──▶ [T/n, H, d]

Each rank then runs the model's own attention op over whole sequences, so the bits are one device's.
Rows are contiguous runs of the pack: what the ranks send is then in order when it arrives, and the
work is even in any case, because every rank sees all rows. Where ranks need a part of a KV head's
query heads, they get a copy of the KV head, and the copies' gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_to_all_rows
from kilter.ops import Ops
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.placement import Placement


class UlyssesAttention:
    """Attention of one batch's rows over an axis; an `Attend` of `kilter.models.batch`.

    Args:
        mask: causal, of the pack.

    Raises:
        ValueError: if the mask has spans, or the placement is not of contiguous runs.
    """

    def __init__(self, placement: Placement, mask: Mask, axis: Axis,
                 device: torch.device | str = "cpu") -> None:
        if not mask.is_causal or mask.window is not None:
            raise ValueError("Ulysses attention runs the model's own causal op and so takes no "
                             "other mask; use the method all_gather for one with spans.")
        if (np.diff(placement.order) != 1).any():
            raise ValueError("Ulysses attention needs rows in the order of the pack; use the "
                             "placement contiguous.")
        self._axis = axis
        self._sizes = placement.sizes
        bounds = mask.padded(placement.pads).bounds
        self._cu_S1 = torch.from_numpy(bounds.astype(np.int32)).to(device)
        self._longest = int(np.diff(bounds).max(initial=0))

    def __call__(self, ops: Ops, q_THd: Tensor, keys_TGd: Tensor, values_TGd: Tensor, *,
                 scale: float, window: int | None) -> Tensor:
        n, heads, groups = self._axis.size, q_THd.shape[1], keys_TGd.shape[1]
        copies = kv_copies(heads, groups, n)
        q_THd = self._to_heads(q_THd)
        kv = torch.stack([keys_TGd, values_TGd], dim=2)  # [T, G, 2, d]
        if copies > 1:
            kv = kv[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)
        keys, values = (x.contiguous() for x in self._to_heads(kv).unbind(2))
        out_THd = ops.attention(q_THd, keys, values, self._cu_S1, scale=scale, window=window,
                                max_seqlen=self._longest)
        return self._to_rows(out_THd)

    def _to_heads(self, x: Tensor) -> Tensor:
        """[own rows, n · h, …] to [all rows, h, …]."""
        n, own = self._axis.size, self._sizes[self._axis.index]
        by_rank = x.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)
        out: Tensor = _AllToAll.apply(by_rank, self._axis, [own] * n, self._sizes)
        return out

    def _to_rows(self, x: Tensor) -> Tensor:
        """[all rows, h, …] to [own rows, n · h, …]."""
        n, own = self._axis.size, self._sizes[self._axis.index]
        by_rank: Tensor = _AllToAll.apply(x, self._axis, self._sizes, [own] * n)
        return by_rank.unflatten(0, (n, own)).transpose(0, 1).flatten(1, 2)


def kv_copies(heads: int, groups: int, ranks: int) -> int:
    """Copies of each KV head, so that every rank's query heads have theirs: 1 where KV heads
    divide among the ranks.

    Raises:
        ValueError: if query heads do not divide among the ranks.
    """
    if heads % ranks:
        works = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(f"Ulysses attention cannot spread {heads} query heads over {ranks} ranks. "
                         f"Degrees that work: {', '.join(map(str, works))}; or use another method.")
    per = heads // groups
    return per // math.gcd(per, heads // ranks)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: Sequence[int],
                receive: Sequence[int]) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return all_to_all_rows(x, axis, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_to_all_rows(grads[0], ctx.axis, ctx.receive, ctx.send), None, None, None
