"""A sum over the bits of parameters that does not depend on how they are spread over ranks.

    sum over elements of  bits · a(row) · b(column)   modulo 2^64

with row and column in the whole parameter and a, b odd numbers that look random. Parts of a tensor
add up to the whole, on any ranks and in any order, and an element that is lost, changed or in
another one's place shows. It guards against mistakes, not against intent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from kilter.comm.collectives import all_reduce_sum
from kilter.parallel.apply import Spread
from kilter.parallel.shards import Box

_BLOCK = 1 << 16  # elements that are widened at a time
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(parts: Iterable[tuple[Box, Tensor]], dtype: torch.dtype, device: torch.device
             ) -> Tensor:
    """int64 []: of the parts of one parameter with one or two dims, each with its place in the
    whole, as they are when rounded to ``dtype``."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for box, part in parts:
        columns = part.shape[1] if part.ndim > 1 else 1
        first = box.start[1] if part.ndim > 1 else 0
        b_C = _odd(first, columns, 0x5851F42D4C957F2D, device)
        rows = max(_BLOCK // columns, 1)
        for row in range(0, part.shape[0], rows):
            block = part[row:row + rows].detach().to(dtype)
            bits_RC = block.view(_BITS[block.element_size()]).view(len(block), columns)
            a_R = _odd(box.start[0] + row, len(block), 0x14057B7EF767814F, device)
            total += ((bits_RC * b_C).sum(1) * a_R).sum()
    return total


def combined(names: Iterable[str], sums: Iterable[int]) -> int:
    """The checksum of a model, from 0 to 2^64 - 1, of those of its parameters."""
    total = 0
    for name, value in zip(names, sums, strict=True):
        total += value * (zlib.crc32(name.encode()) << 1 | 1)
    return total % (1 << 64)


def weights_checksum(spread: Spread, names: Iterable[str] | None = None) -> str:
    """Of a spread model's parameters, the same in every layout; collective.

    Args:
        names: of `Spread.shards`, the same on all ranks; default: all.
    """
    names = list(spread.shards if names is None else names)
    device = torch.device(spread.mesh.device_type)

    def mine(name: str) -> Tensor:
        tensor, shard = spread.local.get(name, (None, None))
        parts = [(box, part) for box, own, part in shard.parts(tensor) if own and part.numel()
                 ] if shard is not None and tensor is not None else []
        return checksum(parts, torch.float32, device)

    sums = all_reduce_sum(torch.stack([mine(name) for name in names]), spread.mesh.axis("world"))
    return f"{combined(names, sums.tolist()):016x}"


def _odd(first: int, count: int, salt: int, device: torch.device) -> Tensor:
    """Odd numbers for the indices from ``first`` on: the finaliser of SplitMix64, for what its
    mixing is worth."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device) + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * (factor - (1 << 64))
    return (x ^ (x >> 31)) | 1
