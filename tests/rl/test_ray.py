"""Runs whose ranks are actors of Ray, on one cluster of this machine.

What is asynchronous is tested more closely in `test_async`, without Ray.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kilter.job import build
from kilter.rl import launch
from kilter.rl.config import RLJob
from kilter.rl.distributed import cluster as cluster_module
from kilter.rl.distributed import launch as launch_module
from kilter.rl.distributed.replica import Replica
from kilter.rl.rewards import Sample
from kilter.rl.tasks import TaskItem
from tests.ranks import RankPool
from tests.rl.tiny_job import Letters, job_table, run_rank, share

_MARKS = "KILTER_TEST_MARKS"  # a folder: who is first to make a file in it, dies
_CPUS = 0.25  # of a rank, so that all fit wherever tests run
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else Ray kills actors where other processes of the machine take its memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Its own patience with processes that start, and with those that do not answer, is that of a
    # machine that has nothing else to do.
    "RAY_gcs_server_port_wait_time_s": "600", "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600", "RAY_agent_register_timeout_ms": "600000",
    "RAY_health_check_timeout_ms": "600000"}


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("marks")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(_MARKS, str(folder))
        yield folder


@pytest.fixture(scope="module")
def cluster(marks: Path) -> Iterator[str]:
    """A cluster that this process is connected to; its address."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed (extra ray)")
    import ray

    with pytest.MonkeyPatch.context() as patched:
        for name, value in _SETTINGS.items():
            patched.setenv(name, value)
        context = ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False,
                           logging_level="ERROR")
        yield context.address_info["address"]
        ray.shutdown()


