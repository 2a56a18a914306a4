"""From the fused qkv projection to what attention reads: rotated queries and stored keys and
values, with the per-head norms of q and k, the rotation, the narrowing and the cache write in one
kernel.

The rotation is the half-split form of rotary embedding (arXiv 2104.09864): elements j and
j + d/2 of a head turn by the angle of (position, j).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched
from kilter.ops.norm import rms_norm_backward

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/rope.cpp, attention.cpp


class _RopeQkvArgs(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in
                  ("qkv", "positions", "cos", "sin", "q_norm", "k_norm", "slots", "q", "k", "v",
                   "status")),
                *((name, ctypes.c_int64) for name in
                  ("tokens", "groups", "queries", "dim", "num_positions", "num_slots")),
                ("eps", ctypes.c_float), ("zero_centred", ctypes.c_int32),
                ("kv_type", ctypes.c_int32)]


class _RopeQkvGradArgs(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in
                  ("dq", "dk", "dv", "qkv", "positions", "cos", "sin", "q_norm", "k_norm", "dqkv",
                   "dq_norm", "dk_norm")),
                *((name, ctypes.c_int64) for name in ("tokens", "groups", "queries", "dim")),
                ("eps", ctypes.c_float), ("zero_centred", ctypes.c_int32)]


_kernel = Kernel("kt_rope_qkv", _RopeQkvArgs)
_grad_kernel = Kernel("kt_rope_qkv_grad", _RopeQkvGradArgs)


def rope_qkv(qkv_TGXd: Tensor, positions_T: Tensor, cos_Pe: Tensor, sin_Pe: Tensor, *,
             q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6,
             zero_centred: bool = False, kv: tuple[Tensor, Tensor, Tensor] | None = None,
             kv_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Splits, normalises, rotates and stores.

    Args:
        qkv_TGXd: [T, G, R + 2, d], per KV head: R queries, its key, its value; contiguous. float32
            on the CPU; bfloat16 and float16 too on CUDA.
        positions_T: int32 [T], rows of the tables.
        cos_Pe, sin_Pe: float32 [P, d/2] tables; contiguous.
        q_norm, k_norm: [d] weights of an RMS norm over each head before the rotation.
        eps, zero_centred: of those norms, as in `rms_norm`.
        kv: ``(keys [slots, G, d], values [slots, G, d], slots_T int32 [T])``: a cache of float32,
            bfloat16 or float16 that is written at the slots.
        kv_dtype: what the returned keys and values are rounded to where there is no cache; the
            gradient passes the rounding unchanged.

    Returns:
        ``(q [T, G * R, d] in qkv's dtype, keys, values)``: the cache's tensors, or new ones,
        [T, G, d] of kv_dtype.

    Raises:
        ValueError: for other shapes, dtypes or layouts, a cache where a gradient is asked for, or
            a position or slot out of range (where nobody looks, on CUDA or in a replayed tape,
            such a token's queries are NaN and it stores nothing).
    """
    if not qkv_TGXd.is_cuda:
        _check(qkv_TGXd, positions_T, cos_Pe, sin_Pe, q_norm, k_norm, kv, kv_dtype)
    through_op = watched(qkv_TGXd, q_norm, k_norm, positions_T)
    if kv is None:
        fn = _rope_qkv_op if through_op else _to_new
        return fn(qkv_TGXd, positions_T, cos_Pe, sin_Pe, q_norm, k_norm, eps, zero_centred,
                  kv_dtype)
    if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (qkv_TGXd, q_norm, k_norm)):
        raise ValueError("Keys and values written to a cache carry no gradient: run cached passes "
                         "under torch.no_grad(), or train without a cache.")
    into = _rope_qkv_cache_op if through_op else _to_cache
    q_THd = into(qkv_TGXd, positions_T, cos_Pe, sin_Pe, q_norm, k_norm, eps, zero_centred, *kv)
    return q_THd, kv[0], kv[1]


