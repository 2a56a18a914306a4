"""Weights as inference holds them: row-major quantised tensors and the packed panels.

`QuantTensor` is the interchange form between a file reader and the packer; `pack` turns it, or a
plain matrix, into a `PackedWeight`, which the linear and embedding kernels read. The layout of
the panels is described in ``cpu/csrc/formats.h``.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.ops.cpu.library import Kernel
from kilter.ops.dispatch import watched

STORAGES = ("fp32", "bf16", "fp16", "int8", "int4")  # what `pack` can be asked for
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
QUANT_GROUP = 32  # columns that `pack` quantises together


@dataclass(frozen=True)
class QuantTensor:
    """A row-major block-quantised matrix: ``value = q * scale + min`` per group of ``group``
    consecutive input features.

    ``q * scale`` must be exact in fp32 or rounded once (it is one fp32 multiply), then ``+ min``
    is one fp32 add; this is the reference dequantisation of every GGUF format we read.
    """

    q: Tensor  # int8 [N, K]; 4-bit: 0..15, 8-bit: -128..127
    scale: Tensor  # float32 [N, K / group]
    min: Tensor | None  # float32 [N, K / group]
    bits: int  # 4 or 8
    group: int  # 16 or 32

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q.shape[0], self.q.shape[1])

    def rows(self, index: Tensor | slice) -> QuantTensor:
        """Selected (or permuted) rows; exact."""
        return QuantTensor(self.q[index], self.scale[index],
                           None if self.min is None else self.min[index], self.bits, self.group)

    def columns(self, start: int, stop: int) -> QuantTensor | Tensor:
        """Columns [start, stop); exact; float32 where they do not fall on whole groups."""
        if start % self.group or stop % self.group:
            return self.dequantize()[:, start:stop].contiguous()
        a, b = start // self.group, stop // self.group
        return QuantTensor(self.q[:, start:stop].contiguous(), self.scale[:, a:b].contiguous(),
                           None if self.min is None else self.min[:, a:b].contiguous(), self.bits,
                           self.group)

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        n, k = self.q.shape
        w = self.q.view(n, k // self.group, self.group).to(torch.float32) * self.scale[:, :, None]
        if self.min is not None:
            w = w + self.min[:, :, None]
        return w.view(n, k)


class Matrix(ctypes.Structure):
    """``KtMatrix``: a weight matrix as the kernels are told of it, packed or plain."""

    _fields_ = [("data", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
                ("stride_n", ctypes.c_int64), ("stride_k", ctypes.c_int64),
                ("storage", ctypes.c_int32), ("group", ctypes.c_int32),
                ("scale_bytes", ctypes.c_int32), ("halves", ctypes.c_int32)]


_PACKED = {("fp32", False): 0, ("bf16", False): 1, ("fp16", False): 2, ("int8", False): 3,
           ("int8", True): 4, ("int4", True): 5}  # Storage in formats.h, by (storage, has_min)
_PLAIN = {torch.float32: 6, torch.bfloat16: 7, torch.float16: 8}


def plain_matrix(weight: Tensor, halves: int = 1) -> Matrix:
    """The kernels' view of a tensor [N, K], float32, bfloat16 or float16, any strides."""
    return Matrix(weight.data_ptr(), *weight.shape, *weight.stride(), _PLAIN[weight.dtype], 0, 0,
                  halves)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight matrix [N, K] in panels of 16 rows, on the CPU, read-only.

    ``halves`` is 2 for a [gate; up] matrix whose halves were padded to whole panels each.
    """

    shape: tuple[int, int]
    storage: str  # "fp32", "bf16", "fp16", "int8" or "int4"
    data: Tensor  # uint8
    group: int = 0  # weights per scale; 0 for the float storages
    scale_bytes: int = 0  # 2 or 4: scales and mins in fp16 or fp32
    has_min: bool = False
    halves: int = 1

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @functools.cached_property
    def matrix(self) -> Matrix:
        """The kernels' view of this weight."""
        return Matrix(self.data.data_ptr(), *self.shape, 0, 0,
                      _PACKED[self.storage, self.has_min], self.group, self.scale_bytes,
                      self.halves)

    def facts(self) -> list[int]:
        """What `data` is, as numbers: the form torch's dispatcher can carry beside it."""
        return [*self.shape, STORAGES.index(self.storage), self.group, self.scale_bytes,
                self.has_min, self.halves]

    @staticmethod
    def of(data: Tensor, facts: list[int]) -> PackedWeight:
        n, k, storage, group, scale_bytes, has_min, halves = facts
        return PackedWeight((n, k), STORAGES[storage], data, group, scale_bytes, bool(has_min),
                            halves)

    def dequantize(self) -> Tensor:
        """float32 [N, K]: exactly the numbers a linear layer multiplies by."""
        if watched(self.data):
            return _unpack_op(self.data, self.facts())
        return self._dequantize()

    def _dequantize(self) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32)
        _unpack.call(self.matrix, out.data_ptr(), keep=(self, out))
        return out


