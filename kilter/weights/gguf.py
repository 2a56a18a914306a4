"""A GGUF file, memory-mapped: metadata, tensor table, and tensors by name and row range.

The header is walked once without decoding (a 260k-token vocabulary costs about 0.1 s); metadata
arrays are decoded when they are first asked for, tensors when they are read. Layout after
the GGUF specification, versions 2 and 3, little-endian:

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key, type u32, value …     strings are length u64 + UTF-8
    tensors:  name, rank u32, dims u64 (fastest first), type u32, offset u64
    padding to `general.alignment`, then the tensor data
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kilter.ops.packed import QuantTensor
from kilter.weights.errors import WeightsError, raise_all
from kilter.weights.gguf_quants import BLOCKS, SUPPORTED, type_name, unpack

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
# metadata value type -> little-endian numpy dtype; 8 is a string, 9 an array, 7 a bool
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
            10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One line of the tensor table."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch: [rows, columns]
    type: int  # ggml type number
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def type_name(self) -> str:
        return type_name(self.type)


class GGUFFile:
    """A parsed and validated GGUF file. Cheap to open; holds a read-only memory map.

    Raises:
        WeightsError: not a GGUF file, an unsupported version, a cut file, or a tensor table
            that points outside the file; a tensor of a type that Kilter cannot read is an
            error only when it is read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as f:
            self.size = f.seek(0, 2)
            if self.size < 24:
                raise WeightsError(f"{self.path} has {self.size} bytes, which is too short for a "
                                   "GGUF header (24 bytes); the file is cut or empty. "
                                   "Fetch it again.")
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self._check_magic()
        try:
            metadata, end = self._walk_metadata()
            self.metadata: Mapping[str, Any] = GGUFMetadata(self._map, metadata)
            self.tensors: dict[str, GGUFTensor] = self._walk_tensors(end)
        except (struct.error, IndexError):
            raise WeightsError(f"{self.path} ends inside its header at byte {self.size}; the file "
                               "is cut. Fetch it again.") from None
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path} has a header name that is not UTF-8 ({error}); the "
                               "file is damaged. Fetch it again.") from None

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None
             ) -> Tensor | QuantTensor:
        """The tensor `name`, or those of its rows and columns; only the blocks that hold them are
        read.

        Returns:
            Tensor of the file's own dtype (F32, F16, BF16; any rank), or for quantised 2-D
            tensors a `QuantTensor` whose values are the reference dequantisation's.
        """
        t = self.tensors[name]
        if t.type not in SUPPORTED:
            raise WeightsError(f"Tensor {name} of {self.path} has type {t.type_name}, which Kilter "
                               "cannot read; readable types are "
                               f"{', '.join(sorted(SUPPORTED.values()))}. Convert the model "
                               "to one of them, for instance Q8_0.")
        raw = np.frombuffer(self._map, dtype=np.uint8, count=t.nbytes, offset=t.offset)
        shape = t.shape
        if rows is not None:
            raw = raw.reshape(shape[0], -1)[rows]
            shape = (raw.shape[0], *shape[1:])
        if columns is None:
            return unpack(t.type, raw.reshape(-1), shape)
        start, stop, _ = columns.indices(shape[1])
        per_block, block_bytes = BLOCKS[t.type]
        first, last = start // per_block, -(-stop // per_block)
        raw = raw.reshape(shape[0], shape[1] // per_block, block_bytes)[:, first:last]
        value = unpack(t.type, raw.reshape(-1), (shape[0], (last - first) * per_block))
        start, stop = start - first * per_block, stop - first * per_block
        if isinstance(value, QuantTensor):
            return value.columns(start, stop)
        return value[:, start:stop].contiguous()

    def _check_magic(self) -> None:
        if self._map[:4] != b"GGUF":
            raise WeightsError(f"{self.path} starts with {self._map[:4]!r} instead of b'GGUF', so "
                               "it is not a GGUF file.")
        (version,) = _U32(self._map, 4)
        if version & 0xFFFF == 0:
            raise WeightsError(f"{self.path} is a big-endian GGUF file; Kilter reads little-endian "
                               "files only. Convert it with gguf's own converter.")
        if version not in (2, 3):
            raise WeightsError(f"{self.path} has GGUF version {version}; Kilter reads versions 2 "
                               "and 3. Convert the model again with a current converter.")

    def _walk_metadata(self) -> tuple[dict[str, tuple[int, int]], int]:
        """Each key's (type, position of its value), and where the metadata ends."""
        buf, entries, pos = self._map, {}, 24
        (count,) = _U64(buf, 16)
        for _ in range(count):
            key, pos = _string(buf, pos)
            (kind,) = _U32(buf, pos)
            if key in entries:
                raise WeightsError(f"{self.path} holds the metadata key {key} twice; the file is "
                                   "damaged. Fetch it again.")
            entries[key] = (kind, pos + 4)
            pos = self._skip(kind, pos + 4, key, 0)
        return entries, pos

    def _skip(self, kind: int, pos: int, key: str, depth: int) -> int:
        """The position after a value of type `kind` at `pos`."""
        buf = self._map
        if kind == _STRING:
            (n,) = _U64(buf, pos)
            return self._inside(pos + 8 + n)
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            (item,), (count,) = _U32(buf, pos), _U64(buf, pos + 4)
            pos += 12
            if item in _SCALARS:
                return self._inside(pos + count * np.dtype(_SCALARS[item]).itemsize)
            if item == _STRING:
                for _ in range(count):
                    pos = self._inside(pos + 8 + _U64(buf, pos)[0])
                return pos
            for _ in range(count):
                pos = self._skip(item, pos, key, depth + 1)
            return pos
        if kind in _SCALARS:
            return self._inside(pos + np.dtype(_SCALARS[kind]).itemsize)
        raise WeightsError(f"Metadata key {key} of {self.path} has the unknown value type {kind}; "
                           "the file is damaged or newer than GGUF version 3.")

    def _inside(self, pos: int) -> int:
        if pos > self.size:
            raise IndexError
        return pos

    def _walk_tensors(self, pos: int) -> dict[str, GGUFTensor]:
        buf, table, problems = self._map, [], []
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise WeightsError(f"{self.path} has general.alignment {alignment!r}; it must be a "
                               "positive number. The file is damaged.")
        for _ in range(_U64(buf, 8)[0]):
            name, pos = _string(buf, pos)
            (rank,) = _U32(buf, pos)
            if not 1 <= rank <= 4:
                raise WeightsError(f"Tensor {name} of {self.path} has {rank} dimensions; GGUF "
                                   "allows 1 to 4. The file is damaged.")
            dims = struct.unpack_from(f"<{rank}Q", buf, pos + 4)
            pos += 4 + 8 * rank
            (kind,), (offset,) = _U32(buf, pos), _U64(buf, pos + 4)
            pos += 12
            table.append((name, tuple(reversed(dims)), kind, offset))
        data_start = -(-pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        needed = 0
        for name, shape, kind, offset in table:
            nbytes = 0
            if kind in BLOCKS:
                per_block, block_bytes = BLOCKS[kind]
                if shape[-1] % per_block:
                    problems.append(f"Tensor {name} has rows of {shape[-1]} elements, which is not "
                                    f"a multiple of {type_name(kind)}'s block of {per_block}.")
                nbytes = math.prod(shape) // per_block * block_bytes
            if offset % alignment:
                problems.append(f"Tensor {name} starts at offset {offset}, which is not a multiple "
                                f"of the alignment {alignment}.")
            if name in tensors:
                problems.append(f"Tensor {name} is in the table twice.")
            tensors[name] = GGUFTensor(name, shape, kind, data_start + offset, nbytes)
            needed = max(needed, data_start + offset + nbytes)
        if needed > self.size:
            problems.append(f"Its tensors need {needed:,} bytes but the file has {self.size:,}: "
                            "it is cut. Fetch it again.")
        raise_all(problems, f"The GGUF file {self.path} cannot be read.")
        return tensors


class GGUFMetadata(Mapping[str, Any]):
    """The metadata of a GGUF file as a read-only mapping; values are decoded on first use.

    Strings are `str`, numbers and bools Python scalars, arrays lists of those. `dict(metadata)`
    decodes everything.
    """

    def __init__(self, buf: mmap.mmap, entries: dict[str, tuple[int, int]]) -> None:
        self._buf, self._entries, self._decoded = buf, entries, dict[str, Any]()

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            kind, pos = self._entries[key]
            self._decoded[key] = self._decode(kind, pos)[0]
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _decode(self, kind: int, pos: int) -> tuple[Any, int]:
        """The value of type `kind` at `pos` and the position after it."""
        buf = self._buf
        if kind == _STRING:
            (n,) = _U64(buf, pos)
            # Tokenizers hold tokens that are not UTF-8; keep their bytes as surrogates.
            return buf[pos + 8:pos + 8 + n].decode("utf-8", "surrogateescape"), pos + 8 + n
        if kind == _ARRAY:
            (item,), (count,) = _U32(buf, pos), _U64(buf, pos + 4)
            pos += 12
            if item in _SCALARS:
                array = np.frombuffer(buf, _SCALARS[item], count, pos)
                return array.tolist(), pos + array.nbytes
            values = []
            for _ in range(count):
                value, pos = self._decode(item, pos)
                values.append(value)
            return values, pos
        array = np.frombuffer(buf, _SCALARS[kind], 1, pos)
        return array.tolist()[0], pos + array.nbytes


def _string(buf: mmap.mmap, pos: int) -> tuple[str, int]:
    (n,) = _U64(buf, pos)
    end = pos + 8 + n
    if end > len(buf):
        raise IndexError
    return buf[pos + 8:end].decode("utf-8"), end
