"""RMS norm, each row by itself."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched


class _RmsNormArgs(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("weight", ctypes.c_void_p), ("residual", ctypes.c_void_p),
                ("out", ctypes.c_void_p), ("rows", ctypes.c_int64), ("dim", ctypes.c_int64),
                ("x_stride", ctypes.c_int64), ("eps", ctypes.c_float),
                ("zero_centred", ctypes.c_int32)]


class _RmsNormGradArgs(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("grad", "x", "weight", "dx", "dweight")),
                ("rows", ctypes.c_int64), ("dim", ctypes.c_int64), ("x_stride", ctypes.c_int64),
                ("eps", ctypes.c_float), ("zero_centred", ctypes.c_int32)]


_kernel = Kernel("kt_rms_norm", _RmsNormArgs)
_grad_kernel = Kernel("kt_rms_norm_grad", _RmsNormGradArgs)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, zero_centred: bool = False,
             residual: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * w`` (or ``* (1 + w)``), plus ``residual`` if given.

    Args:
        x_TD: [T, D]; rows may be strided. float32 on the CPU; bfloat16 and float16 too on CUDA.
        weight_D: [D].
        eps: added to the mean square.
        zero_centred: the weight is stored as w and applied as 1 + w (Gemma).
        residual: [T, D], contiguous; added to the result (Gemma's post norm).

    Returns:
        [T, D] in x's dtype.

    Raises:
        ValueError: for other shapes, dtypes or layouts.
    """
    if not x_TD.is_cuda:
        _check(x_TD, weight_D, residual)
    if watched(x_TD, weight_D, residual):
        return _rms_norm_op(x_TD, weight_D, eps, zero_centred, residual)
    return _forward(x_TD, weight_D, eps, zero_centred, residual)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if (x.dim() != 2 or weight.shape != x.shape[1:] or x.shape[1] == 0
            or (residual is not None and residual.shape != x.shape)):
        other = None if residual is None else tuple(residual.shape)
        raise ValueError(f"rms_norm needs x [T, D], weight [D] and residual [T, D]; it got "
                         f"{tuple(x.shape)}, {tuple(weight.shape)} and {other}.")
    if (x.dtype != torch.float32 or weight.dtype != torch.float32
            or (residual is not None and residual.dtype != torch.float32)):
        raise ValueError(f"rms_norm computes in float32; it got {x.dtype}, {weight.dtype} and "
                         f"{None if residual is None else residual.dtype}.")
    if x.stride(1) != 1 or not weight.is_contiguous() or (
            residual is not None and not residual.is_contiguous()):
        raise ValueError("rms_norm needs contiguous rows in x, and a contiguous weight and "
                         "residual; call .contiguous() first.")


def _forward(x: Tensor, weight: Tensor, eps: float, zero_centred: bool,
             residual: Tensor | None) -> Tensor:
    if x.is_cuda:
        from kilter.ops.cuda import norm as cuda

        return cuda.rms_norm(x, weight, eps, zero_centred, residual)
    if not available():
        return reference.rms_norm(x, weight, eps, zero_centred, residual)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows, dim = x.shape
    _kernel.call(x.data_ptr(), weight.data_ptr(), residual.data_ptr() if residual is not None
                 else None, out.data_ptr(), rows, dim, x.stride(0), eps, zero_centred,
                 keep=(x, weight, residual, out))
    return out


@torch.library.custom_op("kilter::rms_norm", mutates_args=())
def _rms_norm_op(x: Tensor, weight: Tensor, eps: float, zero_centred: bool,
                 residual: Tensor | None) -> Tensor:
    return _forward(x, weight, eps, zero_centred, residual)


@_rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float, zero_centred: bool,
      residual: Tensor | None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, ctx.eps, ctx.zero_centred, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    dx, dw = _rms_norm_grad_op(grad, x, weight, ctx.eps, ctx.zero_centred)
    return dx, dw, None, None, grad if ctx.needs_input_grad[4] else None


_rms_norm_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("kilter::rms_norm_grad", mutates_args=())
def _rms_norm_grad_op(grad: Tensor, x: Tensor, weight: Tensor, eps: float,
                      zero_centred: bool) -> tuple[Tensor, Tensor]:
    if x.is_cuda or not available():
        return rms_norm_backward(grad, x, weight, eps, zero_centred)
    grad = grad.contiguous()
    dx, dw = torch.empty(x.shape), torch.empty_like(weight)
    _grad_kernel.call(*(t.data_ptr() for t in (grad, x, weight, dx, dw)), *x.shape, x.stride(0),
                      eps, zero_centred, keep=(grad, x, weight, dx, dw))
    return dx, dw


@_rms_norm_grad_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float,
      zero_centred: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float,
                      zero_centred: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x [..., D] and of the weight [D], in plain torch.

    With s = 1 / sqrt(mean(x^2) + eps) and h = grad * w: dx = s h - x s^3 mean(h x).
    """
    x_dtype, weight_dtype = x.dtype, weight.dtype
    grad, x, weight = grad.float(), x.float(), weight.float()
    s = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    h = grad * (1.0 + weight if zero_centred else weight)
    dx = s * h - x * (s.pow(3) * (h * x).mean(-1, keepdim=True))
    dw = (grad * x * s).flatten(0, -2).sum(0)
    return dx.to(x_dtype), dw.to(weight_dtype)
