"""Linear layers on CUDA: y = x W^T, where a row's bits do not depend on the other rows.

One kernel, several tile shapes. An output element starts at zero and takes K in ascending order
into one fp32 accumulator: no split along K but the one asked for, no choice of algorithm. With
16-bit operands a step is one matrix instruction over 16 values of K, in fp32 it is one fused
multiply-add. Tiles differ in how many rows and columns a block holds and in how much of K it
stages at once; none of that enters an element's sum.

What this leans on: a matrix instruction computes an element from its own row, column and
accumulator alone. On compute capability 9 the tiles use one instruction, `wgmma` m64nNk16, with
different N (so all have at least 64 rows, padded at decode: reading W still takes longer than the
padded arithmetic); on 8 and 12 it is `mma` m16n8k16 throughout. `bench/gpu_check.sh` compares the
bits of all tiles on the GPU at hand.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.ops.cuda.activation import gated, gated_activation, unknown_activation
from kilter.ops.cuda.launch import (
    EXACT,
    check,
    dot_dtype,
    jit,
    multiprocessors,
    on_device,
    plain,
    shared_memory,
    tl,
)


@dataclass(frozen=True)
class Tile:
    """What one block computes: rows x columns of the output, ``depth`` of K at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int  # most loads in flight; fewer where shared memory is short


TILES_16_BIT = (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 6),
                Tile(64, 16, 128, 4, 6))
TILES_FP32 = (Tile(64, 128, 32, 8, 4), Tile(32, 64, 32, 4, 4), Tile(16, 32, 32, 4, 6))


def linear(x_TK: Tensor, weight: Tensor, bias: Tensor | None = None,
           residual: Tensor | None = None, *, splits: int = 1) -> Tensor:
    """[T, N] in x's dtype: x W^T + bias + residual, summed in fp32 and rounded once.

    Args:
        x_TK: [T, K] float32, bfloat16 or float16.
        weight: [N, K] in x's dtype, or any of the three if x is float32 (it is widened).
        bias: [N].
        residual: [T, N].
        splits: parts of K that are summed apart and then added in a balanced binary tree (of an
            odd number of parts the left half takes one more).

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    _check("linear", [], x_TK, weight, bias, residual, splits)
    if splits == 1:
        return launch(x_TK, weight, bias, residual)
    y_TN = _tree(launch(x_TK, weight, None, None, splits=splits))
    for term in (bias, residual):
        y_TN = y_TN if term is None else y_TN + term.float()
    return y_TN.to(x_TK.dtype)


def gated_linear(x_TK: Tensor, weight: Tensor, bias: Tensor | None = None,
                 activation: str = "silu", *, splits: int = 1) -> Tensor:
    """[T, F]: activation(gate) * up, where [gate; up] = x W^T + bias and N = 2F.

    The two products are rounded to x's dtype before the activation, so the bits are those of
    `linear` followed by `gated_activation`.

    Raises:
        ValueError: for shapes that do not fit, another activation, or a dtype or device without
            kernels.
    """
    problems = unknown_activation(activation)
    if weight.shape[0] % 2:
        problems.append(f"weight has {weight.shape[0]} rows, which is odd; it must hold "
                        "[gate; up]")
    _check("gated_linear", problems, x_TK, weight, bias, None, splits)
    if splits == 1:
        return launch(x_TK, weight, bias, None, activation=activation)
    return gated_activation(linear(x_TK, weight, bias, splits=splits), activation)


def linear_grad_input(dy_TN: Tensor, weight: Tensor) -> Tensor:
    """[T, K] in dy's dtype: dy W, the gradient of `linear` by its input.

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    return linear(dy_TN, weight.t())


def _check(op: str, problems: list[str], x: Tensor, weight: Tensor, bias: Tensor | None,
           residual: Tensor | None, splits: int) -> None:
    rows, depth = weight.shape
    if x.ndim != 2 or x.shape[1] != depth or depth == 0:
        problems.append(f"x has shape {list(x.shape)} and the weight [{rows}, {depth}]; x must be "
                        f"[T, {depth}], and not empty along K")
    if weight.dtype != x.dtype and x.dtype != torch.float32:
        problems.append(f"x is {x.dtype} and the weight {weight.dtype}; give both one dtype, or "
                        "float32 x")
    if bias is not None and bias.shape != (rows,):
        problems.append(f"bias has shape {list(bias.shape)}; it must be [{rows}]")
    if residual is not None and residual.shape != (x.shape[0], rows):
        problems.append(f"residual has shape {list(residual.shape)}; it must be "
                        f"[{x.shape[0]}, {rows}]")
    if splits < 1 or depth % splits:
        problems.append(f"K = {depth} cannot be cut in {splits} equal parts")
    check(op, problems, x, weight, bias, residual)


