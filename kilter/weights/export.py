"""Writes a Hugging Face folder: safetensors, config.json, and the tokenizer files of the source.

The folder is written beside its destination under a temporary name and renamed at the end, so a
destination is whole or absent. Tensors are streamed: of the weights, one parameter at a time is
in memory, also of those that are elsewhere until they are asked for (`Pending`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilter.models.spec import ModelSpec
from kilter.ops.packed import QuantTensor
from kilter.weights.bridge import ModelSource
from kilter.weights.decoder import decoder_mappings, hugging_face
from kilter.weights.errors import WeightsError
from kilter.weights.families import FAMILIES
from kilter.weights.mappings import ParameterMap, Weight, dense
from kilter.weights.safetensors import INDEX

Progress = Callable[[int, int], None]

_TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}
# Files that belong to a model and hold no weights and no code.
_CARRIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "README.md",
            "additional_chat_templates/*.jinja")
# Of what is carried, nothing may say that the weights are others: transformers would load an
# adapter_config.json's adapter over them.
_NOT_CARRIED = ("*.index.json", "config.json", "kilter.json", "adapter_config.json")


@dataclass(frozen=True)
class Pending:
    """A tensor that is made when it is its turn to be written, and not kept.

    Attributes:
        load: makes it, of this shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class State:
    """Weights in memory, or to come, to export: a trained model, for instance.

    Attributes:
        spec: the model.
        tensors: our parameter names to weights; ``value.weight`` among them makes it a reward
            model.
        folder: a Hugging Face folder whose tokenizer and generation files go along, if any.
        config: a config.json to carry over instead of one composed from `spec`.
    """

    spec: ModelSpec
    tensors: Mapping[str, Weight | Pending]
    folder: Path | None = None
    config: Mapping[str, Any] | None = None

    @property
    def is_reward(self) -> bool:
        return "value.weight" in self.tensors


def export_hf(source: ModelSource | State, dst: str | Path, *, dtype: torch.dtype | None = None,
              max_shard_bytes: int = 5_000_000_000, overwrite: bool = False,
              progress: Progress | None = None,
              before_rename: Callable[[Path], None] | None = None) -> Path:
    """Writes `source` as a folder that `transformers` loads; returns it.

    A Hugging Face source comes out with the same tensor names, shapes and bytes, its config.json
    and other files as they were. A GGUF source gets a composed config.json.

    Args:
        dtype: float32, float16 or bfloat16 for all tensors; None keeps each tensor's own (and
            makes quantised ones float32, which holds the reference dequantisation exactly).
        max_shard_bytes: above this, several files and an index are written. A parameter that is
            larger by itself (fused ones count as one) makes a larger file.
        overwrite: replace an existing destination.
        progress: called with (bytes written, bytes in all).
        before_rename: called with the complete temporary folder; adds files to it.

    Raises:
        WeightsError: the destination holds something and `overwrite` is off, `source` lacks
            parameters, or the files cannot be written; the destination is as it was.
        ValueError: an unsupported `dtype`.
    """
    dst = Path(dst)
    if dtype is not None and dtype not in _TYPE_NAMES:
        raise ValueError(f"Weights cannot be exported as {dtype}; use float32, float16 or "
                         "bfloat16.")
    if not overwrite and dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise WeightsError(f"{dst} already exists; choose another destination or allow it to be "
                           "overwritten.")
    parameters = _parameters(source, dtype)
    with replacing(dst) as work:
        _write_weights(work, parameters, max_shard_bytes, progress)
        _carry_files(source, work)
        if before_rename is not None:
            before_rename(work)
        # Last, because a folder without a config.json is not a model to anybody.
        _write_json(work / "config.json", _config(source, parameters, dtype))
    return dst


