"""Linear layers, each row by itself: ``y = x W^T``.

Every output is one chain of fused multiply-adds over k = 0 .. K-1 in fp32, starting from zero,
then ``+ bias``, then ``residual +``. That order holds for every number of rows, every storage of
the weight (which only decides which fp32 numbers W is made of) and every instruction set, so a
row's bits depend on nothing but the row, and training and inference agree.

With ``splits`` V the chain is cut in V equal parts of K whose sums are added in a balanced binary
tree (of an odd number of parts the left half takes one more): the order of a layer whose K is
spread over ranks, whatever their number, as long as each holds a subtree.

With ``products="bf16"`` x and W are rounded to bfloat16 first (numbers below 2^-126 to zero), and
each chain takes the k of a pair (0, 1), (2, 3), … odd one first: what AVX512-BF16's VDPBF16PS
does, faster where there is that instruction; with the same bits where there is not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.activation import ACTIVATIONS, gated_activation
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched
from kilter.ops.packed import Matrix, PackedWeight, plain_matrix

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = ("fp32", "bf16")  # formats that the factors of a product may be rounded to


class _LinearArgs(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("residual", ctypes.c_void_p),
                ("y", ctypes.c_void_p), ("rows", ctypes.c_int64), ("ldx", ctypes.c_int64),
                ("ld_residual", ctypes.c_int64), ("w", Matrix), ("splits", ctypes.c_int32),
                ("activation", ctypes.c_int32), ("halved", ctypes.c_int32),
                ("x_bf16", ctypes.c_int32)]


_kernel = Kernel("kt_linear", _LinearArgs)


def linear(x_TK: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None,
           residual: Tensor | None = None, *, splits: int = 1, products: str = "fp32") -> Tensor:
    """``x W^T + bias``, then ``residual + `` that (two fp32 additions, in this order).

    Args:
        x_TK: float32 [T, K]; rows may be strided, K contiguous.
        weight: [N, K], packed, or a float32, bfloat16 or float16 tensor with any strides.
        bias: float [N].
        residual: float32 [T, N]; rows may be strided.
        splits: parts of K, which it must divide.
        products: ``"bf16"`` rounds the factors; x may then be bfloat16. On the CPU only.

    Returns:
        float32 [T, N].

    Raises:
        ValueError: for other shapes, dtypes or layouts.
    """
    halved = _check(x_TK, weight, bias, residual, splits, products)
    tensor = weight if isinstance(weight, Tensor) else None
    if x_TK.is_meta or watched(x_TK, tensor, bias, residual):
        return _through_torch(x_TK, weight, bias, residual, splits, halved)
    return _forward(x_TK, weight, bias, residual, splits, halved)


def gated_linear(x_TK: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None,
                 activation: str = "silu", *, splits: int = 1, products: str = "fp32") -> Tensor:
    """``activation(gate) * up`` with [gate | up] = ``linear(x, weight, bias)``, bit for bit.

    Args:
        x_TK: float32 [T, K]; rows may be strided, K contiguous.
        weight: [2F, K], rows [gate; up], as in `linear`.
        bias: float [2F].
        activation: ``"silu"`` or ``"gelu_tanh"``, see `kilter.ops.activation`.
        splits, products: as in `linear`.

    Returns:
        float32 [T, F].

    Raises:
        ValueError: for other shapes, dtypes, layouts or activations, and for a packed weight
            whose F is not a multiple of 16 and that was not packed with ``gated=True``.
    """
    halved = _check(x_TK, weight, bias, None, splits, products)
    if activation not in ACTIVATIONS:
        raise ValueError(f"The activation is {activation!r}; it must be one of "
                         f"{', '.join(ACTIVATIONS)}.")
    rows = weight.shape[0]
    if rows % 2:
        raise ValueError(f"A gated weight has rows [gate; up], but this one has {rows}, an odd "
                         "number.")
    if isinstance(weight, PackedWeight):
        if weight.halves == 1 and rows % 32:
            raise ValueError(f"This weight has 2 x {rows // 2} rows, and {rows // 2} is not a "
                             "multiple of 16: pack it with gated=True.")
        tensor = None
    else:
        tensor = weight
    if x_TK.is_meta or watched(x_TK, tensor, bias):
        return gated_activation(_through_torch(x_TK, weight, bias, None, splits, halved),
                                activation)
    return _forward(x_TK, weight, bias, None, splits, halved, activation)


def linear_grad_input(dy_TN: Tensor, weight: Tensor | PackedWeight,
                      products: str = "fp32") -> Tensor:
    """The gradient of `linear` by x: ``dy W``, float32 [T, K], through the same kernel (one chain
    over N), so row-invariant too. ``dy_TN``: float32 [T, N], N contiguous.

    Raises:
        ValueError: for other shapes, dtypes or layouts.
    """
    if isinstance(weight, PackedWeight):
        weight = weight.dequantize()
    return linear(dy_TN, weight.t(), products=products)


def defer_weight_grad(weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Makes backward passes through `linear` with this very tensor leave its gradient out and put
    what it is made of into the list that is returned: (x [T, K], dy [T, N]) of each use. The rest
    of the backward pass then need not wait for it (zero bubble, arXiv 2401.10241).

    `weight_grad` makes the gradient.
    """
    uses: list[tuple[Tensor, Tensor]] = []
    weight.deferred = uses  # type: ignore[attr-defined]
    return uses


