"""The processes of a tensor-parallel engine start, answer, fail and end as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist

import kilter
from kilter.ops.cpu import library
from kilter.serve import async_engine, tensor, tensor_launch, tensor_processes
from kilter.serve.async_engine import AsyncEngine, EngineStopped
from kilter.serve.engine import Engine
from kilter.serve.executor import RanksLost
from kilter.serve.load import load_engine
from kilter.serve.params import SamplingParams
from kilter.serve.tensor_launch import TensorOptions, start_tensor_engine
from kilter.weights.bridge import open_model
from tests.serve.server.conftest import StartServer
from tests.serve.server.conftest import start_server as start_server
from tests.serve.server.test_lifecycle import Process
from tests.serve.test_tensor import CONTEXT, GREEDY, Setting, export, few_tokens, one_rank

OPTIONS = TensorOptions(2, "auto", "cpu", True, "float32", "fp32", CONTEXT, 1)
LONG = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("processes") / "model", 0)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """An engine sets them; put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    library.set_num_threads(before)
    assert not dist.is_initialized()


def others_of(engine: Engine) -> list[subprocess.Popen[bytes]]:
    return engine.executor.others.processes  # type: ignore[attr-defined, no-any-return]


def start(folder: Path, **options: float) -> Engine:
    return start_tensor_engine(open_model(folder), OPTIONS, Setting(2).config, **options)