class _PackArgs(ctypes.Structure):
    _fields_ = [("source", Matrix), ("q", ctypes.c_void_p), ("scale", ctypes.c_void_p),
                ("min", ctypes.c_void_p), ("target", Matrix), ("bad", ctypes.c_void_p)]


class _UnpackArgs(ctypes.Structure):
    _fields_ = [("source", Matrix), ("out", ctypes.c_void_p)]


_pack = Kernel("kt_pack", _PackArgs)
_unpack = Kernel("kt_unpack", _UnpackArgs)


@torch.library.custom_op("kilter::unpack", mutates_args=())
def _unpack_op(data: Tensor, facts: list[int]) -> Tensor:
    return PackedWeight.of(data, facts)._dequantize()


@_unpack_op.register_fake
def _(data: Tensor, facts: list[int]) -> Tensor:
    return data.new_empty(PackedWeight.of(data, facts).shape, dtype=torch.float32)


def pack(weight: Tensor | QuantTensor, storage: str = "auto", *,
         gated: bool = False) -> PackedWeight:
    """Packs a matrix [N, K] for the CPU kernels.

    Args:
        weight: float32, bfloat16 or float16 with any strides (a memory-mapped file is fine), or
            a `QuantTensor`.
        storage: ``"auto"`` keeps every value: a float type stays what it is, a `QuantTensor`
            keeps its numbers (scales and mins as fp16 where all of them are fp16 numbers).
            Floats may be rounded to ``"fp32"``, ``"bf16"`` or ``"fp16"``, or quantised in groups
            of 32 along K with fp16 scales: ``"int8"`` by scale = max |w| / 127, q = w / scale;
            ``"int4"`` by scale = (max - min) / 15, q = (w - min) / scale.
        gated: the rows are [gate; up]; each half is padded to whole panels (needed for
            `gated_linear` where N / 2 is not a multiple of 16).

    Raises:
        ValueError: for other shapes, types or storages, for values that a quantised storage
            cannot hold, and for a `QuantTensor` whose values are not exact (see there).
        KernelBuildError: where the CPU kernels cannot be built.
    """
    n, k = _check(weight, storage, gated)
    halves = 2 if gated else 1
    if isinstance(weight, QuantTensor):
        has_min = weight.bits == 4 or weight.min is not None
        half_scales = _fits_fp16(weight.scale) and (weight.min is None or _fits_fp16(weight.min))
        target = _allocate((n, k), f"int{weight.bits}", weight.group, 2 if half_scales else 4,
                           has_min, halves)
        q, scale = weight.q.contiguous(), weight.scale.contiguous()
        low = None if weight.min is None else weight.min.contiguous()
        bad = torch.zeros(1, dtype=torch.int64)
        _pack.call(Matrix(None, n, k, 0, 0, 0, 0, 0, halves), q.data_ptr(), scale.data_ptr(),
                   None if low is None else low.data_ptr(), target.matrix, bad.data_ptr())
        return target
    storage = _NAMES[weight.dtype] if storage == "auto" else storage
    quantised = storage in ("int8", "int4")
    target = _allocate((n, k), storage, QUANT_GROUP if quantised else 0, 2 if quantised else 0,
                       storage == "int4", halves)
    bad = torch.zeros(1, dtype=torch.int64)
    _pack.call(plain_matrix(weight.detach(), halves), None, None, None, target.matrix,
               bad.data_ptr())
    if bad.item():
        raise ValueError(f"The weight [{n}, {k}] cannot be stored as {storage}: {bad.item()} "
                         f"group(s) of {QUANT_GROUP} hold an infinity, a NaN or values too large "
                         "for an fp16 scale. Store it as fp32 or bf16.")
    return target


