"""The gate of a gated MLP: ``activation(gate) * up``, each element by itself."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # csrc/activation.h


class _GatedActivationArgs(ctypes.Structure):
    _fields_ = [("gate_up", ctypes.c_void_p), ("out", ctypes.c_void_p), ("rows", ctypes.c_int64),
                ("width", ctypes.c_int64), ("stride", ctypes.c_int64),
                ("activation", ctypes.c_int32)]


class _GatedActivationGradArgs(ctypes.Structure):
    _fields_ = [("grad", ctypes.c_void_p), *_GatedActivationArgs._fields_]


_kernel = Kernel("kt_gated_activation", _GatedActivationArgs)
_grad_kernel = Kernel("kt_gated_activation_grad", _GatedActivationGradArgs)


def gated_activation(gate_up_TF2: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``.

    Args:
        gate_up_TF2: [T, 2F], each row [gate; up]; rows may be strided. float32 on the CPU;
            bfloat16 and float16 too on CUDA.
        activation: ``"silu"``: x / (1 + e^-x); ``"gelu_tanh"``: the tanh form of GELU
            (arXiv 1606.08415), computed as x / (1 + e^-2u).

    Returns:
        [T, F] in the input's dtype.

    Raises:
        ValueError: for other shapes, dtypes, layouts or activations.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"The activation is {activation!r}; it must be one of "
                         f"{', '.join(ACTIVATIONS)}.")
    if gate_up_TF2.dim() != 2 or gate_up_TF2.shape[1] % 2:
        raise ValueError(f"gated_activation needs [T, 2F]; it got {tuple(gate_up_TF2.shape)}.")
    if not gate_up_TF2.is_cuda and (gate_up_TF2.dtype != torch.float32
                                    or gate_up_TF2.stride(1) != 1):
        raise ValueError(f"gated_activation needs float32 in contiguous rows; it got "
                         f"{gate_up_TF2.dtype} with strides {gate_up_TF2.stride()}.")
    if watched(gate_up_TF2):
        return _gated_activation_op(gate_up_TF2, activation)
    return _forward(gate_up_TF2, activation)


def _forward(gate_up: Tensor, activation: str) -> Tensor:
    if gate_up.is_cuda:
        from kilter.ops.cuda import activation as cuda

        return cuda.gated_activation(gate_up, activation)
    if not available():
        return reference.gated_activation(gate_up, activation)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _kernel.call(gate_up.data_ptr(), out.data_ptr(), rows, width, gate_up.stride(0),
                 ACTIVATIONS[activation], keep=(gate_up, out))
    return out


@torch.library.custom_op("kilter::gated_activation", mutates_args=())
def _gated_activation_op(gate_up: Tensor, activation: str) -> Tensor:
    return _forward(gate_up, activation)


@_gated_activation_op.register_fake
def _(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    gate_up, ctx.activation = inputs
    ctx.save_for_backward(gate_up)


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    (gate_up,) = ctx.saved_tensors
    return _gated_activation_grad_op(grad, gate_up, ctx.activation), None


_gated_activation_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("kilter::gated_activation_grad", mutates_args=())
def _gated_activation_grad_op(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    if gate_up.is_cuda or not available():
        return _backward_in_torch(grad, gate_up, activation)
    grad, out = grad.contiguous(), torch.empty(gate_up.shape)
    _grad_kernel.call(grad.data_ptr(), gate_up.data_ptr(), out.data_ptr(), *grad.shape,
                      gate_up.stride(0), ACTIVATIONS[activation], keep=(grad, gate_up, out))
    return out


@_gated_activation_grad_op.register_fake
def _(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _backward_in_torch(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        sigmoid = torch.sigmoid(gate)
        value, slope = gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    else:
        c = math.sqrt(2.0 / math.pi)
        sigmoid = torch.sigmoid(2.0 * c * (gate + 0.044715 * gate.pow(3)))
        value = gate * sigmoid
        du = c * (1.0 + 3.0 * 0.044715 * gate.square())
        slope = sigmoid * (1.0 + 2.0 * gate * (1.0 - sigmoid) * du)
    return torch.cat((grad * up * slope, grad * value), dim=-1)
