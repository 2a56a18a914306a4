"""Collectives on plain tensors over an `Axis`; those with gradients are in `kilter.comm.autograd`.

*Rows* are along dimension 0, whatever follows. All ranks call with the same shapes, but for the
row counts, which are given as one list for all ranks (`split_sizes`). Over an axis of size 1 all
are the identity and may return their argument itself.

Sums over ranks are made in the tree of `kilter.ops.linear.tree_add` over the ranks' places, so
that the bits do not depend on a library's choice of algorithm, are the same on every rank, and are
those of one rank that adds the same parts. Nothing here is rounded to travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.ops.linear import tree_add

# Up to here the whole tensor goes to everyone in one exchange, sparing the latency of a second.
SMALL_BYTES = 32768

# torch 2.13 renames this; the old name warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def split_sizes(rows: int, parts: int) -> list[int]:
    """``rows`` in this many parts, as even as possible, larger ones first."""
    small, larger = divmod(rows, parts)
    return [small + (part < larger) for part in range(parts)]


def tree_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' x (of one shape and dtype), on all of them."""
    n = axis.size
    if n == 1:
        return x
    flat = x.reshape(-1)
    if n == 2 or flat.nbytes <= SMALL_BYTES:  # with two ranks, one exchange sends no more than two
        parts = all_gather_rows(flat, axis, [flat.numel()] * n)
        return tree_add(parts.chunk(n)).view(x.shape)
    padding = -flat.numel() % n
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    size = flat.numel() // n
    own = tree_reduce_scatter_rows(flat, axis, [size] * n)
    total = all_gather_rows(own, axis, [size] * n)
    return total[:x.numel()].view(x.shape)


def tree_reduce_scatter_rows(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """This rank's rows of the sum of all ranks' x; rank i gets ``sizes[i]`` rows. The bits are
    those that `tree_all_reduce` gives them.

    Raises:
        ValueError: if the sizes are not one per rank or do not add up to x's rows.
    """
    _check_sizes(axis, sizes, x.shape[0], sum(sizes), "in all")
    if axis.size == 1:
        return x
    own = sizes[axis.index]
    parts = all_to_all_rows(x, axis, sizes, [own] * axis.size)
    return tree_add(parts.split(own) if own else [parts])


def all_gather_rows(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """All ranks' rows in order of rank; rank i gives ``sizes[i]``.

    Raises:
        ValueError: if the sizes are not one per rank or this rank's is not x's rows.
    """
    _check_sizes(axis, sizes, x.shape[0], sizes[axis.index] if axis.index < len(sizes) else 0,
                 f"from rank {axis.index}")
    if axis.size == 1:
        return x
    most = max(sizes)
    x = x.contiguous()
    if x.shape[0] < most:  # process groups gather equal sizes only
        x = torch.cat([x, x.new_zeros(most - x.shape[0], *x.shape[1:])])
    out = x.new_empty(most * axis.size, *x.shape[1:])
    _all_gather(out, x, group=axis.members)
    if min(sizes) == most:
        return out
    return torch.cat([out[i * most:i * most + size] for i, size in enumerate(sizes)])


def all_to_all_rows(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """x's rows dealt out, ``send[i]`` to rank i in order; what came, ``receive[i]`` rows from rank
    i in order. Rank i's ``receive[j]`` is rank j's ``send[i]``.

    Raises:
        ValueError: if a list has not one size per rank, or ``send`` does not add up to x's rows.
    """
    _check_sizes(axis, send, x.shape[0], sum(send), "to send")
    _check_sizes(axis, receive, sum(receive), sum(receive), "to receive")
    if axis.size == 1:
        return x
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=axis.members)
    return out


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrites x (contiguous, of one shape and dtype) with that of the rank whose place on the
    axis is ``source``, and returns it."""
    if axis.size > 1:
        dist.broadcast(x, axis.ranks[source], group=axis.members)
    return x


def gather(x: Tensor, axis: Axis, target: int = 0) -> list[Tensor] | None:
    """All ranks' x (of one shape and dtype) in order of rank on the rank whose place on the axis is
    ``target``; None on the others."""
    if axis.size == 1:
        return [x]
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in axis.ranks] if axis.index == target else None
    dist.gather(x, parts, axis.ranks[target], group=axis.members)
    return parts


def all_reduce_sum(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of counts (in int64) or other numbers (in float64): for the few numbers
    that steer a step. The order of addition is the process group's; it is the same every time and
    the result the same on all ranks."""
    return _all_reduce(x, axis, dist.ReduceOp.SUM)


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """The largest over ranks, elementwise, in int64 or float64."""
    return _all_reduce(x, axis, dist.ReduceOp.MAX)


def barrier(axis: Axis) -> None:
    """Waits until all ranks of the axis are here."""
    if axis.size > 1:
        dist.barrier(group=axis.members)


def _all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> Tensor:
    wide = x.to(torch.float64 if x.is_floating_point() else torch.int64, copy=True)
    if axis.size > 1:
        dist.all_reduce(wide, op, group=axis.members)
    return wide


def _check_sizes(axis: Axis, sizes: Sequence[int], rows: int, named: int, which: str) -> None:
    if len(sizes) != axis.size:
        raise ValueError(f"{len(sizes)} row counts were given for axis {axis.name} of {axis.size} "
                         "ranks; give one per rank.")
    if rows != named or min(sizes) < 0:
        raise ValueError(f"The row counts over axis {axis.name} are {list(sizes)}, which is "
                         f"{named} {which}, but there are {rows} rows.")
