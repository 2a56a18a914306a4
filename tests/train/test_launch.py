"""The launcher with real processes: a rank that is killed, a run that is told to stop, and how an
end becomes one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from kilter.job import build, dump
from kilter.train import elastic, launch, loop
from kilter.train.config import TrainJob
from kilter.train.launch import Exit
from kilter.train.step import NotFinite
from tests.ranks import RankPool
from tests.train.tiny_run import folder, job_table, losses, make_job, run, write_job

__all__ = ["folder"]

TWO = {"layout": {"dp": 2, "zero": 1}, "steps": 30, "checkpoint": {"every": 4, "keep": 2}}
# More steps than are taken before such a run is told to stop, however late that is.
ENDLESS = {**TWO, "checkpoint": {"every": 0}, "steps": 1_000_000}
HANGS = 3600  # seconds after which something does; a busy machine may take minutes to start a rank


@contextmanager
def command(job: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`kilter train` in a process of its own, which does not outlive the test."""
    process = subprocess.Popen([sys.executable, "-m", "kilter", "train", str(job)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=HANGS)


def in_ranks(folder: Path, code: str) -> dict[str, str]:
    """The environment in which every rank that is started runs this first; ``loop`` is
    `kilter.train.loop`."""
    (folder / "sitecustomize.py").write_text(
        "import sys\nif 'kilter.train.launch' in sys.orig_argv:\n"
        + textwrap.indent("from kilter.train import loop\n" + textwrap.dedent(code), "    "))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def wait_for_step(job: TrainJob, step: int, process: subprocess.Popen[str]) -> None:
    """Until so many steps are taken."""
    path, end = Path(job.output) / "metrics.jsonl", time.monotonic() + HANGS
    while time.monotonic() < end and process.poll() is None:
        # Of the last line there may be a part.
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        if any(json.loads(line)["step"] >= step for line in lines):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.poll()}")


def pid_of_rank(launcher: int, rank: int) -> int:
    """Of the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        with suppress(OSError):  # it ended meanwhile
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


def test_a_killed_rank_is_made_good(folder: Path, ranks: RankPool) -> None:
    """kill -9 of a rank in the middle of its work: the group starts again from the last whole
    checkpoint and ends with the losses of a run that nobody touched."""
    job = make_job(folder, **TWO)
    whole = make_job(folder, **TWO, output=str(folder / "whole"))
    environment = in_ranks(folder, f"""
        import os, pathlib, signal, time
        step_of, taken, folder = loop.train_step, [], pathlib.Path({str(folder)!r})
        def stepped(*args, **kwargs):
            taken.append(1)
            if len(taken) == 7 and os.environ["RANK"] == "1" and not (folder / "killed").exists():
                (folder / "killed").touch()
                while not (folder / "run/checkpoints/step-00000004").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return step_of(*args, **kwargs)
        loop.train_step = stepped
    """)
    with command(write_job(folder, **TWO), **environment) as process:
        out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert "A rank died; restart 1 of at most 3." in err
    assert "Going on from the checkpoint of step 4." in out
    assert out.splitlines()[-1].startswith("Finished 30 steps")
    run(ranks, whole)
    assert losses(job) == losses(whole)


def test_sigterm_to_the_launcher(folder: Path, ranks: RankPool) -> None:
    """The ranks finish their step, write a checkpoint and leave; the exit code is 0."""
    job = make_job(folder, **ENDLESS)
    with command(write_job(folder, **ENDLESS)) as process:
        wait_for_step(job, 2, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    last = max(losses(job))
    assert out.splitlines()[-1] == (
        f"Stopped after step {last} of 1000000; the same command goes on from there.")
    shorter = make_job(folder, **{**ENDLESS, "steps": last + 2})
    run(ranks, shorter)
    assert sorted(losses(shorter)) == list(range(1, last + 3))


def test_an_agent_that_does_not_see_the_end_is_interrupted(folder: Path) -> None:
    """As where the signal's exception left `Popen.poll` without giving its lock back."""
    changes = {**ENDLESS, "launch": {"grace": 100_000}}
    job = make_job(folder, **changes)
    (folder / "sitecustomize.py").write_text(textwrap.dedent(f"""
        import pathlib, subprocess
        poll, stuck = subprocess.Popen._internal_poll, pathlib.Path({str(folder / "stuck")!r})
        def polled(self, *args, **kwargs):
            if stuck.exists():
                self._waitpid_lock.acquire(False)
            return poll(self, *args, **kwargs)
        subprocess.Popen._internal_poll = polled
    """))
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    with command(write_job(folder, **changes), **environment) as process:
        wait_for_step(job, 2, process)
        (folder / "stuck").touch()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert out.splitlines()[-1].startswith("Stopped after step")


