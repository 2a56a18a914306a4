"""Adapter folders of the PEFT library: ``adapter_config.json`` and ``adapter_model.safetensors``.

    ours     layers.0.attn.qkv.adapter.q_proj.lora_a
    PEFT's   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

Both hold the same numbers in the same order: nothing is refitted, and a folder that is read and
written again is the same bit for bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kilter.models.adapter import PROJECTIONS, arrangement
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import Spread
from kilter.train.lora import LoraConfig, init_adapters
from kilter.weights.errors import WeightsError, raise_all
from kilter.weights.export import Parameter, Pending, replacing, write_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_LEAVES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight",
           "magnitude": "lora_magnitude_vector"}
# The text half of a multimodal model has its layers elsewhere, spelled in two ways.
_NAME = re.compile(r"base_model\.model\.(?:model\.|language_model\.model\.|model\.language_model\.)"
                   r"layers\.(\d+)\.(self_attn|mlp)\.(\w+_proj)\.(lora_\w+(?:\.weight)?)")
# Keys that say nothing about what an adapter computes.
_SILENT = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
           "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
           "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
           "r", "revision", "runtime_config", "target_modules", "task_type", "use_dora",
           "use_rslora", "eva_config", "init_lora_weights"}
# Ways to initialise after which the weights under the adapter are those of the model on disk.
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read.

    Attributes:
        config: with which `kilter.train.lora.add_adapters` makes the modules.
        tensors: whole float32 parameters by our names, for `kilter.parallel.apply.Spread.fill`.
        base: the model it says it was trained on.
        notes: full sentences on what was left out.
    """

    config: LoraConfig
    tensors: dict[str, Tensor]
    base: str | None
    notes: tuple[str, ...]


def read_peft(folder: str | Path, spec: ModelSpec) -> PeftAdapter:
    """Reads an adapter for a model.

    Raises:
        WeightsError: if it is not there, damaged, does not fit the model, or asks for more than
            LoRA, rsLoRA and DoRA with one rank; lists all problems.
    """
    folder = Path(folder)
    raw = _read_config(folder / CONFIG)
    tensors = _read_tensors(folder)
    problems = _config_problems(raw)
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        ours = _our_name(name)
        if ours is None or not value.is_floating_point():
            problems.append(f"{name} {list(value.shape)} is not a tensor of an adapter of this "
                            "model.")
        else:
            found[ours] = value.float()
    projections = [p for names in PROJECTIONS.values() for p in names
                   if any(f".adapter.{p}." in name for name in found)]
    raise_all(problems, f"The adapter {folder} cannot be used.")
    try:
        config = LoraConfig(int(raw["r"]), float(raw["lora_alpha"]), tuple(projections),
                            raw.get("use_dora") is True, raw.get("use_rslora") is True)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{folder / CONFIG} describes no usable adapter: {error}") from None
    expected = dict(_shapes(spec, config))
    problems += [f"{name} {list(expected[name])} is missing; an adapter has the same projections "
                 "in all layers." for name in expected if name not in found]
    problems += [f"{name} {list(value.shape)} is unexpected." if name not in expected else
                 f"{name} has shape {list(value.shape)} but this model and rank {config.rank} ask "
                 f"for {list(expected[name])}." for name, value in found.items()
                 if expected.get(name) != tuple(value.shape)]
    raise_all(problems, f"The adapter {folder} does not fit this {spec.architecture}.")
    dropout = raw.get("lora_dropout") or 0.0
    notes = (f"Its dropout of {dropout} is for training only and was left out.",) if dropout else ()
    base = raw.get("base_model_name_or_path")
    return PeftAdapter(config, found, base if isinstance(base, str) else None, notes)


def read_start(config: LoraConfig, spec: ModelSpec) -> PeftAdapter:
    """The adapter that ``config.path`` names.

    Raises:
        WeightsError: as `read_peft`, and if it is another adapter than ``config`` describes.
    """
    assert config.path is not None
    found = read_peft(config.path, spec)
    wanted = replace(found.config, path=config.path)
    different = [f"{name} = {json.dumps(value)}" for name, value, given in (
        ("rank", wanted.rank, config.rank), ("alpha", wanted.alpha, config.alpha),
        ("targets", list(wanted.projections), list(config.projections)),
        ("dora", wanted.dora, config.dora), ("rslora", wanted.rslora, config.rslora))
        if value != given]
    if different:
        raise WeightsError(f"The adapter {config.path} is not the one that [lora] describes; of it "
                           f"the table says {', '.join(different)}.")
    return found


def told_of_start(config: LoraConfig | None, spec: ModelSpec) -> list[str]:
    """Sentences on the adapter that a job starts from, if it does."""
    if config is None or config.path is None:
        return []
    found = read_start(config, spec)
    on = f", which says that it was trained on {found.base}" if found.base else ""
    return [f"Starting from the adapter {config.path}{on}.", *found.notes]


