"""Token embeddings: rows of a weight matrix as fp32, times a constant."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched
from kilter.ops.packed import Matrix, PackedWeight, plain_matrix


class _EmbedArgs(ctypes.Structure):
    _fields_ = [("tokens", ctypes.c_void_p), ("out", ctypes.c_void_p), ("bad", ctypes.c_void_p),
                ("rows", ctypes.c_int64), ("w", Matrix), ("scale", ctypes.c_float)]


_kernel = Kernel("kt_embed", _EmbedArgs)


def embed(tokens_T: Tensor, weight: Tensor | PackedWeight, scale: float = 1.0) -> Tensor:
    """Row ``tokens[t]`` of ``weight`` times ``scale`` (one fp32 multiplication).

    Args:
        tokens_T: int64 [T], contiguous.
        weight: [V, D], packed, or a float32, bfloat16 or float16 tensor.
        scale: rounded to fp32 first.

    Returns:
        float32 [T, D].

    Raises:
        ValueError: for a token id outside 0 .. V-1, or other shapes and dtypes.
    """
    if (tokens_T.dim() != 1 or tokens_T.dtype != torch.int64 or not tokens_T.is_contiguous()
            or len(weight.shape) != 2):
        raise ValueError(f"embed needs contiguous int64 tokens [T] and a weight [V, D]; it got "
                         f"{tokens_T.dtype} {tuple(tokens_T.shape)} and {tuple(weight.shape)}.")
    if isinstance(weight, PackedWeight):
        if watched(tokens_T):
            return _embed_op(tokens_T, weight.data, scale, weight.facts())
    elif watched(weight, tokens_T):
        return _embed_op(tokens_T, weight, scale, [])
    return _forward(tokens_T, weight, scale)


def _forward(tokens: Tensor, weight: Tensor | PackedWeight, scale: float) -> Tensor:
    if tokens.is_cuda:
        from kilter.ops.cuda import embedding as cuda

        if isinstance(weight, PackedWeight):
            raise ValueError("A packed weight is for the CPU, but the tokens are on a GPU: use the "
                             "plain tensor there.")
        return cuda.embed(tokens, weight, scale)
    if not available():
        if isinstance(weight, PackedWeight):
            weight = weight.dequantize()
        return reference.embed(tokens, weight, scale)
    if isinstance(weight, Tensor) and weight.stride(1) != 1:
        weight = weight.contiguous()
    matrix = weight.matrix if isinstance(weight, PackedWeight) else plain_matrix(weight)
    out = torch.empty(tokens.shape[0], weight.shape[1], dtype=torch.float32)
    bad = ctypes.c_int64()
    _kernel.call(tokens.data_ptr(), out.data_ptr(), ctypes.addressof(bad), tokens.shape[0], matrix,
                 scale, keep=(tokens, weight, out, bad))
    if bad.value >= 0:
        raise ValueError(f"Token id {int(tokens[bad.value])} (place {bad.value}) is outside the "
                         f"vocabulary of {weight.shape[0]} tokens.")
    return out


@torch.library.custom_op("kilter::embed", mutates_args=())
def _embed_op(tokens: Tensor, weight: Tensor, scale: float, facts: list[int]) -> Tensor:
    return _forward(tokens, PackedWeight.of(weight, facts) if facts else weight, scale)


@_embed_op.register_fake
def _(tokens: Tensor, weight: Tensor, scale: float, facts: list[int]) -> Tensor:
    size = facts[1] if facts else weight.shape[1]
    return weight.new_empty(tokens.shape[0], size, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tokens, weight, ctx.scale, _ = inputs
    ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
    ctx.save_for_backward(tokens)


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    (tokens,) = ctx.saved_tensors
    dw = torch.ops.aten.embedding_dense_backward(grad * ctx.scale, tokens, ctx.rows, -1, False)
    return None, dw.to(ctx.dtype), None, None


_embed_op.register_autograd(_backward, setup_context=_save)
