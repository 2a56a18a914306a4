"""A pool of gloo ranks that lives as long as the test session.

Starting a process that knows torch takes seconds, a process group milliseconds. So processes are
forked once from a server that has imported everything, and every `run` only makes a new default
group among them:

    def double_sum(x: float) -> float:           # at module level: it is sent by name
        t = torch.tensor(x)
        dist.all_reduce(t)
        return 2 * t.item()

    def test_it(ranks: RankPool) -> None:
        assert ranks.run(4, double_sum, 1.0) == [8.0] * 4
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

MAX_RANKS = 8
_GRACE = 30.0  # seconds that ranks get to notice that another one failed, on a busy machine
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed._functional_collectives",
            "torch.distributed.fsdp", "torch.nn.parallel", "kilter.models.decoder"]


class RankError(Exception):
    """One or more ranks failed. ``failures`` is [(rank, text)], the first cause first."""

    def __init__(self, failures: list[tuple[int, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures))
        self.failures = failures
        self.rank, self.traceback = failures[0]


class RankPool:
    """Processes that functions can be run in as the ranks of a gloo world."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0,
            **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` in each of n ranks, one thread each, random seed 0, with a
        default process group that is destroyed afterwards.

        Args:
            n: ranks, from 1 to 8.
            function: of a module's top level. It and what it takes and returns are pickled.
            timeout: seconds, for the whole run and for each collective in it.

        Returns:
            What the function returned, by rank.

        Raises:
            RankError: if it raised, died or did not finish in some rank.
            ValueError: if n is no such number or the function cannot be named.
        """
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"{n} ranks were asked for; the pool has from 1 to {MAX_RANKS}.")
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not at a module's top level, so another "
                             "process cannot find it.")
        self._calls += 1
        store = str(self._folder / f"store-{self._calls}")
        call = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
        self._grow(n)
        workers = self._workers[:n]
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps((rank, n, store, timeout, call)))
        answers = self._collect(workers, time.monotonic() + timeout, timeout)
        failures = sorted((moment, rank, text) for rank, (ok, moment, text) in answers.items()
                          if not ok)
        if failures:
            raise RankError([(rank, text) for _, rank, text in failures])
        return [pickle.loads(answers[rank][2]) for rank in range(n)]

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()  # an idle worker then reads the end of the pipe and leaves
        for worker in self._workers:
            worker.process.join(1.0)
            worker.kill()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, n: int) -> None:
        self._workers = [w for w in self._workers if w.process.is_alive()]
        if len(self._workers) < n:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOAD)
            threads = os.environ.get("OMP_NUM_THREADS")
            os.environ["OMP_NUM_THREADS"] = "1"  # for the server and all it forks
            try:
                forkserver.ensure_running()
            finally:
                if threads is None:
                    del os.environ["OMP_NUM_THREADS"]
                else:
                    os.environ["OMP_NUM_THREADS"] = threads
        while len(self._workers) < n:
            self._workers.append(_Worker(self._folder))

    def _collect(self, workers: list[_Worker], deadline: float, timeout: float,
                 ) -> dict[int, tuple[bool, float, Any]]:
        """rank -> (it returned, when it failed, its pickled result or what went wrong). A dead
        rank's moment is 0: it is the cause of what its peers then say."""
        answers: dict[int, tuple[bool, float, Any]] = {}
        waiting = dict(enumerate(workers))
        failed = False
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = connection.wait([w.pipe for w in waiting.values()], left)
            for rank, worker in list(waiting.items()):
                if worker.pipe not in ready:
                    continue
                del waiting[rank]
                try:
                    answers[rank] = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    worker.process.join()
                    answers[rank] = (False, 0.0, f"died ({_ending(worker.process.exitcode)}).")
                if not answers[rank][0] and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for rank, worker in waiting.items():
            what = (f"had not noticed {_GRACE:g} s after another rank failed" if failed
                    else f"did not finish in {timeout:g} s")
            answers[rank] = (False, float("inf"), f"{what}; it was at\n{worker.stack()}")
        if waiting:
            for worker in workers:
                worker.kill()
        for worker in workers:
            if worker.process.is_alive():
                with suppress(ConnectionError):  # it has died since
                    worker.pipe.send_bytes(b"")  # everyone has answered: leave the group
        return answers


class _Worker:
    """One process and this side's end of the pipe to it."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(folder)), daemon=True)
        self.process.start()
        theirs.close()
        self._stacks = folder / f"stack-{self.process.pid}"

    def stack(self) -> str:
        """Where the process is now."""
        if self.process.pid is None or not self._stacks.exists():
            return "its start"
        for dumps in (1, 2):  # the second is begun when the first is whole
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
            for _ in range(1000):
                if (found := self._stacks.read_text()).count("Current thread") >= dumps:
                    break
                time.sleep(0.01)
        return found

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _serve(pipe: Connection, folder: str) -> None:
    """A rank's life: take a call, answer it, leave the group when everyone has answered."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # Kilter's kernels take their number of threads from torch
    with open(f"{folder}/stack-{os.getpid()}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            rank, world, store, timeout, call = pickle.loads(message)
            answer = _answer(rank, world, store, timeout, call)
            if not answer[0] and dist.is_initialized():
                dist.destroy_process_group()  # at once, so that peers that wait for us fail
            pipe.send_bytes(pickle.dumps(answer))
            try:
                pipe.recv_bytes()
            except EOFError:
                return
            if dist.is_initialized():
                dist.destroy_process_group()


def _answer(rank: int, world: int, store: str, timeout: float, call: bytes,
            ) -> tuple[bool, float, Any]:
    import torch
    import torch.distributed as dist

    try:
        module, name, args, kwargs = pickle.loads(call)
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank,
                                world_size=world, timeout=timedelta(seconds=timeout))
        torch.manual_seed(0)
        return True, 0.0, pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # pytest's own failures and SystemExit are no Exceptions
        return False, time.monotonic(), "".join(traceback.format_exception(error))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
