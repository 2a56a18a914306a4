"""Whole runs whose data has awkward ends: epochs that do not fill their last step, and
conversations of which some pieces, micro-batches or steps would have nothing to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kilter.train.checkpoint import CheckpointError
from tests.ranks import RankPool
from tests.train.data.tiny import write_jsonl, write_texts
from tests.train.tiny_run import folder, losses, make_job, metrics, run, tensors

__all__ = ["folder"]


def test_epochs_without_a_sequence_are_said(folder: Path) -> None:
    """Two sources of one text each: half of each is taken every second epoch."""
    paths = [write_jsonl(folder / f"{name}.jsonl", [{"text": name * 9}]) for name in "ab"]
    data = {"sources": [{"paths": [str(path)], "weight": 0.5} for path in paths],
            "eval_fraction": 0.0}
    with pytest.raises(ValueError, match="There is nothing to learn: epochs is 1"):
        run(None, make_job(folder, steps=None, epochs=1, data=data))
    assert run(None, make_job(folder, steps=None, epochs=2, data=data)).step >= 1


def chats(folder: Path) -> dict[str, Any]:
    """Questions longer than two packs, so that most pieces are of questions alone."""
    path = write_jsonl(folder / "chats.jsonl", [{"messages": [
        {"role": "user", "content": "?" * 110 + str(i)},
        {"role": "assistant", "content": "abc" * (1 + i % 3)}]} for i in range(6)])
    return {"sources": [{"paths": [str(path)], "chat": True}], "eval_fraction": 0}


def test_every_step_of_long_conversations_has_something_to_learn(folder: Path) -> None:
    job = make_job(folder, kind="sft", steps=None, epochs=1, micro_batches=1, data=chats(folder))
    run(None, job)
    targets = [line["targets"] for line in metrics(job)]
    assert all(count > 0 for count in targets)
    assert sum(targets) == sum(3 * (1 + i % 3) + 1 for i in range(6))


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "zero": 3}], ids=["ddp", "fsdp"])
def test_a_last_step_that_is_not_full_is_the_same_on_ranks(
    folder: Path, ranks: RankPool, layout: dict[str, Any]
) -> None:
    """Of its four micro-batches the last step has one, so one rank has nothing but blank ones; the
    result is that of one rank."""
    path = write_texts(folder / "five.jsonl", [f"{i} " + "ab" * 20 for i in range(5)])
    changes = {"steps": None, "epochs": 1, "data": {"sources": [{"paths": [str(path)]}],
                                                    "eval_fraction": 0}}
    alone = make_job(folder, output=str(folder / "alone"), **changes)
    job = make_job(folder, layout=layout, **changes)
    for each in (alone, job):
        assert run(ranks, each).step == 2
    assert losses(job) == pytest.approx(losses(alone), rel=1e-5)
    assert metrics(job)[-1]["tokens"] == metrics(alone)[-1]["tokens"] == 5 * 43
    assert metrics(alone)[-1]["targets"] == 42
    one, other = tensors(alone, 2), tensors(job, 2)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-5)


def test_more_epochs_go_on_and_fewer_are_refused(folder: Path) -> None:
    path = write_texts(folder / "five.jsonl", [f"{i} " + "ab" * 20 for i in range(5)])
    data = {"sources": [{"paths": [str(path)]}], "eval_fraction": 0}

    def job(epochs: int) -> Any:
        return make_job(folder, steps=None, epochs=epochs, data=data,
                        schedule={"name": "constant"})

    assert run(None, job(1)).step == 2
    assert run(None, job(1)).step == 2
    assert run(None, job(3)).step == 5  # ten packs more, in steps of four
    assert [line["tokens"] for line in metrics(job(3))][-1] == 3 * 5 * 43
    with pytest.raises(CheckpointError, match="is past the 2 epochs of this job"):
        run(None, job(2))
