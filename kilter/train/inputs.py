"""What a run starts from: model, tokenizer and data, opened and checked against each other.

The launcher opens them once, before any rank starts, so that whatever is wrong with them is one
sentence; every rank opens them again, and finds the data tokenised.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kilter.models.spec import ModelSpec
from kilter.parallel.context.plan import check_context
from kilter.parallel.heads import split_model
from kilter.tokens import Tokenizer
from kilter.train.config import LaunchConfig, ModelConfig, TrainJob
from kilter.train.data import Data, open_data
from kilter.train.peft import read_start
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.families import FAMILIES
from kilter.weights.pull import resolve
from kilter.weights.tokenizer import open_tokenizer


@dataclass(frozen=True)
class Start:
    """A model to start from.

    Attributes:
        spec: the model.
        source: the weights to start from; None for a new model.
        tokenizer: the data's.
        carried: the Hugging Face folder that was started from, whose files go along with the
            finished model; its tokenizer's among them, unless the job names another.
    """

    spec: ModelSpec
    source: ModelSource | None
    tokenizer: Tokenizer
    carried: Path | None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """That the model's files name, beside the tokenizer's own."""
        return () if self.source is None else self.source.eos_token_ids


@dataclass(frozen=True)
class Inputs(Start):
    """The same, and the data, tokenised."""

    data: Data


def open_start(model: ModelConfig, *, reward: bool = False) -> Start:
    """Opens a model and its tokenizer.

    Args:
        reward: take a reward model too (see `kilter.weights.bridge.open_model`).

    Raises:
        ValueError: for anything that is not there, cannot be read or does not fit together.
    """
    source = None if model.path is None else open_model(
        resolve(model.path), reward=reward)
    tokenizer = _tokenizer(model, source)
    spec = _new_spec(model, tokenizer) if source is None else source.spec
    if tokenizer.vocab_size > spec.vocab_size:
        raise ValueError(f"The tokenizer has {tokenizer.vocab_size} tokens but the model only "
                         f"{spec.vocab_size}; take the model's own tokenizer, or make vocab_size "
                         "larger.")
    carried = source.folder if source is not None and source.kind == "hf" else None
    return Start(spec, source, tokenizer, carried)


def open_inputs(job: TrainJob) -> Inputs:
    """Opens what a job names; tokenises data that is not in the cache yet.

    Raises:
        ValueError: for anything that is not there, cannot be read or does not fit together.
    """
    start = open_start(job.model, reward=job.kind == "reward")
    spec = start.spec
    if job.data.seq_len > spec.max_positions:
        raise ValueError(f"data.seq_len is {job.data.seq_len}, but this model takes at most "
                         f"{spec.max_positions} tokens; make it smaller.")
    job.layout.check(job.layout.world, spec)
    split_model(spec, job.layout.tp)
    job.pipeline.layers_of(spec, job.layout.pp)
    check_context(spec, job.layout, job.context)
    if job.lora is not None and job.lora.path is not None:
        read_start(job.lora, spec)  # refuses an adapter that cannot be trained
    _check_machine(job)
    return Inputs(spec, start.source, start.tokenizer, start.carried,
                  open_data(job.data, start.tokenizer))


def device_type(launch: LaunchConfig) -> str:
    """``cpu`` or ``cuda``. Raises ValueError if the job asks for GPUs that are not there."""
    there = torch.cuda.is_available()
    if launch.device == "cuda" and not there:
        raise ValueError("launch.device is cuda, but torch sees no CUDA device here; set it to "
                         "cpu or auto.")
    return "cuda" if there and launch.device != "cpu" else "cpu"


def check_products(model: ModelConfig, launch: LaunchConfig) -> None:
    """Raises ValueError for ``model.products`` that the device of a job does not have."""
    if model.products != "fp32" and device_type(launch) == "cuda":
        raise ValueError(f"model.products is {model.products}, which only CPUs compute so; leave "
                         "it out, or set launch.device to cpu.")


def _check_machine(job: TrainJob) -> None:
    check_products(job.model, job.launch)
    check_tensorboard(job.log.tensorboard)


def check_tensorboard(wanted: bool) -> None:
    """Raises ValueError if a job wants TensorBoard's files and its package is not there."""
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("log.tensorboard is true, but the package tensorboard is not installed; "
                         "pip install 'kilter[tensorboard]', or turn it off.")


def _tokenizer(model: ModelConfig, source: ModelSource | None) -> Tokenizer:
    if model.tokenizer is not None:
        path = resolve(model.tokenizer)
        if (path / "tokenizer.json").is_file():
            return Tokenizer.from_folder(path)
        source = open_model(path)
    assert source is not None
    return open_tokenizer(source)


def _new_spec(model: ModelConfig, tokenizer: Tokenizer) -> ModelSpec:
    raw = _Read({"architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.vocab_size})
    if isinstance(model.config, Mapping):
        raw |= model.config
    else:
        assert model.config is not None
        raw |= _read_config(Path(model.config))
    names = raw["architectures"]
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model.config asks for the architecture {name!r}; there are "
                         f"{', '.join(FAMILIES)}.")
    spec = FAMILIES[name].to_spec(raw)
    if isinstance(model.config, Mapping) and (unread := sorted(raw.keys() - raw.read)):
        close = difflib.get_close_matches(unread[0], raw.read - {"architectures"}, n=1)
        raise ValueError(f"model.config has fields that nothing of a {name} is made from: "
                         f"{', '.join(unread)}. Leave them out."
                         + (f" Did you mean {close[0]}?" if close else ""))
    return spec


class _Read(dict[str, Any]):
    """A dict that knows which of its keys somebody asked for, in ``read``."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _read_config(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model.config names {path}, which is not there.") from None
    except ValueError as error:
        raise ValueError(f"model.config names {path}, which is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"model.config names {path}, which holds no JSON object.")
    return value
