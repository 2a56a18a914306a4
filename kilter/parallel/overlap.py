"""Linear layers under sequence parallelism that compute while their rows travel.

    gathered   x of own rows ─▶ y       x of the rank before ─▶ y      …    all of y
               all others' x is under way
    summed     part of y for the next rank ─▶ sent      …     own part ─▶ own rows of the sum

Each is the other's transpose. Backward, the first makes the gradient of x rank by rank and sends
it off, and makes the weight's while the last of it is under way; the second makes the gradient of x
of the rows that have come, and the weight's when all have.

Products are cut between rows only, so on the exact path y has the bits of layers that wait. A
weight's gradient is one product over all rows, as there; the gradient of x is a product for each
rank's rows through torch's kernel, which may round by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.overlap import gather_in_steps, rows_of, sum_in_steps
from kilter.ops import Ops
from kilter.ops.linear import grad_input, weight_grad

# What `kilter.ops.linear.defer_weight_grad` left at a weight.
Deferred = list[tuple[Tensor, Tensor]] | None


def gathered_linear(x_tK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, ops: Ops, axis: Axis,
                    *, splits: int) -> tuple[Tensor, Tensor]:
    """The linear of all ranks' rows: (y [T, N], x [T, K]).

    Args:
        x_tK: this rank's rows, of which every rank has as many.
        splits: as in `kilter.ops.linear`.

    The rows are kept for the weight's gradient, and not gathered again in backward.
    """
    y_TN, x_TK = _Gathered.apply(x_tK, weight_NK, bias_N, _deferred(weight_NK), ops, axis, splits)
    return y_TN, x_TK


def summed_linear(x_TK: Tensor, weights: Sequence[Tensor], ops: Ops, axis: Axis, *, splits: int
                  ) -> Tensor:
    """This rank's rows [t, N] of the sum of all ranks' products, T = n t for n ranks.

    Args:
        x_TK: all rows, this rank's columns.
        weights: [N_i, K] each; their products stand side by side, N = sum of N_i.
        splits: as in `kilter.ops.linear`.
    """
    kept = _Kept.apply(ops, x_TK, *weights)
    y_tN: Tensor = _Summed.apply(kept, kept.grad_fn, x_TK.detach(), [w.detach() for w in weights],
                                 [_deferred(w) for w in weights], ops, axis, splits)
    return y_tN


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tK: Tensor, weight_NK: Tensor, bias_N: Tensor | None,
                deferred: Deferred, ops: Ops, axis: Axis, splits: int) -> tuple[Tensor, Tensor]:
        rows = x_tK.shape[0]
        x_TK = x_tK.new_empty(axis.size * rows, x_tK.shape[1])
        parts = {place: ops.linear(x_TK[rows_of(place, rows)], weight_NK, bias_N, None,
                                   splits=splits)
                 for place in gather_in_steps(x_tK, x_TK, axis)}
        ctx.save_for_backward(_factor(x_TK, ops) if ctx.needs_input_grad[1] else None, weight_NK)
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.deferred, ctx.ops, ctx.axis, ctx.rows = deferred, ops, axis, rows
        ctx.set_materialize_grads(False)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(x_TK)
        return torch.cat([parts[place] for place in range(axis.size)]), x_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x_TK, weight_NK = ctx.saved_tensors
        dy_TN, more_TK = grads  # of an adapter, which works on the rows too
        assert dy_TN is not None
        dy_TN = dy_TN.contiguous()
        dx_tK = dw_NK = db_N = finish = None

        def part_of(place: int) -> Tensor:
            rows = rows_of(place, ctx.rows)
            dx = grad_input(dy_TN[rows], weight_NK, _halved(ctx.ops))
            return dx if more_TK is None else dx.add_(more_TK[rows])

        if ctx.needs_input_grad[0]:
            finish = sum_in_steps(part_of, ctx.axis)
        if ctx.needs_input_grad[1]:
            dw_NK = _weight_grad(x_TK, dy_TN, weight_NK, ctx.deferred)
        if ctx.needs_input_grad[2]:
            db_N = dy_TN.sum(0).to(ctx.bias_dtype)
        if finish is not None:
            dx_tK = finish()
        return dx_tK, dw_NK, db_N, *[None] * 4


class _Kept(torch.autograd.Function):
    """What `_Summed` needs in backward, in a node of its own before it. A recompute ends where the
    last tensor is kept, so that it does not send the parts again; and the gradients that `_Summed`
    makes leave from here."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, x_TK: Tensor, *weights: Tensor) -> Tensor:
        needed = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(_factor(x_TK, ops) if needed else None, *weights)
        return x_TK.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        made, ctx.made = ctx.made, None  # the node may outlive the backward pass
        return None, *made


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, kept: Any, x_TK: Tensor, weights: Sequence[Tensor],
                deferred: Sequence[Deferred], ops: Ops, axis: Axis, splits: int) -> Tensor:
        rows = x_TK.shape[0] // axis.size
        ctx.kept, ctx.deferred, ctx.ops, ctx.axis, ctx.rows = kept, deferred, ops, axis, rows

        def part_of(place: int) -> Tensor:
            parts = [ops.linear(x_TK[rows_of(place, rows)], weight, None, None, splits=splits)
                     for weight in weights]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

        return sum_in_steps(part_of, axis)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy_tN,), (x_TK, *weights), rows = grads, ctx.kept.saved_tensors, ctx.rows
        _, needs_x, *needs = ctx.kept.needs_input_grad
        widths = [weight.shape[0] for weight in weights]
        dy_TN = dy_tN.new_empty(ctx.axis.size * rows, sum(widths))
        parts = {}
        for place in gather_in_steps(dy_tN, dy_TN, ctx.axis):
            if needs_x:
                each = dy_TN[rows_of(place, rows)].split(widths, dim=1)
                first, *others = (grad_input(dy.contiguous(), weight, _halved(ctx.ops))
                                  for dy, weight in zip(each, weights, strict=True))
                parts[place] = sum(others, first)
        dx_TK = torch.cat([parts[place] for place in range(ctx.axis.size)]) if needs_x else None
        ctx.kept.made = dx_TK, *(
            _weight_grad(x_TK, dy.contiguous(), weight, deferred) if need else None
            for dy, weight, deferred, need in zip(dy_TN.split(widths, dim=1), weights, ctx.deferred,
                                                  needs, strict=True))
        return dy_tN.new_empty(0), *[None] * 7


def _halved(ops: Ops) -> bool:
    return ops.products == "bf16"


def _factor(x_TK: Tensor, ops: Ops) -> Tensor:
    """What a weight's gradient takes of x, as `kilter.ops.linear` keeps it."""
    return x_TK.bfloat16() if _halved(ops) else x_TK


def _deferred(weight: Tensor) -> Deferred:
    return getattr(weight, "deferred", None)


def _weight_grad(x_TK: Tensor, dy_TN: Tensor, weight_NK: Tensor, deferred: Deferred
                 ) -> Tensor | None:
    if deferred is not None:
        deferred.append((x_TK, dy_TN))
        return None
    return weight_grad(x_TK, dy_TN).to(weight_NK.dtype)