def test_a_killed_launcher_leaves_nobody_behind(folder: Path) -> None:
    """Ranks that nobody watches any more write a checkpoint and leave."""
    job = make_job(folder, **ENDLESS)
    with command(write_job(folder, **ENDLESS)) as process:
        wait_for_step(job, 2, process)
        orphans = [pid_of_rank(process.pid, rank) for rank in (0, 1)]
        process.kill()
        try:
            end = time.monotonic() + HANGS
            while any(map(is_running, orphans)) and time.monotonic() < end:
                time.sleep(0.05)
            assert not any(map(is_running, orphans))
        finally:
            for pid in filter(is_running, orphans):
                os.kill(pid, signal.SIGKILL)
    assert loop.last_checkpoint(job) == (
        folder / "run" / "checkpoints" / f"step-{max(losses(job)):08d}")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ignored_signals_stay_ignored() -> None:
    """`nohup kilter train` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in elastic._heard() and signal.SIGTERM in elastic._heard()
        with loop.stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in elastic._heard()
        with loop.stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.wait(5)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_goes_away_stops_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    """With a checkpoint: `kilter train job.toml | head` loses nothing."""
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, suppress(BrokenPipeError), open(write, "w") as stdout:
        patch.setattr(sys, "stdout", stdout)
        found = launch.run(make_job(folder, steps=50))
    assert found == Exit(0, "Stopped after step 0 of 50; the same command goes on from there.")
    assert loop.last_checkpoint(make_job(folder, steps=50)) is not None


def test_one_rank_needs_no_processes(folder: Path) -> None:
    found = launch.run(make_job(folder, steps=1))
    assert found.code == 0 and found.text.startswith("Finished 1 steps over")


def test_what_is_not_finite_is_a_plain_no(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*args: object, **kwargs: object) -> None:
        raise NotFinite("The loss is nan.")

    monkeypatch.setattr(loop, "train_step", step)
    found = launch.run(make_job(folder))
    assert found.code == 1 and found.text.startswith("Step 1 failed. The loss is nan. A lower opt")


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
             "MASTER_PORT": "0"}, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    ending = json.loads((folder / "ending.json").read_text())
    assert ending["code"] == 2 and "there are 1: with the other degrees" in ending["text"]


def test_the_cause_is_told_and_not_who_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    def failure(rank: int, code: int, error: Exception | None = None) -> ProcessFailure:
        """As the agent finds it."""
        file = tmp_path / f"{rank}.json"
        if error is not None:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            get_error_handler().record_exception(error)
        return ProcessFailure(rank, 1, code, str(file))

    lost = failure(0, 1, RuntimeError("[x] Connection closed by peer [127.0.0.1]:1"))
    killed, ended, silent = failure(1, -9), failure(3, -15), failure(4, 7)
    wrong = failure(2, 1, KeyError("x"))
    assert elastic._told({0: lost, 1: killed}, 3) == (
        "The run stopped: rank 1 was ended by SIGKILL (as happens where memory runs out). It had "
        "been started again as often as launch.max_restarts says, 3 times. The same command goes "
        "on from the last checkpoint, if there is one.")
    assert "rank 2 failed: KeyError: 'x'. It was not" in elastic._told({0: lost, 2: wrong}, 0)
    assert "rank 1 was ended by SIGKILL" in elastic._told({3: ended, 1: killed}, 1)
    assert "rank 0 failed: RuntimeError: [x] Conn" in elastic._told({0: lost, 3: ended}, 1)
    assert "rank 4 failed: exit code 7. It had" in elastic._told({3: ended, 4: silent}, 1)


def test_a_mistake_of_ours_in_a_rank_is_told(folder: Path) -> None:
    """As a sentence, when starting again did not help."""
    environment = in_ranks(folder, "loop.train = lambda *_: {}['gone']\n")
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "train", str(write_job(folder, **TWO)),
         "launch.max_restarts=0"], capture_output=True, text=True, timeout=HANGS,
        env={**os.environ, **environment})
    assert done.returncode == 1
    assert done.stderr.startswith("kilter: error: The run stopped: rank ")
    assert "failed: KeyError: 'gone'. It was not started again" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_job_goes_to_the_ranks_as_it_is(folder: Path) -> None:
    job = make_job(folder, **TWO)
    assert build(TrainJob, json.loads(json.dumps(dump(job)))) == job