def _check(weight: Tensor | QuantTensor, storage: str, gated: bool) -> tuple[int, int]:
    problems = []
    if storage not in ("auto", *STORAGES):
        problems.append(f"the storage is {storage!r}; it must be auto or one of "
                        f"{', '.join(STORAGES)}")
    if isinstance(weight, QuantTensor):
        problems += _quant_problems(weight, storage)
    else:
        if weight.dtype not in _NAMES:
            problems.append(f"the weight is {weight.dtype}; it must be float32, bfloat16 or "
                            "float16")
        if weight.dim() != 2:
            problems.append(f"the weight has shape {tuple(weight.shape)}; it must be [N, K]")
        if weight.device.type != "cpu":
            problems.append(f"the weight is on {weight.device}; move it to the CPU first")
    if gated and weight.shape[0] % 2:
        problems.append(f"a gated weight has rows [gate; up], but {weight.shape[0]} is odd")
    if problems:
        raise ValueError(f"This weight cannot be packed: {'; '.join(problems)}.")
    return weight.shape[0], weight.shape[1]


def _quant_problems(weight: QuantTensor, storage: str) -> list[str]:
    """What keeps a QuantTensor from being packed without changing a value."""
    if weight.bits not in (4, 8) or weight.group not in (16, 32):
        return [f"its {weight.bits} bits and groups of {weight.group} are not supported; bits "
                "must be 4 or 8 and groups 16 or 32"]
    n, k = weight.shape
    parts = {"scale": weight.scale} | ({} if weight.min is None else {"min": weight.min})
    problems = [f"its {name} has shape {tuple(part.shape)}, but q [{n}, {k}] in groups of "
                f"{weight.group} needs [{n}, {k // weight.group}]"
                for name, part in parts.items()
                if k % weight.group or part.shape != (n, k // weight.group)]
    problems += [f"its {name} is {part.dtype} instead of {wanted}"
                 for name, part, wanted in (("q", weight.q, torch.int8),
                                            *((n, p, torch.float32) for n, p in parts.items()))
                 if part.dtype != wanted]
    if storage not in ("auto", f"int{weight.bits}"):
        problems.append(f"a {weight.bits}-bit tensor is stored as int{weight.bits}, not {storage}; "
                        "dequantize() it first")
    # With a min the kernels use one fma: the same number as multiply, round, add only where the
    # product needs no rounding: 24 bits less those of q.
    if not problems and weight.min is not None:
        spare = (1 << (7 if weight.bits == 8 else 4)) - 1
        inexact = int((weight.scale.contiguous().view(torch.int32) & spare).count_nonzero())
        if inexact:
            problems.append(f"{inexact} of its scales have so many digits that q * scale would be "
                            "rounded before adding the min; pack its dequantize() instead")
    return problems


def _fits_fp16(values: Tensor) -> bool:
    return bool((values.half().float() == values).all())


def _allocate(shape: tuple[int, int], storage: str, group: int, scale_bytes: int, has_min: bool,
              halves: int) -> PackedWeight:
    n, k = shape
    panels = halves * -(-(n // halves) // 16)
    if storage in FLOATS:
        panel_bytes = 16 * k * FLOATS[storage].itemsize
    else:
        weights = group if storage == "int8" else group // 2
        panel_bytes = -(-k // group) * 16 * (weights + scale_bytes * (2 if has_min else 1))
    return PackedWeight(shape, storage, torch.empty(panels * panel_bytes, dtype=torch.uint8), group,
                        scale_bytes, has_min, halves)
