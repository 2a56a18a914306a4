"""Unpacks the block formats of GGUF into `QuantTensor`s whose values are the reference's.

Every format is ``value = scale * q + min`` per group of 16 or 32 weights, with scale and min
built from fp16 numbers exactly as ggml's `dequantize_row_*` builds them; so holding (q, scale,
min) loses nothing. Bytes are taken apart with numpy over whole tensors.

    type   block  bytes  fields                                    QuantTensor
    Q4_0    32     18    d, 16 × nibbles                           4-bit, min = -8 d
    Q4_1    32     20    d, m, nibbles                             4-bit, min
    Q5_0    32     22    d, high bits (u32), nibbles               8-bit, q - 16
    Q5_1    32     24    d, m, high bits, nibbles                  8-bit, min
    Q8_0    32     34    d, 32 × int8                              8-bit
    Q4_K   256    144    d, dmin, 8 × (6-bit sc, 6-bit m), nibbles 4-bit, scale d·sc, min -dmin·m
    Q5_K   256    176    as Q4_K with 32 bytes of high bits        8-bit, the same
    Q6_K   256    210    128 low nibbles, 64 high, 16 × int8 sc, d 8-bit, q - 32, scale d·sc,
                                                                   group 16

A nibble byte j of a 32-block holds element j in its low half and element j + 16 in its high
half; the K formats pair element j of one 32-group with element j of the next.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.ops.packed import QuantTensor
from kilter.weights.safetensors import as_tensor

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q4_K, Q5_K, Q6_K, BF16 = 12, 13, 14, 30

# The readable types, and the names of the others for error messages.
SUPPORTED = {F32: "F32", F16: "F16", BF16: "BF16", Q8_0: "Q8_0", Q4_0: "Q4_0", Q4_1: "Q4_1",
             Q5_0: "Q5_0", Q5_1: "Q5_1", Q4_K: "Q4_K", Q5_K: "Q5_K", Q6_K: "Q6_K"}
_OTHERS = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
           18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
           24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
           35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}

# type -> (elements per block, bytes per block)
BLOCKS = {F32: (1, 4), F16: (1, 2), BF16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22),
          Q5_1: (32, 24), Q8_0: (32, 34), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210)}

_U8 = NDArray[np.uint8]
_F32 = NDArray[np.float32]
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)


def type_name(kind: int) -> str:
    return SUPPORTED.get(kind) or _OTHERS.get(kind) or f"number {kind}"


def unpack(kind: int, raw: _U8, shape: tuple[int, ...]) -> Tensor | QuantTensor:
    """Tensor data `raw` (uint8, flat) of type `kind` as torch sees it.

    F32, F16 and BF16 give a Tensor of `shape` (a copy). Block formats give a `QuantTensor`
    [N, K], or for shapes of another rank the dequantised float32 Tensor.
    """
    if kind in (F32, F16, BF16):
        dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[kind]
        return as_tensor(raw, dtype, shape)
    blocks = raw.reshape(-1, BLOCKS[kind][1])
    q, scale, low, bits, group = _FORMATS[kind](blocks)
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    if not q.flags.writeable:  # still the file's own memory
        q = q.copy()
    quantised = QuantTensor(
        torch.from_numpy(q.view(np.int8).reshape(rows, columns)),
        torch.from_numpy(scale.reshape(rows, columns // group)),
        None if low is None else torch.from_numpy(low.reshape(rows, columns // group)),
        bits, group)
    return quantised if len(shape) == 2 else quantised.dequantize().view(shape)


_Parts = tuple[NDArray[np.uint8] | NDArray[np.int8], _F32, _F32 | None, int, int]


def _half(field: _U8) -> _F32:
    """fp16 bytes [B, 2n] as fp32 [B, n]."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def _nibbles(field: _U8) -> _U8:
    """[B, n] bytes as [B, 2n]: all low halves, then all high halves; n a multiple of 8."""
    words = np.ascontiguousarray(field).view(np.uint64)
    n = words.shape[1]
    out = np.empty((words.shape[0], 2 * n), np.uint64)
    np.bitwise_and(words, _LOW, out=out[:, :n])
    np.bitwise_and(words >> np.uint64(4), _LOW, out=out[:, n:])
    return out.view(np.uint8)


def _high_bits(field: _U8) -> _U8:
    """32 bits [B, 4] as bytes 0 or 16 [B, 32]: the fifth bit of each element, in place."""
    return np.unpackbits(np.ascontiguousarray(field), axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: _U8) -> _Parts:
    d = _half(b[:, :2])
    return _nibbles(b[:, 2:]), d, np.float32(-8) * d, 4, 32


def _q4_1(b: _U8) -> _Parts:
    return _nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4]), 4, 32


def _q5_0(b: _U8) -> _Parts:
    q = (_nibbles(b[:, 6:]) | _high_bits(b[:, 2:6])).view(np.int8) - np.int8(16)
    return q, _half(b[:, :2]), None, 8, 32


def _q5_1(b: _U8) -> _Parts:
    q = _nibbles(b[:, 8:]) | _high_bits(b[:, 4:8])
    return q, _half(b[:, :2]), _half(b[:, 2:4]), 8, 32


def _q8_0(b: _U8) -> _Parts:
    return np.ascontiguousarray(b[:, 2:]), _half(b[:, :2]), None, 8, 32


def _k_scales(b: _U8) -> tuple[_F32, _F32]:
    """Scale d·sc and min -dmin·m [B, 8] of a Q4_K or Q5_K block from its first 16 bytes.

    The 12 bytes after d and dmin hold eight 6-bit scales and eight 6-bit mins: bytes 0–3 and
    4–7 hold the first four of each (low 6 bits) and, in their top 2 bits, the top bits of the
    last four, whose low 4 bits are the nibbles of bytes 8–11.
    """
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    sc = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    m = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return (_half(b[:, :2]) * sc.astype(np.float32),
            -(_half(b[:, 2:4]) * m.astype(np.float32)))


def _q4_k(b: _U8) -> _Parts:
    scale, low = _k_scales(b)
    return _nibbles(b[:, 16:].reshape(-1, 32)), scale, low, 4, 32


def _q5_k(b: _U8) -> _Parts:
    scale, low = _k_scales(b)
    q = _nibbles(b[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    # bit g of high byte j is the fifth bit of element j of group g
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    q |= (b[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    return q, scale, low, 8, 32


def _q6_k(b: _U8) -> _Parts:
    # Two halves of 128 elements: 64 bytes of low nibbles (32 elements each quarter: low halves
    # of bytes 0–31, of 32–63, then the high halves), 32 bytes with 2 top bits per quarter.
    low = _nibbles(b[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    q = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    scale = _half(b[:, 208:]) * np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return q, scale, None, 8, 16


_FORMATS = {Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, Q8_0: _q8_0, Q4_K: _q4_k,
            Q5_K: _q5_k, Q6_K: _q6_k}