def weight_grad(x_TK: Tensor, dy_TN: Tensor) -> Tensor:
    """The gradient of `linear` by its weight, [N, K], from what a backward pass has of its x: where
    that is bfloat16, the factors are."""
    if x_TK.dtype == dy_TN.dtype:
        return dy_TN.t() @ x_TK
    dy_NT = dy_TN.t().to(torch.bfloat16, memory_format=torch.contiguous_format)
    return linear(dy_NT, x_TK.t(), products="bf16")


def tree_shares(splits: int, ranks: int) -> list[int]:
    """How many of a sum's ``splits`` parts each of ``ranks`` ranks holds, in order, so that every
    rank holds a subtree of its tree. The rank of n parts runs `linear` with ``splits=n`` on its
    stretch of K, and `tree_add` of the ranks' results has the bits of the whole.

    Raises:
        ValueError: if there are fewer parts than ranks, or no rank.
    """
    if not 1 <= ranks <= splits:
        raise ValueError(f"A sum in {splits} part(s) cannot be spread over {ranks} rank(s): it "
                         f"takes 1 to {splits}, so that everyone holds a part.")
    if ranks == 1:
        return [splits]
    return [*tree_shares(splits - splits // 2, ranks - ranks // 2),
            *tree_shares(splits // 2, ranks // 2)]


def tree_add(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' results (of one shape, in the order of ranks): the top of the tree
    whose subtrees `tree_shares` gives them.

    Raises:
        ValueError: if there is none.
    """
    if not parts:
        raise ValueError("There is nothing to add: tree_add needs one tensor per rank.")
    if len(parts) == 1:
        return parts[0]
    left = len(parts) - len(parts) // 2
    return tree_add(parts[:left]) + tree_add(parts[left:])


def _check(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None,
           residual: Tensor | None, splits: int, products: str) -> bool:
    """Whether factors are rounded."""
    if products not in PRODUCTS:
        raise ValueError(f"products is {products!r}; it must be one of {', '.join(PRODUCTS)}.")
    halved = products == "bf16"
    if x.is_cuda:
        if isinstance(weight, PackedWeight):
            raise ValueError("A packed weight is for the CPU, but x is on a GPU: use the plain "
                             "tensor there.")
        if halved:
            raise ValueError("products = bf16 is for CPUs; on a GPU make x and the weight bfloat16 "
                             "themselves.")
        return False  # the CUDA side checks the rest for itself: it takes other dtypes
    rows, k = weight.shape
    dtypes = (torch.float32, torch.bfloat16) if halved else (torch.float32,)
    if (x.dtype in dtypes and x.dim() == 2 and x.shape[1] == k and _rows_contiguous(x)
            and (isinstance(weight, PackedWeight) or weight.dtype in _DTYPES)
            and (bias is None or (bias.shape == (rows,) and bias.dtype in _DTYPES))
            and (residual is None or (residual.shape == (x.shape[0], rows)
                                      and residual.dtype == torch.float32
                                      and _rows_contiguous(residual)))
            and (splits == 1 or (splits > 1 and k % splits == 0))):
        return halved
    problems = []
    if x.dim() != 2 or x.shape[1] != k:
        problems.append(f"x has shape {tuple(x.shape)}, but the weight [{rows}, {k}] needs "
                        f"[T, {k}]")
    if x.dtype not in dtypes:
        problems.append(f"x is {x.dtype}; it must be {' or '.join(map(str, dtypes))}")
    elif x.dim() == 2 and not _rows_contiguous(x):
        problems.append(f"the rows of x are not contiguous (strides {x.stride()}); call "
                        ".contiguous() first")
    if isinstance(weight, Tensor) and weight.dtype not in _DTYPES:
        problems.append(f"the weight is {weight.dtype}; it must be float32, bfloat16 or float16")
    if bias is not None and (bias.shape != (rows,) or bias.dtype not in _DTYPES):
        problems.append(f"the bias is {bias.dtype} {tuple(bias.shape)}; it must be floats [{rows}]")
    if residual is not None and (residual.dtype != torch.float32
                                 or residual.shape != (x.shape[0], rows)
                                 or not _rows_contiguous(residual)):
        problems.append(f"the residual is {residual.dtype} {tuple(residual.shape)} with strides "
                        f"{residual.stride()}; it must be float32 [{x.shape[0]}, {rows}] with "
                        "contiguous rows")
    if splits < 1 or k % splits:
        problems.append(f"K = {k} cannot be cut in {splits} equal parts")
    raise ValueError(f"linear cannot run: {'; '.join(problems)}.")


def _rows_contiguous(x: Tensor) -> bool:
    return x.stride(1) == 1 or x.shape[1] <= 1


def _forward(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None,
             residual: Tensor | None, splits: int, halved: bool,
             activation: str | None = None) -> Tensor:
    if x.is_cuda:
        from kilter.ops.cuda import linear as cuda

        assert isinstance(weight, Tensor)  # _check saw to it
        if activation is None:
            return cuda.linear(x, weight, bias, residual, splits=splits)
        return cuda.gated_linear(x, weight, bias, activation, splits=splits)
    if not available():
        dense = weight if isinstance(weight, Tensor) else weight.dequantize()
        if halved:
            x, dense = x.bfloat16().float(), dense.bfloat16().float()
        y = _reference(x, dense, splits)
        y = y if bias is None else y + bias
        if activation is not None:
            return reference.gated_activation(y, activation)
        return y if residual is None else residual + y
    if bias is not None and not (bias.dtype == torch.float32 and bias.is_contiguous()):
        bias = bias.float().contiguous()
    gated = activation is not None
    matrix = (weight.matrix if isinstance(weight, PackedWeight)
              else plain_matrix(weight, 2 if gated else 1))
    y = torch.empty(x.shape[0], weight.shape[0] // (2 if gated else 1), dtype=torch.float32)
    _kernel.call(
        x.data_ptr(), None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(), y.data_ptr(), x.shape[0], x.stride(0),
        0 if residual is None else residual.stride(0), matrix, splits,
        -1 if activation is None else ACTIVATIONS[activation], halved, x.dtype == torch.bfloat16,
        keep=(x, weight, bias, residual, y))
    return y


def _reference(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    if splits == 1:
        return reference.linear(x, weight)
    left = splits - splits // 2
    k = x.shape[1] // splits * left
    return (_reference(x[:, :k], weight[:, :k], left)
            + _reference(x[:, k:], weight[:, k:], splits - left))


def _through_torch(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None,
                   residual: Tensor | None, splits: int, halved: bool) -> Tensor:
    if isinstance(weight, PackedWeight):
        return _linear_op(x, weight.data, bias, residual, splits, weight.facts(), halved)
    return _linear_op(x, weight, bias, residual, splits, [], halved)


# `facts` is empty for a plain weight, and says what a packed one's bytes are.
@torch.library.custom_op("kilter::linear", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
               splits: int, facts: list[int], halved: bool = False) -> Tensor:
    return _forward(x, _weight(weight, facts), bias, residual, splits, halved)


def _weight(weight: Tensor, facts: list[int]) -> Tensor | PackedWeight:
    return PackedWeight.of(weight, facts) if facts else weight


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, splits: int,
      facts: list[int], halved: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], _weight(weight, facts).shape[0],
                       dtype=torch.float32 if halved else x.dtype)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, _, _, ctx.facts, ctx.halved = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.deferred = getattr(weight, "deferred", None)
    if ctx.halved:  # half the memory, and all that a product takes of it
        x = x.bfloat16()
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    dense = grad.contiguous()
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = grad_input(dense, _weight(weight, ctx.facts), ctx.halved)
    if ctx.deferred is not None:
        ctx.deferred.append((x, dense))
    elif ctx.needs_input_grad[1]:
        dw = weight_grad(x, dense).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        db = dense.sum(0).to(ctx.bias_dtype)
    return dx, dw, db, grad if ctx.needs_input_grad[3] else None, None, None, None


def grad_input(dy: Tensor, weight: Tensor | PackedWeight, halved: bool = False) -> Tensor:
    """`linear_grad_input` where row-invariance is not asked for: for an fp32 matrix torch's
    product, the same from run to run, is the faster one."""
    if isinstance(weight, Tensor) and weight.dtype == dy.dtype and not halved:
        return dy @ weight
    return linear_grad_input(dy, weight, "bf16" if halved else "fp32")


_linear_op.register_autograd(_backward, setup_context=_save)
