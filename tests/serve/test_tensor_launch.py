"""The processes of a tensor-parallel engine start, answer and end as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kilter.ops.cpu import library
from kilter.serve.load import load_engine
from kilter.serve.tensor_launch import TensorOptions, start_tensor_engine
from kilter.weights.bridge import open_model
from tests.serve.test_tensor import CONTEXT, GREEDY, Setting, drain, export, few_tokens, one_rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("processes") / "model", 0)


@pytest.fixture
def threads() -> Iterator[None]:
    """An engine sets them; put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    library.set_num_threads(before)


def test_processes_start_answer_and_end(folder: Path, threads: None) -> None:
    setting = Setting(2)
    expected = few_tokens(one_rank(folder, setting), "abcdef")
    engine = load_engine(folder, tensor_parallel=2, threads=1, context=CONTEXT,
                         kv_tokens=640)
    others = engine.executor.others.processes  # type: ignore[attr-defined]
    try:
        assert few_tokens(engine, "abcdef") == expected
        with pytest.raises(ValueError, match="in one already"):
            load_engine(folder, tensor_parallel=2)
    finally:
        engine.close()
        engine.close()
    assert [process.returncode for process in others] == [0]
    assert not dist.is_initialized()


def test_a_rank_that_dies_is_noticed(folder: Path, threads: None) -> None:
    said: list[str] = []
    lost = threading.Event()
    engine = start_tensor_engine(
        open_model(folder), TensorOptions(2, "auto", "cpu", True, "float32", CONTEXT, 1),
        Setting(2).config, lost=lambda sentence: (said.append(sentence), lost.set())[1])
    (other,) = engine.executor.others.processes  # type: ignore[attr-defined]
    try:
        other.kill()
        assert lost.wait(60)
        engine.submit([3, 4, 5], GREEDY)
        with pytest.raises(RuntimeError):
            drain(engine)
    finally:
        engine.close()
    assert said == ["Tensor-parallel rank 1 has ended with exit code -9; the engine cannot go on "
                    "without it."]


_STARTS = """
import sys, time
from kilter.serve.load import load_engine
engine = load_engine(__import__("pathlib").Path(sys.argv[1]), tensor_parallel=2, threads=1)
print(engine.executor.others.processes[0].pid, flush=True)
time.sleep(600)
"""


def test_ranks_end_with_the_process_that_started_them(folder: Path) -> None:
    started = subprocess.Popen([sys.executable, "-c", _STARTS, str(folder)],
                               stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    started.kill()
    started.wait()
    deadline = time.monotonic() + 60
    try:
        while _alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_degree_that_cannot_be(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"over 9 tensor-parallel ranks.*Degrees that work: 1, 2, "
                                         r"3, 4, 5, 6, 7, 8"):
        load_engine(folder, tensor_parallel=9)
