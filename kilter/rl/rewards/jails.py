"""A bounded pool of processes that run what a model wrote (see jail.py for what goes on inside).

    jails = Jails("program", Limits(seconds=5), workers=4)
    outcomes = jails.run([{"program": "print(input())", "stdin": "3"}, …])

Each worker is a process that forks one locked-up child per job. What holds a child:

- it is killed, with its group, when its time is up or it has written too much;
- limits on CPU seconds, memory beside what was loaded, open files and file sizes;
- a folder of its own as working directory, an empty environment, a session of its own;
- isolation "full" (Linux 5.13 or later on x86-64 or AArch64): a filter of system calls, so no other
  process is started, signalled or looked into and no socket is made, and Landlock, so nothing is
  read but Python's own files and nothing written at all, or only in its folder.

Isolation "limits" leaves the last point out: such a child can reach the network and every file of
the user, and where the user is root it can start processes. Neither is a virtual machine: a hole in
the kernel is a hole here.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kilter.rl.rewards.score import Unavailable

Work = Literal["program", "mathematics", "reasoning_gym"]
Isolation = Literal["full", "limits"]
End = Literal["exit", "time", "output", "signal", "error"]

_SCRIPT = Path(__file__).with_name("jail.py")
_START = 180.0  # seconds to import what is needed, on a busy machine
_GRACE = 60.0  # seconds a worker may need beside a job's own
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache",
              "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom")


class NoJail(Unavailable):
    """The processes cannot be had as they were asked for."""


class JailLost(RuntimeError):
    """A process was lost twice on one job."""


@dataclass(frozen=True)
class Limits:
    """What one job may use.

    Attributes:
        seconds: of wall clock, at most; it is killed then.
        cpu_seconds: of CPU; default: `seconds`, rounded up.
        memory_mb: MiB of address space, beside what was loaded before it started.
        output_kb: KiB of output; it is killed when it has written more.
        open_files: file descriptors.
        file_mb: MiB a file in its own folder may have; 0: it can write no files. Their number is
            bounded by time only.
    """

    seconds: float = 10.0
    cpu_seconds: int | None = None
    memory_mb: int = 512
    output_kb: int = 256
    open_files: int = 64
    file_mb: int = 0

    def __post_init__(self) -> None:
        problems = [f"{name} is {value} but must be at least {least}."
                    for name, value, least in (
                        ("cpu_seconds", self.cpu_seconds, 1), ("memory_mb", self.memory_mb, 16),
                        ("output_kb", self.output_kb, 1), ("open_files", self.open_files, 16),
                        ("file_mb", self.file_mb, 0)) if value is not None and value < least]
        if not 0.0 < self.seconds <= 3600.0:
            problems.append(f"seconds is {self.seconds} but must be above 0 and at most 3600.")
        if problems:
            raise ValueError(" ".join(problems))


@dataclass(frozen=True)
class Outcome:
    """How a job ended: by itself, out of time, with too much output, by a signal; or "error", where
    the job itself (never an answer in it) cannot be run.

    Attributes:
        code: its exit code, or the signal.
        output: what it wrote, cut at the limit; of an error, what is wrong.
    """

    end: End
    code: int
    output: str

    @property
    def ok(self) -> bool:
        return self.end == "exit" and self.code == 0


class Jails:
    """Up to `workers` jobs at once. Workers start when they are needed and end with `close()`, with
    this object, or with this process, however it ends."""

    def __init__(self, work: Work, limits: Limits, workers: int,
                 isolation: Isolation = "full") -> None:
        if os.name != "posix":
            raise NoJail(f"Answers are run in processes of a POSIX system, but this is "
                            f"{os.name}.")
        if workers < 1:
            raise ValueError(f"workers is {workers} but must be at least 1.")
        self.work, self.limits, self.isolation, self.workers = work, limits, isolation, workers
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._idle)

    def run(self, jobs: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """The outcome of every job, in their order.

        Raises NoJail where the processes cannot be started, JailLost where one cannot be kept.
        """
        if not jobs:
            return []
        with ThreadPoolExecutor(min(self.workers, len(jobs))) as threads:
            return list(threads.map(self._one, jobs))

    def close(self) -> None:
        """Ends the workers; a later `run` starts new ones."""
        _stop(self._idle)

    def _one(self, job: Mapping[str, Any]) -> Outcome:
        for last in (False, True):
            with self._lock:
                worker = self._idle.pop() if self._idle and not last else None
            worker = worker or _Worker(self.work, self.limits, self.isolation)
            try:
                outcome = worker.run(job)
            except _Lost as error:
                worker.stop()
                if last:
                    raise JailLost(f"The process that runs {self.work} jobs was lost twice on one "
                                    f"job ({error}); it may have run out of memory.") from None
                continue
            except BaseException:
                worker.stop()
                raise
            with self._lock:
                self._idle.append(worker)
            return outcome
        raise AssertionError


class _Lost(Exception):
    pass


class _Worker:
    """One process that runs jail.py."""

    def __init__(self, work: Work, limits: Limits, isolation: Isolation) -> None:
        # -S: the standard library only; -s -P and an environment of our own are -I, without its
        # random hash seed: an answer's reward should not depend on the order of a set
        bare = work == "program"
        self._seconds = limits.seconds
        self._folder = tempfile.TemporaryDirectory(prefix="kilter-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, *(["-S"] if bare else []), "-s", "-P", "-B", str(_SCRIPT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            cwd="/", start_new_session=True,
            env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LANG": "C.UTF-8",
                 "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
        setup = {"work": work, "isolate": isolation == "full", "folder": self._folder.name,
                 "sys_path": None if bare else [entry for entry in sys.path if entry],
                 "readable": [*_LIBRARIES, str(Path(sys.base_prefix) / "lib")], "limits": {
                     "seconds": limits.seconds, "output": limits.output_kb << 10,
                     "cpu_seconds": limits.cpu_seconds or -int(-limits.seconds // 1),
                     "memory": limits.memory_mb << 20, "files": limits.open_files,
                     "file": limits.file_mb << 20}}
        try:
            problem = self._ask(setup, _START)["problem"]
        except _Lost as error:
            self.stop()
            raise NoJail(f"The process that runs {work} jobs did not start: {error}.") from None
        if problem is not None:
            self.stop()
            advice = {"mathematics": "pip install 'kilter[rl]'",
                      "reasoning_gym": "pip install 'kilter[rl]'"}
            if problem.startswith("it cannot be imported"):
                raise NoJail(f"The {work} reward needs a package that is not there: "
                                f"{problem.split(': ', 1)[1]}. Install it with "
                                f"`{advice.get(work, 'pip install kilter')}`.")
            raise NoJail(f"What a model writes cannot be isolated here: {problem}. Run it on a "
                            "system that can, or set isolation to \"limits\" if network and files "
                            "need no protection from it (docs/rewards.md).")

    def run(self, job: Mapping[str, Any]) -> Outcome:
        answer = self._ask(job, self._seconds + _GRACE)
        return Outcome(answer["end"], answer["code"], answer["output"])

    def stop(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
        self._folder.cleanup()

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        data = json.dumps(message).encode()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(len(data).to_bytes(8, "little"))
            rest = memoryview(data)
            while rest:
                rest = rest[self._process.stdin.write(rest):]
        except OSError as error:
            raise _Lost(f"it takes no more jobs: {error.strerror}") from None
        size = int.from_bytes(self._read(8, deadline), "little")
        answer: dict[str, Any] = json.loads(self._read(size, deadline))
        return answer

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd, data = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise _Lost("it did not answer in time")
            block = os.read(fd, min(count - len(data), 1 << 20))
            if not block:
                raise _Lost("it ended")
            data += block
        return data


def _stop(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()