@contextmanager
def replacing(dst: Path) -> Iterator[Path]:
    """A new folder to fill, which then takes the place of whatever is at ``dst``; if anything
    fails, nothing is left of it and ``dst`` is as it was.

    Raises:
        WeightsError: if the disk does not let it.
    """
    work = dst.parent / f".{dst.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        yield work
        _replace(work, dst)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise WeightsError(
                f"{dst} could not be written: {os.strerror(error.errno)}"
                f"{f' ({error.filename})' if error.filename else ''}. Nothing of it was left "
                "behind; make room, or name a folder that can be written.") from error
        raise


def remove_leftovers(dst: Path) -> None:
    """Removes what `replacing` left beside ``dst`` in processes that were killed. Only for who
    knows that no other one is at it."""
    for kind in ("partial", "old"):
        for left in dst.parent.glob(f".{dst.name}.{kind}-*"):
            shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class Parameter:
    """One parameter of ours, the tensors it becomes in a file, and how to get them."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    load: Callable[[], dict[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(dtype, shape) for dtype, shape in self.tensors.values())


def _parameters(source: ModelSource | State, dtype: torch.dtype | None) -> list[Parameter]:
    """What to write, in order. Names and dtypes of a Hugging Face source stay as they are."""
    names = hugging_face(source.spec, head="score" if source.is_reward else "lm_head")
    maps = {m.name: m for m in decoder_mappings(source.spec, names, source.is_reward)}
    if isinstance(source, State):
        wrong = [*(f"{name} is missing" for name in maps if name not in source.tensors),
                 *(f"{name} is unexpected" for name in source.tensors if name not in maps),
                 *(f"{name} has shape {list(source.tensors[name].shape)} instead of "
                   f"{list(m.shape)}" for name, m in maps.items() if name in source.tensors
                   and tuple(source.tensors[name].shape) != m.shape)]
        if wrong:
            raise WeightsError(f"These weights are not a whole {source.spec.architecture}: "
                               f"{'; '.join(wrong)}.")
    return [_parameter(source, mapping, dtype) for mapping in maps.values()]


def _parameter(source: ModelSource | State, mapping: ParameterMap,
               dtype: torch.dtype | None) -> Parameter:
    name = mapping.name
    tensors = {}
    for i, (target, shape) in enumerate(mapping.sources.items()):
        if dtype is not None:
            own = dtype
        elif isinstance(source, State):
            weight = source.tensors[name]
            own = torch.float32 if isinstance(weight, QuantTensor) else weight.dtype
        else:
            # The mappings of all formats list corresponding sources in the same order.
            original = list(source.maps[name].sources)[i]
            own = _DTYPES.get(source.store.tensors[original].type_name, torch.float32)
        if own not in _TYPE_NAMES:
            raise WeightsError(f"{name} has dtype {own}; only float32, float16 and bfloat16 can "
                               "be exported. Give the dtype to convert to.")
        tensors[target] = (own, shape)
    copies = {}
    if isinstance(source, ModelSource) and source.kind == "hf":
        held = source.maps[name].aliases
        copies = {target: next(iter(tensors)) for target, theirs in zip(
            mapping.aliases, held, strict=True) if theirs in source.store.tensors}
    tensors |= {target: tensors[original] for target, original in copies.items()}

    def load() -> dict[str, Tensor]:
        weight = source.tensors[name] if isinstance(source, State) else source.read(name)
        weight = weight.load() if isinstance(weight, Pending) else weight
        parts = mapping.to_source(weight)
        parts |= {target: parts[original] for target, original in copies.items()}
        return {target: dense(part).to("cpu", tensors[target][0]).contiguous()
                for target, part in parts.items()}

    return Parameter(tensors, load)


def _write_weights(folder: Path, parameters: list[Parameter], max_shard_bytes: int,
                   progress: Progress | None) -> None:
    shards: list[list[Parameter]] = [[]]
    for parameter in parameters:
        held = sum(p.nbytes for p in shards[-1])
        if shards[-1] and held + parameter.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(parameter)
    total = sum(p.nbytes for p in parameters)
    done = 0
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else (
            f"model-{i:05d}-of-{len(shards):05d}.safetensors")
        for written in write_file(folder / file, shard):
            done += written
            if progress is not None:
                progress(done, total)
        weight_map |= {name: file for p in shard for name in p.tensors}
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total},
                                     "weight_map": dict(sorted(weight_map.items()))})


def write_file(path: Path, shard: list[Parameter]) -> Iterable[int]:
    """Streams one safetensors file; yields the bytes written after each parameter.

    The header comes first and needs every offset, which shapes and dtypes give. Wide dtypes come
    first in the data, so that every tensor is aligned to its element size.
    """
    tensors = {name: entry for p in shard for name, entry in p.tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        end = offset + _nbytes(dtype, shape)
        header[name] = {"dtype": _TYPE_NAMES[dtype], "shape": list(shape),
                        "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for parameter in shard:
            for name, tensor in parameter.load().items():
                f.seek(8 + len(text) + header[name]["data_offsets"][0])
                f.write(tensor.view(torch.uint8).numpy().data)
            del tensor  # before the next one comes
            yield parameter.nbytes


def _config(source: ModelSource | State, parameters: list[Parameter],
            dtype: torch.dtype | None) -> dict[str, Any]:
    family = FAMILIES[source.spec.architecture]
    config = dict(source.config or {})
    if not config:
        config = family.to_config(source.spec)
        # The dtype that a reader loads in by default: the widest that a matrix needs.
        kept = max((entry for p in parameters for entry in p.tensors.values()
                    if len(entry[1]) == 2), key=lambda entry: entry[0].itemsize)[0]
        config["torch_dtype"] = str(kept).removeprefix("torch.")
        if isinstance(source, ModelSource):
            config |= _token_ids(source)
    if dtype is not None:
        spelling = "dtype" if "dtype" in config else "torch_dtype"
        config[spelling] = str(dtype).removeprefix("torch.")
    if source.is_reward and len(config.get("id2label") or ()) != 1:  # a classifier with one label
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    architecture = family.reward if source.is_reward else family.architecture
    return {**config, "architectures": [architecture], "model_type": family.model_type}


def _token_ids(source: ModelSource) -> dict[str, Any]:
    """The special token ids of a GGUF header, as config.json spells them."""
    metadata = getattr(source.store, "metadata", {})
    ids: dict[str, Any] = {
        f"{ours}_token_id": int(metadata[f"tokenizer.ggml.{theirs}_token_id"])
        for ours, theirs in (("bos", "bos"), ("pad", "padding"))
        if f"tokenizer.ggml.{theirs}_token_id" in metadata}
    eos = list(source.eos_token_ids)
    return ids | ({"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {})


def _carry_files(source: ModelSource | State, work: Path) -> None:
    """Copies the files that are not weights. A lone GGUF file's folder may hold anything, so
    only a folder that was opened as a model gives its files."""
    folder = source.folder
    alone = isinstance(source, ModelSource) and source.path != folder
    if folder is not None and not alone:
        for pattern in _CARRIED:
            for file in sorted(folder.glob(pattern)):
                target = work / file.relative_to(folder)
                if file.is_file() and not any(fnmatch(file.name, name) for name in _NOT_CARRIED):
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, target)
    generation = work / "generation_config.json"
    if isinstance(source, ModelSource) and source.kind == "gguf" and not generation.exists():
        ids = _token_ids(source)
        if ids:
            _write_json(generation, ids)


def _replace(work: Path, dst: Path) -> None:
    """Moves the finished folder to its place; what was there is put aside first, then deleted."""
    if not dst.exists():
        work.rename(dst)
        return
    old = work.with_name(work.name.replace(".partial-", ".old-"))
    dst.rename(old)
    try:
        work.rename(dst)
    except BaseException:
        old.rename(dst)
        raise
    if old.is_dir():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()
