"""Ulysses attention (arXiv 2309.14509): all tokens of some heads in place of some tokens of all.

    q [T/n, H, d] ─all-to-all─▶ [T, H/n, d] ─▶ attention ─▶ [T, H/n, d] ─all-to-all─▶ [T/n, H, d]

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
        self.placement, self.axis = placement, axis
        self._sizes = placement.sizes
        bounds = mask.padded(placement.pads).bounds
        self._cu_S1 = torch.from_numpy(bounds.astype(np.int32)).to(device)
        self._longest = int(np.diff(bounds).max(initial=0))

    def __call__(self, ops: Ops, q_THd: Tensor, keys_TGd: Tensor, values_TGd: Tensor, *,
                 scale: float, window: int | None) -> Tensor:
        copies = kv_copies(q_THd.shape[1], keys_TGd.shape[1], self.axis.size)
        keys, values = _KeysToHeads.apply(keys_TGd, values_TGd, self.axis, self._sizes, copies,
                                          q_THd.dtype)
        out_THd = ops.attention(
            _ToHeads.apply(q_THd, self.axis, self._sizes), keys, values, self._cu_S1, scale=scale,
            window=window, max_seqlen=self._longest)
        mine_THd: Tensor = _ToRows.apply(out_THd, self.axis, self._sizes)
        return mine_THd


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


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        return _to_heads(x, axis, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_rows(grads[0], ctx.axis, ctx.sizes), None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        return _to_rows(x, axis, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_heads(grads[0], ctx.axis, ctx.sizes), None, None


class _KeysToHeads(torch.autograd.Function):
    """Keys and values in one exchange. They travel as they are stored and are widened on arrival;
    their gradients travel wide, and are rounded once the copies' are summed, as on one device."""

    @staticmethod
    def forward(ctx: Any, k_TGd: Tensor, v_TGd: Tensor, axis: Axis, sizes: Sequence[int],
                copies: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.sizes, ctx.copies, ctx.dtype = axis, sizes, copies, k_TGd.dtype
        kv = torch.stack([k_TGd, v_TGd], dim=2).repeat_interleave(copies, dim=1)  # [T, G, 2, d]
        keys, values = _to_heads(kv, axis, sizes).to(dtype).unbind(2)
        return keys.contiguous(), values.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dkv = _to_rows(torch.stack(grads, dim=2), ctx.axis, ctx.sizes)
        dk_TGd, dv_TGd = dkv.unflatten(1, (-1, ctx.copies)).sum(2).to(ctx.dtype).unbind(2)
        return dk_TGd, dv_TGd, None, None, None, None


def _to_heads(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """[own rows, n h, …] to [all rows, h, …]."""
    by_rank = x.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1)
    return all_to_all_rows(by_rank, axis, [sizes[axis.index]] * axis.size, sizes)


def _to_rows(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """[all rows, h, …] to [own rows, n h, …], contiguous."""
    own = sizes[axis.index]
    by_rank = all_to_all_rows(x, axis, sizes, [own] * axis.size)
    return by_rank.unflatten(0, (axis.size, own)).transpose(0, 1).flatten(1, 2).contiguous()