def _check(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
           k_norm: Tensor | None, kv: tuple[Tensor, Tensor, Tensor] | None,
           kv_dtype: torch.dtype) -> None:
    if qkv.dim() != 4 or qkv.shape[2] < 3 or qkv.shape[3] % 2 or qkv.shape[3] == 0:
        raise ValueError(f"rope_qkv needs qkv [T, G, R + 2, d] with R >= 1 and d even; it got "
                         f"{tuple(qkv.shape)}.")
    tokens, groups, _, dim = qkv.shape
    problems = []

    def need(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
            problems.append(f"{name} must be contiguous {dtype} {list(shape)} but is {x.dtype} "
                            f"{list(x.shape)} with strides {x.stride()}")

    need("qkv", qkv, tuple(qkv.shape), torch.float32)
    need("positions", positions, (tokens,), torch.int32)
    need("cos", cos, (cos.shape[0], dim // 2), torch.float32)
    need("sin", sin, (cos.shape[0], dim // 2), torch.float32)
    if q_norm is not None:
        need("q_norm", q_norm, (dim,), torch.float32)
    if k_norm is not None:
        need("k_norm", k_norm, (dim,), torch.float32)
    if kv is not None:
        keys, values, slots = kv
        kv_dtype = keys.dtype
        need("the key cache", keys, (keys.shape[0], groups, dim), kv_dtype)
        need("the value cache", values, tuple(keys.shape), kv_dtype)
        need("slots", slots, (tokens,), torch.int32)
    if kv_dtype not in KV_TYPES:
        problems.append(f"keys and values cannot be stored as {kv_dtype}; choose one of "
                        f"{', '.join(map(str, KV_TYPES))}")
    if problems:
        raise ValueError(f"rope_qkv: {'; '.join(problems)}.")


def _to_new(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
            k_norm: Tensor | None, eps: float, zero_centred: bool,
            kv_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if qkv.is_cuda:
        from kilter.ops.cuda import rope as cuda

        return cuda.rope_qkv(qkv, positions, cos, sin, q_norm=q_norm, k_norm=k_norm, eps=eps,
                             zero_centred=zero_centred, kv_dtype=kv_dtype)
    tokens, groups, _, dim = qkv.shape
    keys = qkv.new_empty(tokens, groups, dim, dtype=kv_dtype)
    values = torch.empty_like(keys)
    q = _forward(qkv, positions, cos, sin, q_norm, k_norm, eps, zero_centred, keys, values, None)
    return q, keys, values


def _to_cache(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
              k_norm: Tensor | None, eps: float, zero_centred: bool, keys: Tensor,
              values: Tensor, slots: Tensor) -> Tensor:
    if qkv.is_cuda:
        from kilter.ops.cuda import rope as cuda

        return cuda.rope_qkv(qkv, positions, cos, sin, q_norm=q_norm, k_norm=k_norm, eps=eps,
                             zero_centred=zero_centred, kv=(keys, values, slots))[0]
    return _forward(qkv, positions, cos, sin, q_norm, k_norm, eps, zero_centred, keys, values,
                    slots)


def _forward(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
             k_norm: Tensor | None, eps: float, zero_centred: bool, keys: Tensor, values: Tensor,
             slots: Tensor | None) -> Tensor:
    if not available():
        return reference.rope_qkv_into(qkv, positions, cos, sin, q_norm, k_norm, eps,
                                       zero_centred, keys, values, slots)
    tokens, groups, parts, dim = qkv.shape
    q = qkv.new_empty(tokens, groups * (parts - 2), dim)
    status = ctypes.c_int32(0)
    _kernel.call(
        qkv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        None if slots is None else slots.data_ptr(), q.data_ptr(), keys.data_ptr(),
        values.data_ptr(), ctypes.addressof(status), tokens, groups, parts - 2, dim,
        cos.shape[0], keys.shape[0], eps, zero_centred, KV_TYPES[keys.dtype],
        keep=(qkv, positions, cos, sin, q_norm, k_norm, slots, q, keys, values, status))
    if status.value:
        reference.check_range("position", positions, cos.shape[0])
        if slots is not None:
            reference.check_range("slot", slots, keys.shape[0])
    return q


@torch.library.custom_op("kilter::rope_qkv", mutates_args=())
def _rope_qkv_op(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
                 q_norm: Tensor | None, k_norm: Tensor | None, eps: float, zero_centred: bool,
                 kv_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _to_new(qkv, positions, cos, sin, q_norm, k_norm, eps, zero_centred, kv_dtype)


@_rope_qkv_op.register_fake
def _(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
      k_norm: Tensor | None, eps: float, zero_centred: bool,
      kv_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    tokens, groups, parts, dim = qkv.shape
    return (qkv.new_empty(tokens, groups * (parts - 2), dim),
            qkv.new_empty(tokens, groups, dim, dtype=kv_dtype),
            qkv.new_empty(tokens, groups, dim, dtype=kv_dtype))


@torch.library.custom_op("kilter::rope_qkv_cache", mutates_args=("keys", "values"))
def _rope_qkv_cache_op(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
                       q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                       zero_centred: bool, keys: Tensor, values: Tensor,
                       slots: Tensor) -> Tensor:
    return _to_cache(qkv, positions, cos, sin, q_norm, k_norm, eps, zero_centred, keys, values,
                     slots)


@_rope_qkv_cache_op.register_fake
def _(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
      k_norm: Tensor | None, eps: float, zero_centred: bool, keys: Tensor, values: Tensor,
      slots: Tensor) -> Tensor:
    tokens, groups, parts, dim = qkv.shape
    return qkv.new_empty(tokens, groups * (parts - 2), dim)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, positions, cos, sin, q_norm, k_norm, ctx.eps, ctx.zero_centred, _ = inputs
    ctx.save_for_backward(qkv, positions, cos, sin, q_norm, k_norm)


def _backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # once: under recompute they can be taken only once
    q_norm, k_norm = saved[4:]
    dqkv, dq_norm, dk_norm = _rope_qkv_grad_op(dq, dk, dv, *saved, ctx.eps, ctx.zero_centred)
    return (dqkv, None, None, None, None if q_norm is None else dq_norm,
            None if k_norm is None else dk_norm, None, None, None)


_rope_qkv_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("kilter::rope_qkv_grad", mutates_args=())
def _rope_qkv_grad_op(dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, positions: Tensor,
                      cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
                      eps: float, zero_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv and of the norms (empty where there is none)."""
    if qkv.is_cuda or not available():
        return _backward_in_torch(dq, dk, dv, qkv, positions, cos, sin, q_norm, k_norm, eps,
                                  zero_centred)
    dq, dk, dv = dq.contiguous(), dk.float().contiguous(), dv.float().contiguous()
    dqkv = torch.empty_like(qkv)
    dq_norm, dk_norm = _norm_grads(qkv, q_norm, k_norm)
    tensors = (dq, dk, dv, qkv, positions, cos, sin, q_norm, k_norm, dqkv, dq_norm, dk_norm)
    tokens, groups, parts, dim = qkv.shape
    _grad_kernel.call(*(None if t is None else t.data_ptr() for t in tensors), tokens, groups,
                      parts - 2, dim, eps, zero_centred, keep=tensors)
    return dqkv, dq_norm, dk_norm


def _norm_grads(qkv: Tensor, q_norm: Tensor | None,
                k_norm: Tensor | None) -> tuple[Tensor, Tensor]:
    return (qkv.new_empty(0) if q_norm is None else torch.empty_like(q_norm),
            qkv.new_empty(0) if k_norm is None else torch.empty_like(k_norm))


@_rope_qkv_grad_op.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
      q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
      zero_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.empty_like(qkv), *_norm_grads(qkv, q_norm, k_norm))


def _backward_in_torch(dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, positions: Tensor,
                       cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
                       eps: float, zero_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    tokens, groups, parts, dim = qkv.shape
    index = positions.long()
    cos, sin = cos[index][:, None, None], sin[index][:, None, None]

    def turn_back(grad: Tensor) -> Tensor:
        a, b = grad.float().chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)

    dq = turn_back(dq.reshape(tokens, groups, parts - 2, dim))
    dk = turn_back(dk.reshape(tokens, groups, 1, dim))
    dq_norm, dk_norm = _norm_grads(qkv, q_norm, k_norm)
    if q_norm is not None:
        dq, dq_norm = rms_norm_backward(dq, qkv[:, :, :-2], q_norm, eps, zero_centred)
    if k_norm is not None:
        dk, dk_norm = rms_norm_backward(dk, qkv[:, :, -2:-1], k_norm, eps, zero_centred)
    dqkv = torch.cat((dq, dk, dv.float()[:, :, None]), dim=2)
    return dqkv.to(qkv.dtype), dq_norm, dk_norm