def addresses(pid: int) -> set[str]:
    """Where a process listens, as /proc writes it."""
    sockets, found = set(), set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            sockets.add(os.readlink(fd))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def test_processes_start_answer_and_end(folder: Path, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder they start in holds what they would import; nobody from outside can
    reach them."""
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    before = addresses(os.getpid())
    expected = few_tokens(one_rank(folder, Setting(2)), "abcdef")
    engine = load_engine(folder, tensor_parallel=2, threads=1, context=CONTEXT, kv_tokens=640)
    others = others_of(engine)
    try:
        assert few_tokens(engine, "abcdef") == expected
        assert (addresses(os.getpid()) - before) | addresses(others[0].pid) == {"0100007F"}
        with pytest.raises(ValueError, match="in one already"):
            load_engine(folder, tensor_parallel=2)
    finally:
        engine.close()
        engine.close()
    assert [process.returncode for process in others] == [0]


def test_a_rank_that_dies_idle_is_told_by_what_comes_next(folder: Path) -> None:
    with kilter.LLM(folder, tp=2, threads=1, context=CONTEXT) as llm:
        one = kilter.LLM(folder, context=CONTEXT)
        assert llm.generate(["abc", "abd"], GREEDY) == one.generate(["abc", "abd"], GREEDY)
        beams = kilter.BeamParams(width=3, max_tokens=4)
        assert llm.beam_search("abc", beams) == one.beam_search("abc", beams)
        with pytest.raises(ValueError, match="from a folder or GGUF file only"):
            llm.update_weights({"norm.weight": torch.ones(64)})
        (other,) = others_of(llm.engine)
        other.kill()
        other.wait()
        for prompt in ("abc", "abd"):  # the second has a prefix, whose last page is copied
            with pytest.raises(RanksLost, match="rank 1 was ended by SIGKILL"):
                llm.generate(prompt, GREEDY)


def test_a_wait_that_nothing_ends_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    """As gloo's can be for a rank that was killed in the middle of a message. Who asked hears why,
    and so does who asks again; another model of this process goes on, and a new start is one."""
    one = kilter.LLM(folder, context=CONTEXT)
    expected = one.generate("abc", GREEDY)
    ever = threading.Event()
    with kilter.LLM(folder, tp=2, threads=1, context=CONTEXT) as llm:
        (other,) = others_of(llm.engine)

        def gathered(*args: Any) -> None:
            other.kill()
            ever.wait()

        with monkeypatch.context() as patch:
            patch.setattr(tensor, "_gathered", gathered)
            for _ in range(2):
                with pytest.raises(RanksLost, match="rank 1 was ended by SIGKILL"):
                    llm.generate("abc", GREEDY)
    assert one.generate("abc", GREEDY)[0].completions == expected[0].completions
    with kilter.LLM(folder, tp=2, threads=1, context=CONTEXT) as llm:
        assert llm.generate("abc", GREEDY) == expected
    ever.set()


def test_an_interrupt_leaves_the_ranks_in_step(folder: Path, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    """The step that it comes in is done to its end."""
    with kilter.LLM(folder, tp=2, threads=1, context=CONTEXT) as llm:
        expected = llm.generate("abc", GREEDY)[0].completions
        jobs = llm.engine.executor.thread._jobs  # type: ignore[attr-defined]
        gathered = tensor._gathered

        def interrupt(*args: Any) -> torch.Tensor | None:
            patch.undo()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while jobs.empty():  # until the one who was interrupted waits for the end of this
                time.sleep(0.01)
            return gathered(*args)

        with monkeypatch.context() as patch:
            patch.setattr(tensor, "_gathered", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("abd", GREEDY)
        assert llm.generate("abc", GREEDY)[0].completions == expected


def test_a_rank_that_fails_says_why(folder: Path) -> None:
    """Here in reading new weights, which are gone when it comes to them; the engine ends, and who
    waits for an answer hears why."""
    engine = start(folder)
    gone = dataclasses.replace(open_model(folder), path=folder / "gone")
    said: list[str] = []

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            serving.on_loss = said.append
            answer = asyncio.create_task(anext(serving.stream([3, 4, 5], LONG, coalesce=True)))
            await serving.call(lambda engine: engine.update_weights(gone))
            with pytest.raises(EngineStopped, match=r"rank 1 failed: .*gone"):
                await answer
            with pytest.raises(EngineStopped):
                await serving.call(lambda engine: None)

    asyncio.run(run())
    engine.close()
    assert len(said) == 1 and re.match(r"Tensor-parallel rank 1 failed: .*gone.*\.", said[0])


def test_a_rank_that_cannot_start_says_why(folder: Path) -> None:
    gone = dataclasses.replace(open_model(folder), path=folder / "gone")
    with pytest.raises(RanksLost, match=r"Tensor-parallel rank 1 failed: .*gone"):
        start_tensor_engine(gone, OPTIONS, Setting(2).config)


def test_a_rank_that_dies_while_they_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one would wait for it until its timeout. The next start finds nothing of it."""
    met: list[tensor_launch.Processes] = []

    def met_by_one(processes: tensor_launch.Processes, word: str) -> None:
        wait_for(processes, word)
        met.append(processes)

    def join(*args: Any) -> tensor_launch.Ranks:
        met[0].processes[0].kill()
        return tensor.join(*args)

    wait_for = tensor_launch.Processes.wait_for
    with monkeypatch.context() as patch:
        patch.setattr(tensor_launch.Processes, "wait_for", met_by_one)
        patch.setattr(tensor_launch, "join", join)
        patch.setattr(tensor_launch, "STEP_TIMEOUT", 5.0)
        with pytest.raises(RanksLost, match="rank 1 was ended by SIGKILL"):
            start(folder, step_timeout=5.0)
    start(folder).close()


def test_a_rank_that_hangs_ends_the_server(folder: Path, start_server: StartServer) -> None:
    """First /health says it, then who waits."""
    engine = start(folder, step_timeout=2.0)
    (other,) = others_of(engine)
    server = start_server(engine, stall_timeout=0.2)
    url = server.base_url + "/v1/completions"
    body = {"prompt": "abc", "max_tokens": 3}
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    sizes = re.findall(r'kilter_resident_bytes{rank="(\d)"} (\S+)',
                       httpx.get(server.base_url + "/metrics").text)
    assert [rank for rank, _ in sizes] == ["0", "1"] and min(float(s) for _, s in sizes) > 1e7
    with ThreadPoolExecutor(1) as pool:
        other.send_signal(signal.SIGSTOP)
        asked = pool.submit(httpx.post, url, json=body, timeout=60)
        while (health := httpx.get(server.base_url + "/health")).status_code == 200:
            time.sleep(0.02)
        assert health.json()["error"]["code"] == "stalled"
        answer = asked.result()
    assert answer.status_code == 503
    sentence = ("A step over the tensor-parallel ranks has not ended in 2 seconds, so they were "
                "given up. Rank 1 is stopped.")
    assert answer.json()["error"]["message"] == sentence == server.server.failed
    server.thread.join(60)
    assert not server.thread.is_alive() and other.returncode == -signal.SIGKILL
    engine.close()


def test_stopping_and_closing_do_not_wait_for_a_rank_that_hangs(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_PATIENCE", 0.2)
    engine = start(folder)
    (other,) = others_of(engine)
    other.send_signal(signal.SIGSTOP)

    async def run() -> None:
        serving = AsyncEngine(engine)
        serving.start()
        answer = asyncio.create_task(anext(serving.stream([3, 4, 5], LONG)))
        while serving.stalled_seconds == 0:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(serving.stop)
        with pytest.raises(EngineStopped):
            await answer

    asyncio.run(run())
    engine.close()
    engine = start(folder)
    (other,) = others_of(engine)
    other.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(tensor_processes, "FAREWELL", 0.2)
    engine.close()
    assert other.returncode == -signal.SIGKILL


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
    started.communicate()
    gone(pid)


def test_the_server_ends_with_a_rank_and_its_ranks_with_it(folder: Path) -> None:
    """One that is killed under load: who waits hears it, and the exit code is 1. On SIGTERM what
    runs is answered first."""
    body = {"prompt": "abc", "max_tokens": 80, "ignore_eos": True, "temperature": 0}
    for how in ("killed", "told"):
        server = Process(folder, "--tp", "3", "--context", str(CONTEXT), "--admin")
        ranks = children(server.process.pid)
        assert len(ranks) == 2
        url = server.url + "/v1/completions"
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, url, json=body, timeout=60)
            while not httpx.get(server.url + "/health").json()["steps"]:
                pass
            if how == "killed":
                os.kill(ranks[1], signal.SIGKILL)
            else:
                server.process.terminate()
            answer = asked.result()
        code, err = server.end()
        for pid in ranks:
            gone(pid)
        if how == "told":
            assert (answer.status_code, code, err) == (200, 0, "")
            continue
        assert (answer.status_code, code) == (503, 1)
        assert "rank 2 was ended by SIGKILL" in answer.json()["error"]["message"]
        assert answer.json()["error"]["message"] in err and err.count("\n") == 1


def children(pid: int) -> list[int]:
    """The processes that a process has started, the oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return sorted(found)


def gone(pid: int) -> None:
    """Waits for a process that is not ours to end."""
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
    with pytest.raises(ValueError, match="over 0 processes"):
        load_engine(folder, tensor_parallel=0)
    with pytest.raises(ValueError, match="'cuda:1', but 2 tensor-parallel ranks take one each"):
        load_engine(folder, tensor_parallel=2, device="cuda:1")
