"""After the fused qkv projection, on CUDA: qk-norm, rotation, and the write into the cache, in one
kernel: one program per token and KV group."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from kilter.ops.cuda.launch import EXACT, FLOATS, check, jit, on_device, plain, power_of_two, tl
from kilter.ops.cuda.norm import inverse_rms


def rope_qkv(qkv_TGXd: Tensor, positions_T: Tensor, cos_Pe: Tensor, sin_Pe: Tensor, *,
             q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6,
             zero_centred: bool = False, kv: tuple[Tensor, Tensor, Tensor] | None = None,
             kv_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H, d] in qkv's dtype, keys, values).

    Queries and keys are normed (RMSNorm over d, if the weights are given) and rotated: element j
    pairs with j + d/2 (arXiv 2104.09864, half-split). All in fp32, rounded once per output.

    Args:
        qkv_TGXd: [T, G, R+2, d]: per KV group R queries, a key, a value.
        positions_T: integers [T]; one past the tables gives NaN (raising would wait for the GPU).
        cos_Pe, sin_Pe: float32 [P, d/2].
        q_norm, k_norm: [d], both or neither; ``zero_centred``: applied as 1 + w.
        kv: (keys, values, slots_T): caches [num_slots, G, d] that row t's key and value are
            written to at slot ``slots_T[t]``; these caches are then returned.
        kv_dtype: without ``kv``: dtype of the returned keys and values, [T, G, d].

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    _check(qkv_TGXd, positions_T, cos_Pe, sin_Pe, q_norm, k_norm, kv, kv_dtype)
    qkv_TGXd = plain(qkv_TGXd)
    tokens, groups, parts, dim = qkv_TGXd.shape
    queries = parts - 2
    q_THd = qkv_TGXd.new_empty(tokens, groups * queries, dim)
    if kv is None:
        keys = torch.empty(tokens, groups, dim, dtype=kv_dtype, device=q_THd.device)
        values, slots = torch.empty_like(keys), None
    else:
        keys, values, slots = kv[0], kv[1], plain(kv[2])
    if tokens:
        with on_device(q_THd):
            _rope_qkv[(tokens, groups)](
                qkv_TGXd, plain(positions_T), plain(cos_Pe), plain(sin_Pe),
                None if q_norm is None else plain(q_norm),
                None if k_norm is None else plain(k_norm), q_THd, keys, values, slots,
                cos_Pe.shape[0], eps, QUERIES=queries, HALF=dim // 2, ZERO_CENTRED=zero_centred,
                PARTS=power_of_two(parts), BLOCK=power_of_two(dim // 2),
                num_warps=4, **EXACT)
    return q_THd, keys, values


def _check(qkv, positions, cos, sin, q_norm, k_norm, kv, kv_dtype) -> None:
    problems = []
    if qkv.ndim != 4 or qkv.shape[2] < 3 or qkv.shape[3] % 2:
        problems.append(f"qkv has shape {list(qkv.shape)}; it must be [T, G, R+2, d] with even d")
    else:
        tokens, groups, _, dim = qkv.shape
        if positions.shape != (tokens,) or positions.is_floating_point():
            problems.append(f"positions are {positions.dtype} {list(positions.shape)}; they must "
                            f"be integers [{tokens}]")
        if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != dim // 2:
            problems.append(f"cos and sin have shapes {list(cos.shape)} and {list(sin.shape)}; "
                            f"they must be [P, {dim // 2}]")
        if (q_norm is None) != (k_norm is None):
            problems.append("one of q_norm and k_norm is missing; give both or neither")
        elif q_norm is not None and not q_norm.shape == k_norm.shape == (dim,):
            problems.append(f"q_norm and k_norm have shapes {list(q_norm.shape)} and "
                            f"{list(k_norm.shape)}; they must be [{dim}]")
        if kv is not None:
            if any(c.ndim != 3 or c.shape[1:] != (groups, dim) or not c.is_contiguous()
                   for c in kv[:2]):
                problems.append(f"the caches have shapes {list(kv[0].shape)} and "
                                f"{list(kv[1].shape)}; they must be contiguous "
                                f"[num_slots, {groups}, {dim}]")
            if kv[2].shape != (tokens,) or kv[2].is_floating_point():
                problems.append(f"slots are {kv[2].dtype} {list(kv[2].shape)}; they must be "
                                f"integers [{tokens}]")
    if kv_dtype not in FLOATS:
        problems.append(f"kv_dtype is {kv_dtype}; use float32, bfloat16 or float16")
    check("rope_qkv", problems, qkv, cos, sin, q_norm, k_norm, *(kv[:2] if kv else ()))


@jit
def _rope_qkv(qkv, positions, cos, sin, q_norm, k_norm, q_out, k_out, v_out, slots, table_rows,
              eps, QUERIES: tl.constexpr, HALF: tl.constexpr, ZERO_CENTRED: tl.constexpr,
              PARTS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    token_group = t * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, PARTS)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    inside = j < HALF
    at = qkv + (token_group * (QUERIES + 2) + part) * (2 * HALF) + j
    loaded = inside & (part < QUERIES + 2)
    a = tl.load(at, mask=loaded, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=loaded, other=0.0).to(tl.float32)
    value_a, value_b = a, b

    if q_norm is not None:
        inverse = inverse_rms(tl.sum(a * a, 1) + tl.sum(b * b, 1), 2 * HALF, eps)[:, None]
        w_a = tl.where(part < QUERIES, tl.load(q_norm + j, mask=inside, other=0.0),
                       tl.load(k_norm + j, mask=inside, other=0.0)).to(tl.float32)
        w_b = tl.where(part < QUERIES, tl.load(q_norm + HALF + j, mask=inside, other=0.0),
                       tl.load(k_norm + HALF + j, mask=inside, other=0.0)).to(tl.float32)
        if ZERO_CENTRED:
            w_a, w_b = 1.0 + w_a, 1.0 + w_b
        a, b = a * inverse * w_a, b * inverse * w_b

    position = tl.load(positions + t).to(tl.int64)
    known = j < tl.where((position >= 0) & (position < table_rows), HALF, 0)
    c = tl.load(cos + position * HALF + j, mask=known, other=float("nan")).to(tl.float32)
    s = tl.load(sin + position * HALF + j, mask=known, other=float("nan")).to(tl.float32)
    turned_a, turned_b = a * c - b * s, b * c + a * s

    q_at = q_out + (token_group * QUERIES + part) * (2 * HALF) + j
    is_query = inside & (part < QUERIES)
    tl.store(q_at, turned_a, mask=is_query)
    tl.store(q_at + HALF, turned_b, mask=is_query)

    slot = t if slots is None else tl.load(slots + t).to(tl.int64)
    row = (slot * tl.num_programs(1) + tl.program_id(1)) * (2 * HALF) + j + part * 0
    is_key = inside & (part == QUERIES)
    tl.store(k_out + row, turned_a, mask=is_key)
    tl.store(k_out + row + HALF, turned_b, mask=is_key)
    is_value = inside & (part == QUERIES + 1)
    tl.store(v_out + row, value_a, mask=is_value)
    tl.store(v_out + row + HALF, value_b, mask=is_value)
