"""A small job and a rank that trains it, for the tests of this folder.

The model has 2 layers and learns bytes of made-up words; a run of ten steps takes a second.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kilter.job import build, dump
from kilter.mesh.mesh import Mesh
from kilter.train.config import TrainJob
from kilter.train.inputs import open_inputs
from kilter.train.loop import Ending, Run, train
from tests.train.data.tiny import chat_tokenizer, write_jsonl

MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}


def write_inputs(folder: Path) -> None:
    """A tokenizer and 200 short texts."""
    chat_tokenizer().save(folder / "tokenizer")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(30)]
    write_jsonl(folder / "texts.jsonl", [
        {"text": f"{i} " + " ".join(draw.choices(words, k=draw.randint(2, 12)))}
        for i in range(200)])


def job_table(folder: Path, **changes: Any) -> dict[str, Any]:
    """The job as a nested dict; ``changes`` are of its tables, merged."""
    table: dict[str, Any] = {
        "output": str(folder / "run"), "steps": 10, "micro_batches": 4, "seed": 3,
        "model": {"config": dict(MODEL), "tokenizer": str(folder / "tokenizer"), "std": 0.1},
        "data": {"sources": [{"paths": [str(folder / "texts.jsonl")]}], "seq_len": 50,
                 "lookahead": 8, "eval_fraction": 0.1},
        "optimizer": {"lr": 3e-3, "eps": 1e-6}, "schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 0, "keep": 0}, "log": {"every": 1, "peak_flops": 1e9},
        "launch": {"device": "cpu", "threads": 1}, "export": False}
    return _merged(table, changes)


def make_job(folder: Path, **changes: Any) -> TrainJob:
    return build(TrainJob, job_table(folder, **changes))


def run_rank(job: Mapping[str, Any], *, told_to_stop: bool = False) -> Ending:
    """Trains in this process as the rank it is; for `RankPool.run`.

    Args:
        told_to_stop: the test does that.
    """
    made = build(TrainJob, job)
    ending = train(made, open_inputs(made),
                   Mesh(made.layout, "cpu", alone=not dist.is_initialized()))
    if ending.stopped and not told_to_stop:
        # The run took a signal that was meant for the tests, as `timeout` sends it. What it left
        # is no result of theirs, and they are to end.
        pytest.exit("Tests were told to stop by a signal, in the middle of a run.", 143)
    return ending


def write_job(folder: Path, **changes: Any) -> Path:
    """The job as a file."""
    path = folder / "job.toml"
    path.write_text("".join(f"{key} = {_toml(value)}\n"
                            for key, value in job_table(folder, **changes).items()))
    return path


@contextmanager
def new_run(job: TrainJob) -> Iterator[Run]:
    """A run that was made and restored, and has not stepped yet."""
    mesh = Mesh(job.layout, "cpu", alone=not dist.is_initialized())
    with ExitStack() as closing:
        yield Run(job, open_inputs(job), mesh, closing)


def run(ranks: Any, job: TrainJob) -> Ending:
    """Trains on as many ranks as the layout has."""
    if job.layout.world == 1:
        return run_rank(dump(job))
    return ranks.run(job.layout.world, run_rank, dump(job))[0]


def metrics(job: TrainJob, kind: str = "train") -> list[dict[str, Any]]:
    lines = (Path(job.output) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def losses(job: TrainJob) -> dict[int, float]:
    """By step. A step that is told of twice fails the test."""
    found = [(line["step"], line["loss"]) for line in metrics(job)]
    assert len(dict(found)) == len(found)
    return dict(found)


def tensors(job: TrainJob, step: int) -> dict[str, torch.Tensor]:
    """All of a checkpoint, whole."""
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(Path(job.output) / "checkpoints" / f"step-{step:08d}")
    found = {name: torch.full(meta.size, torch.nan) for name, meta in
             reader.read_metadata().state_dict_metadata.items()}
    load(found, storage_reader=reader, no_dist=True)
    return found


def _merged(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(table)
    for key, value in changes.items():
        old = out.get(key)
        if value is None:
            out.pop(key, None)
        else:
            out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(
                value, dict) and key != "config" else value
    return out


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(v)}' for key, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has the inputs of `make_job`."""
    write_inputs(tmp_path)
    return tmp_path