def start_adapters(spread: Spread, config: LoraConfig) -> None:
    """Adapters as a job starts with them: those of ``config.path``, else new ones. To be called
    when the weights are there. Collective.

    Raises:
        WeightsError: as `read_start`.
    """
    if config.path is None:
        init_adapters(spread, config)
    else:
        spread.fill(read_start(config, spread.model.spec).tensors)


def write_peft(folder: str | Path, spec: ModelSpec, config: LoraConfig,
               tensors: Mapping[str, Tensor | Pending], *, base: str | None = None,
               overwrite: bool = False) -> Path:
    """Writes an adapter as a folder that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        tensors: whole parameters by our names; those that are not of adapters are passed over.
        base: the name or folder of the model that was adapted.
        overwrite: replace what is there.

    Raises:
        WeightsError: if the folder exists and ``overwrite`` is off, a parameter is missing, or the
            files cannot be written; what was there is as it was.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise WeightsError(f"{folder} already exists; choose another destination or allow it to be "
                           "overwritten.")
    shapes = dict(_shapes(spec, config))
    raise_all([f"{name} {list(shape)} is missing." for name, shape in shapes.items()
               if name not in tensors or tuple(tensors[name].shape) != shape],
              "These tensors are not a whole adapter.")
    parameters = [Parameter({_peft_name(name): (tensors[name].dtype, shape)},
                            partial(_to_write, name, tensors[name]))
                  for name, shape in shapes.items()]
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": config.rank, "lora_alpha": alpha, "target_modules": list(config.projections),
        "use_dora": config.dora, "use_rslora": config.rslora, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}
    with replacing(folder) as work:
        for _ in write_file(work / WEIGHTS, parameters):
            pass
        (work / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return folder


def _to_write(name: str, tensor: Tensor | Pending) -> dict[str, Tensor]:
    whole = tensor.load() if isinstance(tensor, Pending) else tensor
    return {_peft_name(name): whole.detach().to("cpu").contiguous()}


def _shapes(spec: ModelSpec, config: LoraConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of a model's adapters, by our names."""
    columns = {"out": spec.num_heads * spec.head_dim, "down": spec.ffn_size}
    for i in range(spec.num_layers):
        for kind, names in PROJECTIONS.items():
            groups, widths = arrangement(spec, kind)
            block = "attn" if kind in ("qkv", "out") else "mlp"
            for name in names:
                if name in config.projections:
                    place = f"layers.{i}.{block}.{kind}.adapter.{name}"
                    rows = groups * widths[name]
                    yield f"{place}.lora_a", (config.rank, columns.get(kind, spec.hidden_size))
                    yield f"{place}.lora_b", (rows, config.rank)
                    if config.dora:
                        yield f"{place}.magnitude", (rows,)


def _peft_name(name: str) -> str:
    _, layer, block, _, _, projection, leaf = name.split(".")
    theirs = "self_attn" if block == "attn" else block
    return f"base_model.model.model.layers.{layer}.{theirs}.{projection}.{_LEAVES[leaf]}"


def _our_name(name: str) -> str | None:
    """None for what is not of an adapter."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, theirs, projection, leaf = match.groups()
    kind = next((kind for kind, names in PROJECTIONS.items() if projection in names), None)
    block = "attn" if theirs == "self_attn" else theirs
    ours = next((ours for ours, spelled in _LEAVES.items() if spelled == leaf), None)
    if ours is None or kind is None or (block == "attn") != (kind in ("qkv", "out")):
        return None
    return f"layers.{int(layer)}.{block}.{kind}.adapter.{projection}.{ours}"


def _config_problems(raw: Mapping[str, Any]) -> list[str]:
    problems = []
    if raw.get("peft_type") != "LORA":
        problems.append(f"Its peft_type is {raw.get('peft_type')!r}; Kilter reads LORA.")
    if raw.get("init_lora_weights", True) not in _HARMLESS_INITS:
        problems.append(f"Its init_lora_weights is {raw['init_lora_weights']!r}, which changes the "
                        "weights under the adapter; convert it to a plain LoRA with PEFT first.")
    if raw.get("bias", "none") != "none":
        problems.append(f"Its bias is {raw['bias']!r}; Kilter adapts matrices only.")
    problems += [f"It asks for {key} = {json.dumps(value)}, which Kilter does not have."
                 for key, value in raw.items()
                 if value and key != "bias" and key not in _SILENT]
    return problems


def _read_config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} is no adapter folder: {path.name} is not there."
                           ) from None
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON ({error}); fetch it again.") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds {type(value).__name__} where a JSON object is expected.")
    return value


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise WeightsError(f"{folder} holds no {WEIGHTS}." + (
            " Its adapter_model.bin is a pickle, which can run code when it is loaded, so Kilter "
            "never opens it; convert it to safetensors." if pickled else ""))
    try:
        return load_file(path)
    except SafetensorError as error:
        raise WeightsError(f"{path} is damaged ({error}); fetch it again.") from None