def _tree(parts: Tensor) -> Tensor:
    """The sum over the first axis, as a balanced binary tree."""
    if parts.shape[0] == 1:
        return parts[0]
    left = (parts.shape[0] + 1) // 2
    return _tree(parts[:left]) + _tree(parts[left:])


def launch(x_TK: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *,
           splits: int = 1, activation: str | None = None, tile: Tile | None = None) -> Tensor:
    """Starts the kernel on checked arguments. Every tile gives the same bits; the default is the
    best guess for speed. With ``splits`` > 1 the parts' sums, float32 [splits, T, N]."""
    x_TK = plain(x_TK)
    if 1 not in weight.stride():
        weight = weight.contiguous()
    rows, depth = x_TK.shape
    columns = weight.shape[0] // (1 if activation is None else 2)
    if splits == 1:
        out = x_TK.new_empty(rows, columns)
    else:
        out = x_TK.new_empty(splits, rows, columns, dtype=torch.float32)
    if not out.numel():
        return out
    operands = 1 if activation is None else 2
    tile = tile or _choose(x_TK, columns, splits, operands)
    stage_bytes = x_TK.element_size() * tile.depth * (tile.rows + operands * tile.columns)
    stages = max(2, min(tile.stages, (shared_memory(x_TK.device) - 4096) // stage_bytes))
    with on_device(x_TK):
        _linear[(-(-rows // tile.rows) * -(-columns // tile.columns), splits)](
            x_TK, weight, None if bias is None else plain(bias),
            None if residual is None else plain(residual), out, rows, columns, depth // splits,
            depth, weight.stride(0), weight.stride(1), ACTIVATION=activation,
            DOT=dot_dtype(x_TK.dtype), ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            WHOLE=depth // splits % tile.depth == 0, num_warps=tile.warps, num_stages=stages,
            **EXACT)
    return out


def _choose(x_TK: Tensor, columns: int, splits: int, operands: int) -> Tile:
    """The largest tile that fits the registers, is at most twice as tall as there are rows, and
    gives every multiprocessor a block; else the smallest."""
    tiles = TILES_FP32 if x_TK.dtype == torch.float32 else TILES_16_BIT
    rows = x_TK.shape[0]
    for tile in tiles:
        blocks = splits * -(-rows // tile.rows) * -(-columns // tile.columns)
        if (blocks >= multiprocessors(x_TK.device) and operands * tile.columns <= 256
                and (2 * rows > tile.rows or tile.rows == tiles[-1].rows)):
            return tile
    return tiles[-1]


@jit(do_not_specialize=["rows"])
def _linear(x, weight, bias, residual, out, rows, columns, depth, stride_t,
            stride_n, stride_k, ACTIVATION: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    # Blocks go down 8 tiles of rows before the next tile of columns: what runs at one time shares
    # operands in the L2 cache.
    tiles_n = tl.cdiv(columns, COLUMNS)
    strip = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tl.cdiv(rows, ROWS) - strip * 8, 8)
    within = tl.program_id(0) % (8 * tiles_n)
    t = (strip * 8 + within % height) * ROWS + tl.arange(0, ROWS)
    n = (within // height) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    t_inside = t[:, None] < rows
    n_inside = n[None, :] < columns
    part = tl.program_id(1).to(tl.int64)
    x_at = x + t[:, None].to(tl.int64) * stride_t + part * depth + k[None, :]
    w_at = (weight + n[None, :].to(tl.int64) * stride_n
            + (part * depth + k[:, None].to(tl.int64)) * stride_k)
    up_at = w_at + columns.to(tl.int64) * stride_n
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        x_mask = t_inside if WHOLE else t_inside & (start + k[None, :] < depth)
        w_mask = n_inside if WHOLE else n_inside & (start + k[:, None] < depth)
        a = tl.load(x_at, mask=x_mask, other=0.0).to(DOT)
        b = tl.load(w_at, mask=w_mask, other=0.0).to(DOT)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if ACTIVATION is not None:
            c = tl.load(up_at, mask=w_mask, other=0.0).to(DOT)
            up = tl.dot(a, c, up, input_precision="ieee")
            up_at += DEPTH * stride_k
        x_at += DEPTH
        w_at += DEPTH * stride_k
    if bias is not None:
        acc += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION is not None:
            up += tl.load(bias + columns + n, mask=n < columns,
                          other=0.0).to(tl.float32)[None, :]
    out_type = out.dtype.element_ty
    out_at = (part * rows + t[:, None].to(tl.int64)) * columns + n[None, :]
    inside = t_inside & n_inside
    if ACTIVATION is not None:
        acc = gated(acc.to(out_type).to(tl.float32), up.to(out_type).to(tl.float32), ACTIVATION)
    if residual is not None:
        acc += tl.load(residual + out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + out_at, acc, mask=inside)
