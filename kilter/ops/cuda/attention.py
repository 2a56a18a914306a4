"""Causal attention on CUDA over packed or paged keys, with the same bits however a text is cut.

Rows of a tile are (token, query head) pairs of one sequence and one KV group, so that the R query
heads of a group share the keys they read. Keys are taken in blocks of a fixed size counted from
key 0 of the sequence, and blocks in segments of a fixed number:

    keys      |....|....|....|....||....|....|....|....||....|..          absolute, from key 0
    segment          0                     1                2
    row       one online softmax (arXiv 2205.14135) per segment, segments merged in ascending order

So a row's sum depends on its own context alone, and segments can be computed by one block of
threads after another (prefill) or side by side by many (decode over a long context) and merged
later: the same bits. A block that a row cannot see leaves the row's running state as it is, bit
for bit. Blocks that every row of a tile sees whole skip the masks; only the others must keep what
a row may not see (unwritten slots, later keys) from reaching it, NaN included.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=attr-defined

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kilter.ops.cuda.launch import (
    EXACT,
    check,
    dot_dtype,
    dtype_of,
    jit,
    multiprocessors,
    on_device,
    plain,
    power_of_two,
    shared_memory,
    tl,
)


@dataclass(frozen=True)
class Tile:
    """How the work is cut. All but ``stages`` enter the arithmetic: one tile per dtype and
    head_dim, at decode as in prefill."""

    rows: int  # (token, query head) pairs
    keys: int  # keys of a block
    segment: int  # blocks of a segment
    warps: int
    stages: int  # blocks of keys and values in flight


_SPLIT_BYTES = 256 << 20  # most memory that a split pass may take for its partial results


def attention(q_THd: Tensor, keys: Tensor, values: Tensor, cu_seqlens_S1: Tensor, *,
              context_S: Tensor | None = None, page_table_SP: Tensor | None = None,
              page_size: int = 0, scale: float, window: int | None = None, max_seqlen: int = 0,
              return_lse: bool = False) -> Any:
    """[T, H, d] in q's dtype; with ``return_lse`` also the log-sum-exp, float32 [T, H].

    Token t of sequence s stands at ``context_S[s] - (cu[s+1] - t)`` and sees the keys up to its
    own place, at most ``window`` of them. Products and sums are fp32; with 16-bit queries the
    probabilities are rounded to their dtype before they meet the values.

    Args:
        q_THd: [T, H, d].
        keys, values: [T, G, d], the batch's own; or, with ``page_table_SP``, caches
            [num_slots, G, d] where key j of sequence s lies in slot
            ``page_table_SP[s, j // page_size] * page_size + j % page_size``. In q's dtype, or any
            float dtype if q is float32.
        cu_seqlens_S1, context_S, page_table_SP: int32.
        max_seqlen: the largest number of new tokens of a sequence, or more. 0: not known, and read
            from the GPU, which waits for it.

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    paged = page_table_SP is not None
    _check(q_THd, keys, values, cu_seqlens_S1, context_S, page_table_SP, page_size, window)
    tokens, heads, dim = q_THd.shape
    sequences, groups = cu_seqlens_S1.shape[0] - 1, keys.shape[1]
    if max_seqlen == 0 and tokens:
        max_seqlen = int(cu_seqlens_S1.diff().max())
    largest = page_table_SP.shape[1] * page_size if page_table_SP is not None else max_seqlen
    tile = choose(q_THd.dtype, dim, q_THd.device)
    parts = -(-largest // (tile.keys * tile.segment))
    split = (paged and parts > 1 and max_seqlen * (heads // groups) <= tile.rows
             and sequences * groups < 2 * multiprocessors(q_THd.device)
             and 4 * parts * tokens * heads * (dim + 2) <= _SPLIT_BYTES)
    out, lse = launch(q_THd, keys, values, cu_seqlens_S1, context_S, page_table_SP, page_size,
                      scale, window, max_seqlen, tile, parts if split else 0)
    return (out, lse) if return_lse else out


def choose(dtype: torch.dtype, dim: int, device: torch.device) -> Tile:
    """The tile of a dtype and head_dim: sizes that keep the inner loop in registers, and one block
    less in flight on GPUs with little shared memory."""
    if dtype == torch.float32:
        tile = Tile(16, 32, 32, 8, 2)
    else:
        tile = Tile(128, 64, 16, 8, 3) if dim <= 128 else Tile(64, 64, 16, 8, 2)
    return tile if shared_memory(device) >= 160 * 1024 else replace(tile, stages=tile.stages - 1)


def _check(q, keys, values, cu_seqlens, context, page_table, page_size, window) -> None:
    problems = []
    if (q.ndim != 3 or keys.ndim != 3 or keys.shape != values.shape
            or keys.shape[2] != q.shape[2] or q.shape[1] % keys.shape[1]):
        problems.append(f"q, keys and values have shapes {list(q.shape)}, {list(keys.shape)} and "
                        f"{list(values.shape)}; they must be [T, H, d] and twice [*, G, d], with "
                        "H a multiple of G")
    elif q.shape[2] > 256:
        problems.append(f"head_dim is {q.shape[2]}; at most 256 fits the kernel's registers")
    if keys.dtype != values.dtype or (keys.dtype != q.dtype and q.dtype != torch.float32):
        problems.append(f"q is {q.dtype}, keys {keys.dtype} and values {values.dtype}; give all "
                        "one dtype, or float32 q and one dtype of keys and values")
    if (context is None) != (page_table is None):
        problems.append("one of context_S and page_table_SP is missing; give both or neither")
    elif page_table is not None:
        sequences = cu_seqlens.shape[0] - 1
        if page_size <= 0:
            problems.append(f"page_size is {page_size}; it must be positive")
        if context.shape != (sequences,) or page_table.shape[:1] != (sequences,):
            problems.append(f"context_S has shape {list(context.shape)} and page_table_SP "
                            f"{list(page_table.shape)}; both must have {sequences} rows")
    elif keys.shape[0] != q.shape[0]:
        problems.append(f"there are {q.shape[0]} queries and {keys.shape[0]} keys; without a page "
                        "table keys are the batch's own, one per token")
    if window is not None and window <= 0:
        problems.append(f"window is {window}; it must be positive, or None for all keys")
    for name, index in (("cu_seqlens", cu_seqlens), ("context", context), ("page_table",
                                                                          page_table)):
        if index is not None and index.dtype != torch.int32:
            problems.append(f"{name} is {index.dtype}; make it int32")
    check("attention", problems, q, keys, values)


def launch(q_THd: Tensor, keys: Tensor, values: Tensor, cu_seqlens_S1: Tensor,
           context_S: Tensor | None, page_table_SP: Tensor | None, page_size: int, scale: float,
           window: int | None, max_seqlen: int, tile: Tile, parts: int) -> tuple[Tensor, Tensor]:
    """Starts the kernels on checked arguments: one pass, or with ``parts`` > 0 segments side by
    side and a merge. Both give the same bits. Returns (out, log-sum-exp)."""
    q_THd = plain(q_THd)
    keys, values = (x if x.stride(-1) == 1 else plain(x) for x in (keys, values))
    tokens, heads, dim = q_THd.shape
    sequences, groups = cu_seqlens_S1.shape[0] - 1, keys.shape[1]
    out_THd = torch.empty_like(q_THd)
    lse_TH = torch.empty(tokens, heads, dtype=torch.float32, device=q_THd.device)
    if not out_THd.numel():
        return out_THd, lse_TH
    width = parts * tokens * heads
    partial = torch.empty(width * (dim + 2), dtype=torch.float32, device=q_THd.device)
    sums, tops, totals = partial[:width * dim], partial[width * dim:-width], partial[-width:]
    table = None if page_table_SP is None else plain(page_table_SP)
    place = (plain(cu_seqlens_S1), None if context_S is None else plain(context_S))
    shape = {"HEADS": heads, "GROUPS": groups, "DIM": dim, "BLOCK": power_of_two(dim, 16),
             "WINDOW": window or 0, "ROWS": tile.rows, "KEYS": tile.keys,
             "SEGMENT": tile.segment, "num_warps": tile.warps, **EXACT}
    tiles = -(-max_seqlen * (heads // groups) // tile.rows)
    with on_device(q_THd):
        _attention[(tiles * max(parts, 1), groups, sequences)](
            q_THd, keys, values, *place, table, out_THd, lse_TH, sums, tops, totals,
            scale * math.log2(math.e), tokens, tiles, 0 if table is None else table.shape[1],
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            PAGE=page_size, SPLIT=parts > 0, DOT=dot_dtype(q_THd.dtype),
            PROBABILITY=dtype_of(q_THd.dtype), num_stages=tile.stages, **shape)
        if parts:
            _merge_parts[(tiles, groups, sequences)](
                *place, out_THd, lse_TH, sums, tops, totals, tokens, **shape)
    return out_THd, lse_TH


@jit
def _rows_of_tile(cu_seqlens, context, tile, HEADS: tl.constexpr, GROUPS: tl.constexpr,
                  ROWS: tl.constexpr):
    """Where a tile's rows are: flat row index (token * HEADS + head), place in the sequence, which
    rows exist; and the first token, context length, and number of rows of the sequence."""
    s = tl.program_id(2)
    per_token: tl.constexpr = HEADS // GROUPS
    start = tl.load(cu_seqlens + s)
    new = tl.load(cu_seqlens + s + 1) - start
    total = new if context is None else tl.load(context + s)
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < new * per_token
    token = tl.minimum(row // per_token, new - 1)
    head = tl.program_id(1) * per_token + row % per_token
    flat = (start + token).to(tl.int64) * HEADS + head
    return flat, total - new + token, exists, start, total, new * per_token


@jit
def _blocks_of_tile(place, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Blocks of keys that a tile's rows see: from, first that all see whole, end of those, end."""
    first, last = tl.min(place, 0), tl.max(place, 0)
    begin, whole = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS
        whole = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), KEYS)
    return begin, whole, (first + 1) // KEYS, last // KEYS + 1


@jit
def _merge(top, total, acc, top_2, total_2, acc_2):
    """Two softmax states of the same rows over different keys (both relative to their maximum)."""
    new = tl.maximum(top, top_2)
    base = tl.where(new == float("-inf"), 0.0, new)
    a, b = tl.exp2(top - base), tl.exp2(top_2 - base)
    return new, total * a + total_2 * b, acc * a[:, None] + acc_2 * b[:, None]


@jit
def _write(out, lse, flat, exists, top, total, acc, DIM: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    mask = exists[:, None] & (d[None, :] < DIM)
    tl.store(out + flat[:, None] * DIM + d[None, :], acc / total[:, None], mask=mask)
    tl.store(lse + flat, (top + tl.log2(total)) * 0.6931471805599453, mask=exists)


@jit
def _wild(v):
    """Infinite or NaN."""
    v = v.to(tl.float32)
    return v - v != 0.0


@jit
def _attend(top, total, acc, q, keys, values, table, start, context, place, scale, first, last,
            key_stride, value_stride, PAGE: tl.constexpr, WINDOW: tl.constexpr,
            KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
            PROBABILITY: tl.constexpr, MASKED: tl.constexpr):
    """Takes blocks first..last-1 of keys into the rows' softmax state."""
    d = tl.arange(0, BLOCK)
    for block in range(first, last):
        key = block * KEYS + tl.arange(0, KEYS)
        exists = key < context
        if table is None:
            slot = (start + key).to(tl.int64)
        elif MASKED:
            page = tl.load(table + key // PAGE, mask=exists, other=0).to(tl.int64)
            slot = page * PAGE + key % PAGE
        else:
            slot = tl.load(table + key // PAGE).to(tl.int64) * PAGE + key % PAGE
        k_mask = (d < DIM)[:, None]
        v_mask = (d < DIM)[None, :]
        if MASKED:
            k_mask = k_mask & exists[None, :]
            v_mask = v_mask & exists[:, None]
        k = tl.load(keys + slot[None, :] * key_stride + d[:, None], mask=k_mask, other=0.0)
        v_at = values + slot[:, None] * value_stride + d[None, :]
        v = tl.load(v_at, mask=v_mask, other=0.0)
        score = tl.dot(q, k.to(DOT), input_precision="ieee") * scale
        if MASKED:
            seen = key[None, :] <= place[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > place[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        p = p.to(PROBABILITY).to(DOT)
        if MASKED:
            # 0 * NaN is NaN: values that are not finite meet only the rows that see their key.
            acc = tl.dot(p, tl.where(_wild(v), 0.0, v).to(DOT), acc, input_precision="ieee")
            if tl.max(tl.max(_wild(v).to(tl.int32), 1), 0) > 0:
                v = tl.load(v_at, mask=v_mask, other=0.0)
                met = tl.dot(seen.to(DOT), _wild(v).to(DOT), input_precision="ieee")
                acc = tl.where(met > 0.0, float("nan"), acc)
        else:
            acc = tl.dot(p, v.to(DOT), acc, input_precision="ieee")
        top = new
    return top, total, acc


@jit(do_not_specialize=["tokens", "tiles", "table_width"])
def _attention(q, keys, values, cu_seqlens, context, table, out, lse, sums, tops, totals, scale,
               tokens, tiles, table_width, k_slot, k_group, v_slot, v_group,
               HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
               PAGE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
               SEGMENT: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
               PROBABILITY: tl.constexpr):
    # The last tile of a sequence sees the most keys: long work first.
    tile = tiles - 1 - tl.program_id(0) % tiles
    flat, place, exists, start, length, rows = _rows_of_tile(
        cu_seqlens, context, tile, HEADS, GROUPS, ROWS)
    if tile * ROWS >= rows:
        return
    begin, whole, whole_end, end = _blocks_of_tile(place, WINDOW, KEYS)
    segment, segment_end = begin // SEGMENT, tl.cdiv(end, SEGMENT)
    if SPLIT:
        part = tl.program_id(0) // tiles
        if (part < segment) | (part >= segment_end):
            return
        segment, segment_end = part, part + 1

    d = tl.arange(0, BLOCK)
    inside = exists[:, None] & (d[None, :] < DIM)
    q_tile = tl.load(q + flat[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(DOT)
    keys += tl.program_id(1).to(tl.int64) * k_group
    values += tl.program_id(1).to(tl.int64) * v_group
    if table is not None:
        table += tl.program_id(2).to(tl.int64) * table_width
    all_top = tl.full((ROWS,), float("-inf"), tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    all_acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for s in range(segment, segment_end):
        from_block = tl.maximum(s * SEGMENT, begin)
        to_block = tl.minimum((s + 1) * SEGMENT, end)
        whole_from = tl.minimum(tl.maximum(whole, from_block), to_block)
        whole_to = tl.minimum(tl.maximum(whole_end, whole_from), to_block)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK), tl.float32)
        if WINDOW > 0:
            top, total, acc = _attend(
                top, total, acc, q_tile, keys, values, table, start, length, place, scale,
                from_block, whole_from, k_slot, v_slot, PAGE, WINDOW, KEYS, DIM, BLOCK, DOT,
                PROBABILITY, True)
        top, total, acc = _attend(
            top, total, acc, q_tile, keys, values, table, start, length, place, scale,
            whole_from, whole_to, k_slot, v_slot, PAGE, WINDOW, KEYS, DIM, BLOCK, DOT,
            PROBABILITY, False)
        top, total, acc = _attend(
            top, total, acc, q_tile, keys, values, table, start, length, place, scale,
            whole_to, to_block, k_slot, v_slot, PAGE, WINDOW, KEYS, DIM, BLOCK, DOT,
            PROBABILITY, True)
        all_top, all_total, all_acc = _merge(all_top, all_total, all_acc, top, total, acc)
    if SPLIT:
        at = flat + tokens.to(tl.int64) * HEADS * segment
        tl.store(sums + at[:, None] * DIM + d[None, :], all_acc, mask=inside)
        tl.store(tops + at, all_top, mask=exists)
        tl.store(totals + at, all_total, mask=exists)
    else:
        _write(out, lse, flat, exists, all_top, all_total, all_acc, DIM, BLOCK)


@jit(do_not_specialize=["tokens"])
def _merge_parts(cu_seqlens, context, out, lse, sums, tops, totals, tokens, HEADS: tl.constexpr,
                 GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
                 WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                 SEGMENT: tl.constexpr):
    tile = tl.program_id(0)
    flat, place, exists, _start, _length, rows = _rows_of_tile(
        cu_seqlens, context, tile, HEADS, GROUPS, ROWS)
    if tile * ROWS >= rows:
        return
    begin, _whole, _whole_end, end = _blocks_of_tile(place, WINDOW, KEYS)
    d = tl.arange(0, BLOCK)
    inside = exists[:, None] & (d[None, :] < DIM)
    all_top = tl.full((ROWS,), float("-inf"), tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    all_acc = tl.zeros((ROWS, BLOCK), tl.float32)
    width = tokens.to(tl.int64) * HEADS
    at = flat + width * (begin // SEGMENT)
    for _ in range(begin // SEGMENT, tl.cdiv(end, SEGMENT)):
        acc = tl.load(sums + at[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        top = tl.load(tops + at, mask=exists, other=0.0)
        total = tl.load(totals + at, mask=exists, other=1.0)
        all_top, all_total, all_acc = _merge(all_top, all_total, all_acc, top, total, acc)
        at += width
    _write(out, lse, flat, exists, all_top, all_total, all_acc, DIM, BLOCK)
