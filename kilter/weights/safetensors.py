"""Safetensors files read lazily: one file, or the shards that an index names.

Headers are parsed and checked when the files are opened; of the data only the rows that are
asked for are read, through a memory map. The format (version of `safetensors` 0.3 and later):
header length u64, a JSON header with each tensor's dtype, shape and byte range, then the data
without holes. Nothing here ever unpickles.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilter.weights.errors import WeightsError, raise_all

INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
           "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
           "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


@dataclass(frozen=True)
class SafeTensor:
    """One tensor of a file; `dtype` in the format's own spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def type_name(self) -> str:
        return self.dtype


class SafetensorsFolder:
    """All tensors of a folder's `model.safetensors`, or of the shards its index names.

    Raises:
        WeightsError: listing everything wrong with the files: missing or cut shards, damaged
            headers, tensors in two shards, and disagreement between index and shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, SafeTensor] = {}
        self._maps: dict[str, mmap.mmap] = {}
        problems: list[str] = []
        files, named = _files(folder, problems)
        for file in files:
            try:
                self._open(file, problems)
            except WeightsError as error:
                problems.append(str(error))
        if not problems:
            for tensor, file in named.items():
                found = self.tensors.get(tensor)
                if found is None or found.file != file:
                    problems.append(
                        f"{INDEX} says that {file} holds the tensor {tensor}, but it "
                        f"{'is in no shard' if found is None else f'is in {found.file}'}.")
            if named:
                problems += [f"{t.file} holds the tensor {t.name}, which {INDEX} does not name."
                             for t in self.tensors.values() if t.name not in named]
        raise_all(problems, f"The safetensors files of {folder} cannot be read.")

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor `name`, or those of its rows and columns; a copy in the file's own dtype."""
        t = self.tensors[name]
        raw = np.frombuffer(self._maps[t.file], np.uint8, t.nbytes, t.offset)
        shape = t.shape
        if rows is not None:
            raw = raw.reshape(shape[0], t.nbytes // shape[0] if shape[0] else 0)[rows]
            shape = (raw.shape[0], *shape[1:])
        if columns is not None:
            start, stop, _ = columns.indices(shape[1])
            size = t.nbytes // max(1, math.prod(t.shape))
            raw = raw.reshape(shape[0], shape[1] * size)[:, start * size:stop * size]
            shape = (shape[0], stop - start, *shape[2:])
        return as_tensor(raw, _DTYPES[t.dtype], shape)

    def _open(self, file: str, problems: list[str]) -> None:
        path = self.folder / file
        header, data_start, size = _header(path)
        end = data_start
        for name, entry in sorted(header.items(), key=lambda item: _range(item[1])):
            tensor = _tensor(path, file, name, entry, data_start)
            if tensor.offset != end:
                raise WeightsError(f"In {path} the tensor {name} starts at byte {tensor.offset} "
                                   f"where {end} is expected; the header is damaged.")
            end += tensor.nbytes
            if name in self.tensors:
                problems.append(f"The tensor {name} is in both {self.tensors[name].file} and "
                                f"{file}.")
            self.tensors[name] = tensor
        if end != size:
            raise WeightsError(f"{path} has {size:,} bytes but its header describes {end:,}; the "
                               f"file is {'cut' if size < end else 'damaged'}. Fetch it again.")
        with open(path, "rb") as f:
            self._maps[file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def as_tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A new Tensor that holds the bytes `raw`."""
    out = torch.empty(shape, dtype=dtype)
    if out.numel():
        out.view(-1).view(torch.uint8).numpy()[:] = raw.reshape(-1)
    return out


def has_safetensors(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def _files(folder: Path, problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """The safetensors files to open, and the index's tensor -> file map (empty: no index)."""
    if (folder / INDEX).is_file():
        try:
            named = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
            named = {str(tensor): str(file) for tensor, file in named.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise WeightsError(f"{folder / INDEX} is not a JSON object with a weight_map from "
                               "tensor names to file names; the file is damaged. "
                               "Fetch it again.") from None
        files = []
        for file in sorted(set(named.values())):
            if Path(file).name != file:
                problems.append(f"{INDEX} names the file {file!r}, which is not a plain file name "
                                "in the model's folder.")
            elif not (folder / file).is_file():
                problems.append(f"{INDEX} names the file {file}, which is missing from {folder}; "
                                f"{Counter(named.values())[file]} tensors are in it.")
            else:
                files.append(file)
        return files, named
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"], {}
    if len(found) == 1:
        return found, {}
    if found:
        raise WeightsError(f"{folder} holds {len(found)} safetensors files ({', '.join(found)}) "
                           f"but no {INDEX} that says which tensors they hold. Add the index.")
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*"))
    if pickles:
        raise WeightsError(f"{folder} holds no safetensors file, only {', '.join(pickles)}. Those "
                           "are pickles, which can run code when they are loaded, so Kilter never "
                           "opens them. Convert the model to safetensors.")
    raise WeightsError(f"{folder} holds no safetensors file. A model folder needs a config.json "
                       f"and model.safetensors, or shards with {INDEX}.")


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, where the data starts, and the file's size."""
    with open(path, "rb") as f:
        size = f.seek(0, 2)
        f.seek(0)
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightsError(f"{path} has {size:,} bytes but its header alone needs "
                               f"{8 + length:,}; the file is cut or is not a safetensors file. "
                               "Fetch it again.")
        if length > _MAX_HEADER:
            raise WeightsError(f"{path} has a header of {length:,} bytes; safetensors allow "
                               f"{_MAX_HEADER:,}. The file is damaged.")
        raw = f.read(length)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        twice = [key for key, n in counts.items() if n > 1]
        if twice:
            raise WeightsError(f"The header of {path} holds {', '.join(twice)} twice; the file is "
                               "damaged.")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=once)
    except WeightsError:
        raise
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise WeightsError(f"The header of {path} is not a JSON object; the file is damaged or is "
                           "not a safetensors file. Fetch it again.")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def _range(entry: Any) -> tuple[int, int]:
    """The byte range for sorting; `_tensor` reports the entries that have none."""
    try:
        begin, end = (int(n) for n in entry["data_offsets"])
        return begin, end
    except (KeyError, TypeError, ValueError):
        return -1, -1


def _tensor(path: Path, file: str, name: str, entry: Any, data_start: int) -> SafeTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise WeightsError(f"In {path} the header's entry for {name} lacks dtype, shape or "
                           "data_offsets; the file is damaged.") from None
    if dtype not in _DTYPES:
        raise WeightsError(f"In {path} the tensor {name} has the dtype {dtype}, which Kilter does "
                           f"not know; it knows {', '.join(_DTYPES)}.")
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != nbytes or min(shape, default=0) < 0:
        raise WeightsError(f"In {path} the tensor {name} of dtype {dtype} and shape {list(shape)} "
                           f"needs {nbytes:,} bytes but has {end - begin:,}; the header is "
                           "damaged.")
    return SafeTensor(name, dtype, shape, file, data_start + begin, nbytes)
