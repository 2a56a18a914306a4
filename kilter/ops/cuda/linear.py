"""Linear layers on CUDA: y = x W^T, where a row's bits do not depend on the other rows.

One kernel, several tile shapes. An output element starts at zero and takes K in ascending order
into one fp32 accumulator: no split along K, no choice of algorithm. With 16-bit operands every
step is one matrix instruction over 16 values of K, in fp32 every step is one multiply and one add
(or one fused multiply-add: the same throughout). Tiles differ in how many rows and columns a
block holds and in how much of K it stages at once; none of that enters an element's sum.

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

from kilter.ops.cuda.activation import gated, unknown_activation
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
TILES_FP32 = (Tile(64, 128, 32, 8, 4), Tile(32, 64, 32, 4, 4), Tile(16, 32, 64, 4, 4))


def linear(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None = None,
           residual: Tensor | None = None) -> Tensor:
    """[T, N] in x's dtype: x W^T + bias + residual, summed in fp32 and rounded once.

    Args:
        x_TK: [T, K] float32, bfloat16 or float16.
        weight_NK: [N, K] in x's dtype, or any of the three if x is float32 (it is widened).
        bias: [N].
        residual: [T, N].

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    check("linear", _misfits(x_TK, weight_NK, bias, residual, weight_NK.shape[0]),
          x_TK, weight_NK, bias, residual)
    return launch(x_TK, weight_NK, bias, residual)


def gated_linear(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None = None,
                 activation: str = "silu") -> Tensor:
    """[T, F]: activation(gate) * up, where [gate; up] = x W^T + bias and N = 2F.

    The two products are rounded to x's dtype before the activation, so the bits are those of
    `linear` followed by `gated_activation`.

    Raises:
        ValueError: for shapes that do not fit, another activation, or a dtype or device without
            kernels.
    """
    problems = unknown_activation(activation)
    if weight_NK.shape[0] % 2:
        problems.append(f"weight has {weight_NK.shape[0]} rows, which is odd; it must hold "
                        "[gate; up]")
    problems += _misfits(x_TK, weight_NK, bias, None, weight_NK.shape[0])
    check("gated_linear", problems, x_TK, weight_NK, bias)
    return launch(x_TK, weight_NK, bias, None, activation=activation)


def linear_grad_input(grad_TN: Tensor, weight_NK: Tensor) -> Tensor:
    """[T, K] in grad's dtype: grad W, the gradient of `linear` by its input.

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    check("linear_grad_input", _misfits(grad_TN, weight_NK.T, None, None, weight_NK.shape[1]),
          grad_TN, weight_NK)
    return launch(grad_TN, plain(weight_NK).T, None, None)


def _misfits(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
             columns: int) -> list[str]:
    problems = []
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.shape[1] == 0:
        problems.append(f"x has shape {list(x.shape)} and the weight takes "
                        f"{weight.shape[-1]} features; x must be [T, {weight.shape[-1]}]")
    if weight.dtype != x.dtype and x.dtype != torch.float32:
        problems.append(f"x is {x.dtype} and the weight {weight.dtype}; give both one dtype, or "
                        "float32 x")
    if bias is not None and bias.shape != (columns,):
        problems.append(f"bias has shape {list(bias.shape)}; it must be [{columns}]")
    if residual is not None and residual.shape != (x.shape[0], columns):
        problems.append(f"residual has shape {list(residual.shape)}; it must be "
                        f"[{x.shape[0]}, {columns}]")
    return problems


def launch(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None, residual: Tensor | None, *,
           activation: str | None = None, tile: Tile | None = None) -> Tensor:
    """Starts the kernel on checked arguments. Every tile gives the same bits; the default is the
    fastest guess. ``weight_NK`` is contiguous or the transpose of a contiguous matrix."""
    x_TK = plain(x_TK)
    if weight_NK.stride(0) != 1 or weight_NK.shape[0] == 1:
        weight_NK = plain(weight_NK)
    rows, depth = x_TK.shape
    columns = weight_NK.shape[0] // (1 if activation is None else 2)
    out_TN = torch.empty(rows, columns, dtype=x_TK.dtype, device=x_TK.device)
    if not out_TN.numel():
        return out_TN
    tile = tile or _choose(rows, columns, x_TK)
    operands = 2 if activation else 1
    stage_bytes = x_TK.element_size() * tile.depth * (tile.rows + operands * tile.columns)
    stages = max(2, min(tile.stages, (shared_memory(x_TK.device) - 4096) // stage_bytes))
    with on_device(x_TK):
        _linear[(-(-rows // tile.rows) * -(-columns // tile.columns),)](
            x_TK, weight_NK, None if bias is None else plain(bias),
            None if residual is None else plain(residual), out_TN, rows, columns, depth,
            weight_NK.stride(0), weight_NK.stride(1), ACTIVATION=activation,
            DOT=dot_dtype(x_TK.dtype), ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            WHOLE=depth % tile.depth == 0, num_warps=tile.warps, num_stages=stages, **EXACT)
    return out_TN


def _choose(rows: int, columns: int, x_TK: Tensor) -> Tile:
    """The largest tile, not taller than the rows ask for, of which there are enough to give every
    multiprocessor one; else the smallest."""
    tiles = TILES_FP32 if x_TK.dtype == torch.float32 else TILES_16_BIT
    for tile in tiles:
        blocks = -(-rows // tile.rows) * -(-columns // tile.columns)
        if blocks >= multiprocessors(x_TK.device) and (rows > tile.rows // 2
                                                       or tile.rows == tiles[-1].rows):
            return tile
    return tiles[-1]


@jit(do_not_specialize=["rows"])
def _linear(x, weight, bias, residual, out, rows, columns, depth, stride_n, stride_k,
            ACTIVATION: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr,
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
    x_at = x + t[:, None].to(tl.int64) * depth + k[None, :]
    w_at = weight + n[None, :].to(tl.int64) * stride_n + k[:, None].to(tl.int64) * stride_k
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
    out_at = t[:, None].to(tl.int64) * columns + n[None, :]
    inside = t_inside & n_inside
    if ACTIVATION is not None:
        acc = gated(acc.to(out_type).to(tl.float32), up.to(out_type).to(tl.float32), ACTIVATION)
    if residual is not None:
        acc += tl.load(residual + out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + out_at, acc, mask=inside)
