"""Collectives with gradients: each is one thing forward and its transpose backward.

    function       forward               backward
    copy_to        identity              tree_all_reduce
    reduce_from    tree_all_reduce       identity
    gather_rows    all_gather_rows       tree_reduce_scatter_rows
    scatter_rows   tree_reduce_scatter_  all_gather_rows
    shared_rows    identity              tree_all_reduce of the last rows

``reduce_from`` and ``scatter_rows`` take the gradient of what they return to be that of one loss,
the same on every rank, of which a rank holds all or its rows. Over an axis of size 1 all are the
identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_gather_rows, tree_all_reduce, tree_reduce_scatter_rows


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """x, which every rank holds and each uses for a part of the work: its gradient is the sum of
    theirs."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def sum_grads(weight: Tensor, axis: Axis) -> Tensor:
    """`copy_to` for a weight that every rank holds whole and uses on a part of the rows."""
    return copy_to(weight, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """The sum of the ranks' parts, on all of them."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_rows(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """All ranks' rows (``sizes[i]`` of rank i), which each uses for a part of the work."""
    return x if axis.size == 1 else _Gather.apply(x, axis, sizes)


def scatter_rows(x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    """This rank's rows of the sum of the ranks' parts (``sizes[i]`` to rank i)."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, sizes)


def shared_rows(weight: Tensor, start: int, axis: Axis) -> Tensor:
    """A weight whose rows from ``start`` on all ranks of the axis hold alike, and each uses for a
    part of the work: those rows' gradients are summed over the ranks."""
    return weight if axis.size == 1 else _Shared.apply(weight, start, axis)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return tree_all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return tree_all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        return all_gather_rows(x, axis, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return tree_reduce_scatter_rows(grad, ctx.axis, ctx.sizes), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        return tree_reduce_scatter_rows(x, axis, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_rows(grad, ctx.axis, ctx.sizes), None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, start: int, axis: Axis) -> Tensor:
        ctx.start, ctx.axis = start, axis
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own, shared = grad[:ctx.start], grad[ctx.start:]
        return torch.cat([own, tree_all_reduce(shared, ctx.axis)]), None, None
