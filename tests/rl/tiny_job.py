"""A small RL job: a model of two layers learns to answer with one letter again and again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from kilter.job import build, dump
from kilter.rl.config import RLJob
from kilter.rl.launch import open_rl
from kilter.rl.loop import RLRun
from kilter.rl.rewards import Sample
from kilter.rl.roles import Roles
from kilter.rl.tasks import TaskItem
from kilter.train.loop import Ending, stop_signals
from tests.serve.tiny_tokenizer import save_byte_tokenizer

T = TypeVar("T")

MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
         "vocab_size": 40}
LETTERS = "!\"#$"


class Letters:
    """Prompts of one letter; the answer wanted is that letter, as often as there is room."""

    def __init__(self, split: str, size: int = 64) -> None:
        self.split, self.size = split, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> TaskItem:
        letter = LETTERS[index % len(LETTERS)]
        return TaskItem(({"role": "user", "content": letter},), letter, f"{self.split}{index}")


def share(samples: Sequence[Sample]) -> list[float]:
    """How much of an answer is the letter asked for."""
    return [sample.answer_text.count(sample.reference) / max(1, len(sample.token_ids))
            for sample in samples]


def job_table(folder: Path, **changes: Any) -> dict[str, Any]:
    if not (folder / "tokenizer").exists():
        save_byte_tokenizer(folder / "tokenizer", 40)
    table: dict[str, Any] = {
        "output": str(folder / "run"), "steps": 4, "seed": 3,
        "model": {"config": dict(MODEL), "tokenizer": str(folder / "tokenizer"), "std": 0.1},
        "task": {"python": "tests.rl.tiny_job:Letters"},
        "rewards": [{"kind": "tests.rl.tiny_job:share"}],
        "rollout": {"prompts": 4, "samples": 4, "max_tokens": 8, "format": "text",
                    "engine": {"kv_tokens": 256, "page_size": 4, "max_context": 24}},
        "update": {"token_budget": 60},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-6},
        "schedule": {"name": "constant"},
        "checkpoint": {"every": 0}, "launch": {"device": "cpu", "threads": 1}, "export": False}
    return merged(table, changes)


def make_job(folder: Path, **changes: Any) -> RLJob:
    return build(RLJob, job_table(folder, **changes))


@contextmanager
def new_run(job: Mapping[str, Any]) -> Iterator[RLRun]:
    """A run that was made and restored, and has not stepped yet, as the rank this process is."""
    made = build(RLJob, job)
    inputs = open_rl(made)
    with ExitStack() as closing:
        yield RLRun(made, inputs, Roles(made, inputs, "cpu"), closing)


def run_rank(job: Mapping[str, Any]) -> Ending:
    """Runs in this process as the rank it is; for `RankPool.run`."""
    with new_run(job) as run, stop_signals() as stop:
        ending = run.go(stop)
    if ending.stopped:
        # The run took a signal that was meant for the tests, as `timeout` sends it.
        pytest.exit("Tests were told to stop by a signal, in the middle of a run.", 143)
    return ending


def everyone(ranks: Any, function: Callable[..., T], job: RLJob, *args: Any) -> list[T]:
    """``function(job, *args)`` on as many ranks as the job takes."""
    world = job.placement.world(job.layout.world)
    if world == 1:
        return [function(dump(job), *args)]
    return list(ranks.run(world, function, dump(job), *args))


def told(job: RLJob, kind: str = "step") -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl``."""
    lines = (Path(job.output) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def tensors(job: RLJob, step: int) -> dict[str, torch.Tensor]:
    """All of a checkpoint, whole."""
    reader = FileSystemReader(Path(job.output) / "checkpoints" / f"step-{step:08d}")
    found = {name: torch.full(meta.size, torch.nan) for name, meta in
             reader.read_metadata().state_dict_metadata.items()}
    load(found, storage_reader=reader, no_dist=True)
    return found


def merged(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(table)
    for key, value in changes.items():
        old = out.get(key)
        if value is None:
            out.pop(key, None)
        elif isinstance(old, dict) and isinstance(value, dict) and key != "config":
            out[key] = merged(old, value)
        else:
            out[key] = value
    return out
