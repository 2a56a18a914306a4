"""Causal attention of flat tokens over their own keys or a paged cache.

The order of every sum depends only on a row's own context index and window (csrc/attention.cpp
says how), so prefill, chunks of it, decode and any batch give the same bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.band_attention import Bands, band_attention_grad
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched
from kilter.ops.rope import KV_TYPES


class _AttentionArgs(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in
                  ("q", "k", "v", "cu_seqlens", "context", "page_table", "out", "lse", "status")),
                *((name, ctypes.c_int64) for name in
                  ("tokens", "seqs", "heads", "groups", "dim", "slots", "page_size",
                   "table_width", "window")),
                ("scale", ctypes.c_float), ("kv_type", ctypes.c_int32)]


_kernel = Kernel("kt_attention", _AttentionArgs)


def attention(q_THd: Tensor, keys: Tensor, values: Tensor, cu_seqlens_S1: Tensor, *,
              context_S: Tensor | None = None, page_table_SP: Tensor | None = None,
              page_size: int = 0, scale: float, window: int | None = None, max_seqlen: int = 0,
              return_lse: bool = False) -> Any:
    """Softmax attention; query head h reads KV head h // (H / G).

    Args:
        q_THd: [T, H, d], sequence after sequence. float32 on the CPU; bfloat16 and float16 too on
            CUDA.
        keys, values: float32, bfloat16 or float16, widened exactly. Without a page table
            [T, G, d]: the keys of sequence s are rows cu[s] to cu[s + 1]. With one [slots, G, d]:
            key j lies in slot ``page_table[s, j // page_size] * page_size + j % page_size``.
        cu_seqlens_S1: int32 [S + 1], where each sequence's tokens start.
        context_S, page_table_SP, page_size: int32 [S], int32 [S, P], tokens per page. Query t of
            sequence s has context index ``context[s] - (cu[s + 1] - t)``.
        scale: multiplies the scores.
        window: a token sees itself and the window - 1 before it; None: everything before it.
        max_seqlen: largest number of new tokens of a sequence, which a CUDA launch must know on
            the host; the CPU kernel reads the lengths themselves.
        return_lse: also return the natural log of each row's sum of exponentials.

    Returns:
        [T, H, d] in q's dtype, and float32 [T, H] if asked for.

    Raises:
        ValueError: for other shapes, dtypes or layouts, boundaries that do not cover the tokens,
            a context shorter than its new tokens or longer than its pages, a page out of range
            (in a replayed tape, where nobody looks, the rows become NaN), or a cache where a
            gradient is asked for.
    """
    if not q_THd.is_cuda:
        _check(q_THd, keys, values, cu_seqlens_S1, context_S, page_table_SP, page_size, window)
    args = (q_THd, keys, values, cu_seqlens_S1, context_S, page_table_SP, page_size, scale,
            window or 0, max_seqlen)
    if watched(q_THd, keys, values, cu_seqlens_S1):
        if context_S is not None and torch.is_grad_enabled() and (
                q_THd.requires_grad or keys.requires_grad or values.requires_grad):
            raise ValueError("Attention over a cache has no gradient: run cached passes under "
                             "torch.no_grad(), or train without a cache.")
        out, lse = _attention_op(*args)
    else:
        out, lse = _forward(*args, need_lse=return_lse)
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, context: Tensor | None,
           table: Tensor | None, page_size: int, window: int | None) -> None:
    problems = []
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or (
            k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        problems.append(f"it needs q [T, H, d] and keys and values [N, G, d] with H a multiple of "
                        f"G, but got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    elif context is None and k.shape[0] != q.shape[0]:
        problems.append(f"there are {q.shape[0]} queries but {k.shape[0]} keys, and no page table")
    if q.dtype != torch.float32 or k.dtype not in KV_TYPES or v.dtype != k.dtype:
        problems.append(f"queries must be float32 and keys and values one of "
                        f"{', '.join(map(str, KV_TYPES))}, but they are {q.dtype}, {k.dtype}, "
                        f"{v.dtype}")
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        problems.append("queries, keys and values must be contiguous; call .contiguous() first")
    if cu.dim() != 1 or cu.shape[0] < 1 or cu.dtype != torch.int32 or not cu.is_contiguous():
        problems.append(f"cu_seqlens must be contiguous int32 [S + 1], but is {cu.dtype} "
                        f"{list(cu.shape)}")
    if (context is None) != (table is None):
        problems.append("context_S and page_table_SP go together: give both or neither")
    elif context is not None and table is not None:
        seqs = cu.shape[0] - 1
        if (context.shape != (seqs,) or context.dtype != torch.int32
                or not context.is_contiguous()):
            problems.append(f"context_S must be contiguous int32 [{seqs}], but is "
                            f"{context.dtype} {list(context.shape)}")
        if (table.dim() != 2 or table.shape[0] != seqs or table.dtype != torch.int32
                or not table.is_contiguous()):
            problems.append(f"page_table_SP must be contiguous int32 [{seqs}, P], but is "
                            f"{table.dtype} {list(table.shape)}")
        if page_size < 1:
            problems.append(f"page_size is {page_size}; with a page table it must be positive")
    if window is not None and window < 1:
        problems.append(f"window is {window}; it must be positive, or None for no window")
    if problems:
        raise ValueError(f"Attention: {'; '.join(problems)}.")


def _forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, context: Tensor | None,
             table: Tensor | None, page_size: int, scale: float, window: int, max_seqlen: int,
             need_lse: bool = True) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        from kilter.ops.cuda import attention as cuda

        return cuda.attention(q, k, v, cu, context_S=context, page_table_SP=table,
                              page_size=page_size, scale=scale, window=window or None,
                              max_seqlen=max_seqlen, return_lse=True)
    if not available():
        return reference.attention(q, k, v, cu, context, table, page_size, scale, window)
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(tokens if need_lse else 0, heads)
    status = ctypes.c_int32(0)
    _kernel.call(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), cu.data_ptr(),
        None if context is None else context.data_ptr(),
        None if table is None else table.data_ptr(), out.data_ptr(),
        lse.data_ptr() if need_lse else None, ctypes.addressof(status),
        tokens, cu.shape[0] - 1, heads, k.shape[1], dim, k.shape[0], page_size,
        0 if table is None else table.shape[1], window, scale, KV_TYPES[k.dtype],
        keep=(q, k, v, cu, context, table, out, lse, status))
    if status.value:
        reference.check_lengths(q, k, cu, context, table, page_size)
    return out, lse


@torch.library.custom_op("kilter::attention", mutates_args=())
def _attention_op(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, context: Tensor | None,
                  table: Tensor | None, page_size: int, scale: float, window: int,
                  max_seqlen: int) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, cu, context, table, page_size, scale, window, max_seqlen)


@_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, context: Tensor | None,
      table: Tensor | None, page_size: int, scale: float, window: int,
      max_seqlen: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu, _, _, _, ctx.scale, ctx.window, _ = inputs
    ctx.save_for_backward(q, k, v, cu, *output)


def _backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
    q, k, v, cu, out, lse = ctx.saved_tensors
    dq, dk, dv = _attention_backward_op(grad, q, k, v, cu, out, lse, ctx.scale, ctx.window)
    return dq, dk, dv, None, None, None, None, None, None, None


_attention_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("kilter::attention_backward", mutates_args=())
def _attention_backward_op(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, out: Tensor,
                           lse: Tensor, scale: float,
                           window: int) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = band_attention_grad(grad, q, k, v, out, lse, Bands.causal(cu, window),
                                     scale=scale)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_attention_backward_op.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, out: Tensor, lse: Tensor,
      scale: float, window: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
