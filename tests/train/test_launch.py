"""The launcher with real processes: a rank that is killed, a run that is told to stop, and how an
end becomes one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from kilter.job import build, dump
from kilter.train import elastic, launch, loop
from kilter.train.config import TrainJob
from kilter.train.launch import Exit
from kilter.train.step import NotFinite
from tests.ranks import RankPool
from tests.train.tiny_run import folder, job_table, losses, make_job, metrics, run, write_job

__all__ = ["folder"]

TWO = {"layout": {"dp": 2, "zero": 1}, "steps": 30, "checkpoint": {"every": 4, "keep": 2}}


@contextmanager
def command(job: Path) -> Iterator[subprocess.Popen[str]]:
    """`kilter train` in a process of its own, which does not outlive the test."""
    process = subprocess.Popen([sys.executable, "-m", "kilter", "train", str(job)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def wait_for_step(job: TrainJob, step: int, process: subprocess.Popen[str]) -> None:
    """Until so many steps are taken."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if (Path(job.output) / "metrics.jsonl").exists() and any(
                line["step"] >= step for line in metrics(job)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.poll()}")


def pid_of_rank(launcher: int, rank: int) -> int:
    """Of the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


def test_a_killed_rank_is_made_good(folder: Path, ranks: RankPool) -> None:
    """kill -9 of a rank in the middle of its work: the group starts again from the last whole
    checkpoint and ends with the losses of a run that nobody touched."""
    job = make_job(folder, **TWO)
    whole = make_job(folder, **TWO, output=str(folder / "whole"))
    with command(write_job(folder, **TWO)) as process:
        wait_for_step(job, 7, process)
        os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
        out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert "A rank died; restart 1 of at most 3." in err
    assert "Going on from the checkpoint of step" in out
    assert out.splitlines()[-1].startswith("Finished 30 steps")
    run(ranks, whole)
    assert losses(job) == losses(whole)


def test_sigterm_to_the_launcher(folder: Path, ranks: RankPool) -> None:
    """The ranks finish their step, write a checkpoint and leave; the exit code is 0."""
    changes = {**TWO, "checkpoint": {"every": 0}, "steps": 400}
    job = make_job(folder, **changes)
    with command(write_job(folder, **changes)) as process:
        wait_for_step(job, 2, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    last = max(losses(job))
    assert out.splitlines()[-1] == (
        f"Stopped after step {last} of 400; the same command goes on from there.")
    shorter = make_job(folder, **{**changes, "steps": last + 2})
    run(ranks, shorter)
    assert sorted(losses(shorter)) == list(range(1, last + 3))


def test_one_rank_needs_no_processes(folder: Path) -> None:
    found = launch.run(make_job(folder, steps=1))
    assert found.code == 0 and found.text.startswith("Finished 1 steps over")


def test_what_is_not_finite_is_a_plain_no(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*args: object, **kwargs: object) -> None:
        raise NotFinite("The loss is nan.")

    monkeypatch.setattr(loop, "train_step", step)
    assert launch.run(make_job(folder)) == Exit(1, "The loss is nan.")


def test_a_rank_leaves_at_once_where_the_run_is_over(folder: Path) -> None:
    """So a mistake in the input does not cost as many restarts as there may be."""
    (folder / "job.json").write_text("never read")
    (folder / "ending.json").write_text("{}")
    assert elastic.main(launch.TRAIN, str(folder / "job.json")) == 0


def test_a_mistake_that_a_rank_finds_ends_the_run(folder: Path) -> None:
    """Here that there are fewer ranks than the layout has. The rank leaves in peace, so that the
    agent does not start it again, and the launcher finds the sentence."""
    (folder / "job.json").write_text(json.dumps(job_table(folder, layout={"dp": 2})))
    done = subprocess.run(
        [sys.executable, "-m", "kilter.train.launch", str(folder / "job.json")],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
             "MASTER_PORT": "0"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ending = json.loads((folder / "ending.json").read_text())
    assert ending["code"] == 2 and "there are 1: with the other degrees" in ending["text"]


def test_the_cause_is_told_and_not_who_noticed() -> None:
    def failure(rank: int, code: int, text: str) -> ProcessFailure:
        made = ProcessFailure(rank, 1, code, "")
        made.message = text
        return made

    noticed = failure(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:1")
    killed = failure(1, -9, "Signal 9 (SIGKILL) received by PID 1")
    wrong = failure(2, 1, "KeyError: 'x'\n at …")
    assert elastic._told({0: noticed, 1: killed}, 3) == (
        "The run stopped: rank 1 failed (Signal 9 (SIGKILL) received by PID 1), and 3 restarts did "
        "not help. The same command goes on from the last checkpoint.")
    assert "rank 2 failed (KeyError: 'x')," in elastic._told({0: noticed, 2: wrong}, 3)


def test_the_job_goes_to_the_ranks_as_it_is(folder: Path) -> None:
    job = make_job(folder, **TWO)
    assert build(TrainJob, json.loads(json.dumps(dump(job)))) == job