def die_once(name: str) -> None:
    """Kills this process as the machine does that runs out of memory."""
    try:
        Path(os.environ[_MARKS], name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def share_of_a_dying_replica(samples: Sequence[Sample]) -> list[float]:
    if any(int(sample.reference == "!") for sample in samples):
        die_once("replica")
    return share(samples)


def refuse(samples: Sequence[Sample]) -> list[float]:
    raise ValueError("This reward judges nothing.")


def slowly(rollout: Any, tokenizer: Any) -> None:
    """An environment that thinks after every answer."""
    time.sleep(0.05)


class MortalLetters(Letters):
    """Some prompts in, the rank that asks dies."""

    calls = 0

    def __getitem__(self, index: int) -> TaskItem:
        self.calls += 1
        if self.calls > 10:
            die_once("trainer")
        return super().__getitem__(index)


def table_of(folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return job_table(folder, **{"export": True, "log": {"samples": 99}, **changes})


def placed(rollout: int = 0, **more: Any) -> dict[str, Any]:
    return {"ray": True, "rollout": rollout, "cpus": _CPUS, **more}


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def same_run(a: Path, b: Path) -> None:
    """Rollouts, losses and weights, bit for bit."""
    assert lines(a, "rollouts.jsonl") == lines(b, "rollouts.jsonl")
    for x, y in zip(lines(a, "metrics.jsonl"), lines(b, "metrics.jsonl"), strict=True):
        for name in ("step", "loss", "grad_norm", "reward", "gate", "staleness"):
            assert x[name] == y[name]
    models = [folder / "run/model/model.safetensors" for folder in (a, b)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_ranks_as_actors_and_one_that_dies(cluster: str, marks: Path, ranks: RankPool,
                                           tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                           ) -> None:
    """Colocated, two data-parallel ranks; one is killed, and all go on from a checkpoint."""
    changes = {"layout": {"dp": 2, "zero": 3}, "checkpoint": {"every": 1, "asynchronous": False}}
    ranks.run(2, run_rank, table_of(tmp_path / "pool", **changes))
    ending = launch.run(build(RLJob, table_of(
        tmp_path / "ray", **changes, placement=placed(),
        task={"python": f"{__name__}:MortalLetters"})))
    assert ending.code == 0 and "Finished 4 steps" in ending.text
    assert (marks / "trainer").exists()
    said = capsys.readouterr()
    assert "A rank died; restart 1 of at most 3." in said.err
    assert "step 4/4" in said.out
    same_run(tmp_path / "pool", tmp_path / "ray")


def test_a_replica_of_its_own_and_its_death(cluster: str, marks: Path, ranks: RankPool,
                                            tmp_path: Path) -> None:
    """No staleness: the synchronous run's bits, though a replica of two ranks is killed."""
    ranks.run(1, run_rank, table_of(tmp_path / "pool"))
    ending = launch.run(build(RLJob, table_of(
        tmp_path / "ray", placement=placed(2), rollout={"tp": 2},
        rewards=[{"kind": f"{__name__}:share_of_a_dying_replica", "name": "share"}
                 ])))
    assert ending.code == 0
    assert (marks / "replica").exists()
    assert sum(line["rollouts"]["replaced"] for line in lines(tmp_path / "ray", "metrics.jsonl")
               ) == 1
    same_run(tmp_path / "pool", tmp_path / "ray")


class Counting:
    """As much of a rank as is asked how far it is."""

    def __init__(self) -> None:
        self.asked = 0

    def progress(self) -> int:
        self.asked += 1
        return self.asked


def test_progress_is_heard_of_without_waiting(cluster: str, tmp_path: Path) -> None:
    """An actor that does not answer, being stopped or dead, has said what it said last."""
    import ray

    actor = ray.remote(Counting).options(num_cpus=_CPUS).remote()
    replica = Replica([actor], build(RLJob, table_of(tmp_path)))
    heard = [replica.progress()]
    end = time.monotonic() + 600.0
    while heard[-1] != 3 and time.monotonic() < end:
        time.sleep(0.01)
        heard.append(replica.progress())
    assert list(dict.fromkeys(heard)) == [None, 1, 2, 3]
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):  # it lives on for a moment
        while time.monotonic() < end:
            ray.get(actor.progress.remote())
    assert {replica.progress() for _ in range(20)} <= {3, 4}


def test_asynchronous_stop_and_resume(cluster: str, tmp_path: Path) -> None:
    """Through the command: rollouts beside training, SIGTERM, and on from the checkpoint."""
    table = table_of(tmp_path, steps=500, placement=placed(2, max_staleness=1), rollout={
        "environment": f"{__name__}:slowly"})
    file = tmp_path / "job.toml"
    file.write_text(toml(table))
    environment = {**os.environ, "RAY_ADDRESS": cluster, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kilter", "rl", str(file)]
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/500"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    stopped = int(out.split("Stopped after step ")[1].split(" ")[0])
    assert 2 <= stopped < 500
    steps = stopped + 4
    found = subprocess.run([*command, f"steps={steps}"], env=environment, text=True,
                           capture_output=True, timeout=600)
    assert found.returncode == 0, found.stderr
    assert f"Going on from the checkpoint of step {stopped}." in found.stdout
    told = [line for line in lines(tmp_path, "metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in told] == list(range(1, steps + 1))
    ids = [line["id"] for line in lines(tmp_path, "rollouts.jsonl")]
    assert sorted(ids) == sorted(f"p{p}/{i}" for p in range(steps * 4) for i in range(4))
    assert all(line["staleness"]["max"] <= 1 for line in told)
    assert all(line["gate"]["max"] == 0.0 for line in told)
    assert sum(line["gate"]["skipped"] for line in told) > 0
    assert sum(line["rollouts"]["overlap"] for line in told) > 0.0


def test_the_last_lines_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Those, too, that come in the moment in which the work ends: of what is there, `ray.wait`
    gives the first."""
    answers = iter([["step 4/4"], ["Finished"]])
    attempt = object.__new__(launch_module._Attempt)
    attempt._ray = SimpleNamespace(
        wait=lambda references, timeout: (references[:1], references[1:]),
        get=lambda reference, timeout=None: reference,
        exceptions=SimpleNamespace(RayError=RuntimeError))
    attempt._ranks = [SimpleNamespace(said=SimpleNamespace(remote=lambda wait: next(answers)))]
    attempt._work, attempt._ended, attempt._failed = {"work": 0}, {}, {}
    attempt._wait(threading.Event())
    assert capsys.readouterr().out == "step 4/4\nFinished\n"
    assert attempt._ended == {0: "work"}


def test_an_error_in_an_actor_is_the_commands(cluster: str, tmp_path: Path) -> None:
    job = build(RLJob, table_of(tmp_path, placement=placed(1),
                                rewards=[{"kind": f"{__name__}:refuse"}]))
    with pytest.raises(ValueError, match="This reward judges nothing"):
        launch.run(job)


def test_more_than_the_cluster_has(cluster: str, tmp_path: Path) -> None:
    job = build(RLJob, table_of(tmp_path, placement=placed(2, max_staleness=1) | {"cpus": 64.0}))
    with pytest.raises(ValueError, match="has 3 ranks and so needs 192 CPUs, but the cluster has "
                                         "2"):
        launch.run(job)
    job = build(RLJob, table_of(tmp_path, placement=placed(), launch={"device": "cuda"}))
    with pytest.raises(ValueError, match="1 GPUs, but the cluster has 0"):
        launch.run(job)


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray is not installed; pip install 'kilter\[ray\]'"):
        cluster_module.load_ray()


@pytest.mark.parametrize(("address", "problem"), [
    ("127.0.0.1:1", "no cluster answers there"), ("ray://127.0.0.1:1", "on a machine of the"),
    ("127.0.0.1:x", "no cluster answers there")])
def test_addresses_without_a_cluster(monkeypatch: pytest.MonkeyPatch, address: str, problem: str
                                     ) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed (extra ray)")
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=problem), cluster_module.connected():
        pass


def toml(table: dict[str, Any]) -> str:
    """A job file with inline tables."""
    def value(x: Any) -> str:
        if isinstance(x, dict):
            return "{" + ", ".join(f"{k} = {value(v)}" for k, v in x.items()) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(value, x)) + "]"
        return json.dumps(x)

    return "".join(f"{name} = {value(x)}\n" for name, x in table.items())
