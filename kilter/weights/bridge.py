"""`open_model`: a model folder or GGUF file as named parameters of ours, read when asked for.

    source = open_model("models/smollm2")
    source.spec                                  # what to build
    for name in source.names():
        tensor = source.read(name)               # or source.read(name, rows=slice(0, 64))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from kilter.models.spec import ModelSpec
from kilter.weights.decoder import decoder_mappings, hugging_face
from kilter.weights.errors import WeightsError, raise_all
from kilter.weights.families import FAMILIES, REWARD_FAMILIES, Family, gemma3
from kilter.weights.gguf import GGUFFile
from kilter.weights.gguf_model import ROPE_FREQS, gguf_names_of, gguf_spec
from kilter.weights.gguf_quants import SUPPORTED
from kilter.weights.mappings import ParameterMap, Weight
from kilter.weights.safetensors import SafetensorsFolder, has_safetensors

_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                    "model.multi_modal_projector.")
_DENSE = ("F32", "F16", "BF16")


class TensorEntry(Protocol):
    """A line of a file's tensor table."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def type_name(self) -> str: ...


class TensorStore(Protocol):
    """What reads tensors of one checkpoint: `SafetensorsFolder` or `GGUFFile`."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...
    def read(self, name: str, rows: slice | None = None, columns: slice | None = None
             ) -> Weight: ...


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter without its data."""

    name: str
    shape: tuple[int, ...]
    types: tuple[str, ...]  # the source tensors' storage types, e.g. ("BF16",) or ("Q4_K", "Q6_K")
    nbytes: int  # in the files


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint on disk, seen as the parameters of ``Decoder(spec)``.

    Attributes:
        path: what was opened.
        folder: the folder with config and tokenizer files; for a lone GGUF file, its own.
        kind: "hf" or "gguf".
        spec: the model.
        family: its family, which knows how to write a config.json.
        config: config.json of the (text) model as it was read; empty for GGUF.
        eos_token_ids: the ids that end generation: from generation_config.json where it names
            some, else from config.json or the GGUF header.
        notes: full sentences on what was left out.
        store: the file reader, e.g. `GGUFFile` with its `metadata`.
    """

    path: Path
    folder: Path
    kind: str
    spec: ModelSpec
    family: Family
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]
    store: TensorStore = field(repr=False)
    maps: dict[str, ParameterMap] = field(repr=False)

    @property
    def is_reward(self) -> bool:
        """Whether it is a reward model: it has ``value.weight`` in the place of an output head."""
        return "value.weight" in self.maps

    def names(self) -> list[str]:
        """Our parameter names, in the order of the computation."""
        return list(self.maps)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Weight:
        """The parameter, or its rows [rows.start, rows.stop) and columns; only their bytes are read
        (of block-quantised tensors, the blocks that hold them).

        Returns:
            Tensor in the file's own dtype, or `QuantTensor` where a GGUF file holds the matrix
            quantised. Fused parameters whose parts differ in format are held in the smallest
            format that loses nothing (`mappings.common_format`).
        """
        mapping = self._map(name)
        def read(source: str, picked: slice) -> Weight:
            return self.store.read(source, picked, columns)

        if rows is None:
            return mapping.read(read)
        start, stop, step = rows.indices(mapping.shape[0])
        if step != 1:
            raise ValueError(f"Rows {rows} of {name} have step {step}; only step 1 is supported.")
        return mapping.read(read, start, max(start, stop))

    def info(self, name: str) -> ParameterInfo:
        mapping = self._map(name)
        entries = [self.store.tensors[source] for source in mapping.sources]
        return ParameterInfo(name, mapping.shape,
                             tuple(dict.fromkeys(entry.type_name for entry in entries)),
                             sum(entry.nbytes for entry in entries))

    def check(self) -> None:
        """Compares the files' tensors with the parameters.

        Raises:
            WeightsError: listing every missing, unexpected and misshapen tensor, tensors of
                types that cannot be read, and a head that differs from the embedding it is
                tied to.
        """
        raise_all(self._problems(), f"The weights of {self.path} do not fit its "
                                    f"{self.spec.architecture} config.")

    def _map(self, name: str) -> ParameterMap:
        try:
            return self.maps[name]
        except KeyError:
            raise KeyError(f"{self.spec.architecture} has no parameter {name!r}; "
                           f"its parameters are {', '.join(self.maps)}.") from None

    def _problems(self) -> list[str]:
        tensors, problems = self.store.tensors, []
        readable = SUPPORTED.values() if self.kind == "gguf" else _DENSE
        known: set[str] = set()
        for mapping in self.maps.values():
            known.update(mapping.sources, mapping.aliases)
            for source, shape in {**mapping.sources, **mapping.aliases}.items():
                found = tensors.get(source)
                if found is None:
                    if source in mapping.sources:
                        problems.append(f"{source} {list(shape)} is missing.")
                elif found.shape != shape:
                    problems.append(f"{source} has shape {list(found.shape)} but the config asks "
                                    f"for {list(shape)}.")
                elif found.type_name not in readable:
                    problems.append(f"{source} has type {found.type_name}, which Kilter cannot "
                                    f"read as a weight; readable are {', '.join(readable)}.")
                elif source in mapping.aliases and not self._same(source, mapping):
                    problems.append(f"{source} differs from {next(iter(mapping.sources))}, but "
                                    "the config ties them (tie_word_embeddings).")
        for name in tensors:
            if name not in known and not self._ignorable(name):
                problems.append(f"{name} {list(tensors[name].shape)} is unexpected: the model has "
                                "no such tensor.")
        return problems

    def _same(self, alias: str, mapping: ParameterMap, chunk: int = 4096) -> bool:
        (source,) = mapping.sources
        if source not in self.store.tensors:
            return True  # reported as missing
        for start in range(0, mapping.shape[0], chunk):
            a, b = (self.store.read(name, slice(start, start + chunk)) for name in (source, alias))
            assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            if not torch.equal(a, b):
                return False
        return True

    def _ignorable(self, name: str) -> bool:
        return _buffer(name) or (self.kind == "gguf" and name == ROPE_FREQS) or (
            self.kind == "hf" and _multimodal(self.store) and name.startswith(_VISION_PREFIXES))


def open_model(path: str | Path, *, reward: bool = False) -> ModelSource:
    """Opens a model folder (config.json and safetensors), a GGUF file, or a folder with one.

    Headers are read and everything is checked (`ModelSource.check`); weights are not loaded.

    Args:
        reward: take reward models too (``…ForSequenceClassification`` with one label), which have
            a value head and write no text.

    Raises:
        WeightsError: no model there, an unknown architecture, an unsupported config, damaged or
            cut files, or tensors that do not fit the config; all problems at once.
    """
    path = Path(path)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file() or has_safetensors(path):
            source = _open_folder(path, reward)
        elif len(ggufs) == 1:
            source = _open_gguf(path, ggufs[0])
        elif ggufs:
            raise WeightsError(f"{path} holds {len(ggufs)} GGUF files "
                               f"({', '.join(p.name for p in ggufs)}); name the one to open.")
        else:
            raise WeightsError(f"{path} holds no model: neither a config.json with safetensors nor "
                               f"a GGUF file{_instead(path)}.")
    elif path.is_file() and path.suffix == ".gguf":
        source = _open_gguf(path, path)
    elif path.is_file():
        raise WeightsError(f"{path} is a file but not a .gguf file; give the model's folder or a "
                           "GGUF file.")
    else:
        raise WeightsError(f"{path} does not exist.")
    source.check()
    return source


def _instead(path: Path) -> str:
    """What may have been meant by a folder without a model."""
    if (path / "adapter_config.json").is_file():
        return ("; it holds adapters, which belong to a model: train on with lora.path, or give "
                "the folder of the merged model")
    if (path / "model").is_dir():
        return f"; {path / 'model'} is what a run wrote there"
    return ""


def _open_folder(folder: Path, reward: bool) -> ModelSource:
    config = _json(folder / "config.json")
    architectures = config.get("architectures")
    supported = f"{', '.join(FAMILIES)} and the text half of {gemma3.MULTIMODAL}"
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise WeightsError(f"{folder / 'config.json'} names the architectures {architectures!r}; "
                           f"Kilter needs exactly one. It supports {supported}.")
    (architecture,) = architectures
    multimodal = architecture == gemma3.MULTIMODAL
    is_reward = architecture in REWARD_FAMILIES
    if is_reward and not reward:
        raise WeightsError(f"{folder} holds a reward model ({architecture}), which scores texts "
                           "and writes none. Training takes it with kind = \"reward\"; elsewhere "
                           "name a language model.")
    family = REWARD_FAMILIES[architecture] if is_reward else FAMILIES.get(
        gemma3.ARCHITECTURE if multimodal else architecture)
    if family is None:
        raise WeightsError(f"{folder / 'config.json'} names the architecture {architecture}, which "
                           f"Kilter does not know. It supports {supported}.")
    raw = gemma3.text_config(config) if multimodal else config
    spec = family.to_spec(raw)
    store = SafetensorsFolder(folder)
    names = hugging_face(spec, head="score" if is_reward else "lm_head")
    notes: list[str] = []
    if multimodal:
        # Two spellings: language_model.model.* of transformers 4, model.language_model.* of 5.
        nested = any(name.startswith("model.language_model.") for name in store.tensors)
        names = hugging_face(spec, "model.language_model.") if nested else hugging_face(
            spec, "language_model.model.", "language_model.lm_head")
        left_out = [t for t in store.tensors if t.startswith(_VISION_PREFIXES)]
        notes.append(f"Only the text half of this {architecture} is used; its vision half "
                     f"({len(left_out)} tensors) is left out, also of exports.")
    buffers = [name for name in store.tensors if _buffer(name)]
    if buffers:
        notes.append("Buffers that are computed and not learned were ignored: "
                     f"{', '.join(buffers)}.")
    generation = _json(folder / "generation_config.json", optional=True)
    eos = _token_ids(generation.get("eos_token_id"), "generation_config.json") or _token_ids(
        raw.get("eos_token_id", config.get("eos_token_id")), "config.json")
    return ModelSource(folder, folder, "hf", spec, family, raw, eos, tuple(notes), store,
                       {m.name: m for m in decoder_mappings(spec, names, is_reward)})


def _open_gguf(path: Path, file: Path) -> ModelSource:
    store = GGUFFile(file)
    spec = gguf_spec(store)
    maps = decoder_mappings(spec, gguf_names_of(store, spec))
    keys = (f"tokenizer.ggml.{which}_token_id" for which in ("eos", "eot", "eom"))
    eos = tuple(dict.fromkeys(int(store.metadata[k]) for k in keys if k in store.metadata))
    notes = [f"{ROPE_FREQS} was read as Llama 3's rope scaling."] * (ROPE_FREQS in store.tensors)
    return ModelSource(path, file.parent, "gguf", spec, FAMILIES[spec.architecture], {}, eos,
                       tuple(notes), store, {m.name: m for m in maps})


def _json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing; a model folder needs it beside its safetensors "
                           "files.") from None
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON ({error}); fetch it again.") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds {type(value).__name__} where a JSON object is expected.")
    return value


def _token_ids(value: Any, file: str) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise WeightsError(f"eos_token_id in {file} is {value!r}; it must be a token id or a list "
                           "of them.")
    return tuple(dict.fromkeys(ids))


def _buffer(name: str) -> bool:
    """Buffers that old exporters saved although they are computed from the config."""
    return name.endswith("rotary_emb.inv_freq")


def _multimodal(store: TensorStore) -> bool:
    return any("language_model." in name for name in store.tensors)
