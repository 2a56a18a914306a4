"""Processes of this machine that are one engine: started, heard, watched, and ended together.

When one is gone the others fail too, each in its own way; what counts is why the first one did. So
a rank that fails says when and why in the store before it ends, and only rank 0 speaks of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kilter.serve.executor import RanksLost

FAREWELL = 10.0  # seconds that processes get to end by themselves
_EVIDENCE = 1.0  # seconds in which one that ends has said why

logger = logging.getLogger("kilter.engine")


class Processes:
    """The processes of the ranks from 1 on, and what becomes of them.

    Args:
        module: is run by them, with the rank and ``told`` (plus our own process and the store's
            port) as arguments.
        step_timeout: seconds after which a step is taken to hang.

    Attributes:
        store: where the ranks meet; rank 0 keeps it, on this machine's own interface.
        since: when the step began that rank 0 is in (`time.monotonic`), or None.
        lost: what happened to the first that was lost, a sentence, or None.
        expected: whether they are to end.
        killed: whether they were, all of them.
    """

    def __init__(self, degree: int, module: str, told: Mapping[str, Any], step_timeout: float
                 ) -> None:
        self.since: float | None = None
        self.lost: str | None = None
        self.expected = False
        self.killed = False
        self._step_timeout = step_timeout
        self._lock = threading.RLock()
        self._tell: Callable[[str], None] = lambda sentence: None
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore("127.0.0.1", port, degree, is_master=True,
                                   wait_for_workers=False, master_listen_fd=listener.detach())
        # Its own line to it: a wait of torch's on the other one would hold this one up.
        self._words = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        argument = json.dumps({**told, "port": port, "parent": os.getpid()})
        # They import what this process does, and nothing from the folder it happens to be in.
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, degree):
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(rank), argument],
                    stdin=subprocess.DEVNULL, env=os.environ | path, start_new_session=True))
        except BaseException:
            self.kill()
            raise

    def wait_for(self, word: str) -> None:
        """Until all have said this.

        Raises:
            RanksLost: if one ends instead.
        """
        while not self._words.check([key_of(word, rank) for rank in self._ranks]):
            if self.ended:
                raise RanksLost(self.lose("A tensor-parallel rank could not start."))
            time.sleep(0.02)

    def watch(self) -> None:
        """From now on a rank that ends is noticed, and a step that does not."""
        threading.Thread(target=self._watch, name="kilter-tp-watch", daemon=True).start()

    def listen(self, tell: Callable[[str], None]) -> None:
        """As `Executor.on_loss`."""
        with self._lock:
            self._tell = tell
            if self.lost is not None:
                tell(self.lost)

    def lose(self, otherwise: str) -> str:
        """Gives all of them up, and returns why: what one of them shows, or ``otherwise``."""
        with self._lock:
            if self.lost is None:
                self.lost = self._cause() or otherwise
                self.kill()
                self._tell(self.lost)
            return self.lost

    def kill(self) -> None:
        self.killed = True
        for process in self.processes:
            process.kill()
        self.reap()

    def reap(self) -> None:
        """Waits for all to end; not for ever for one that its system holds fast."""
        deadline = time.monotonic() + 2 * FAREWELL
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))

    @property
    def hopeless(self) -> str | None:
        """Why nothing will come from them any more, if so; whoever listens has heard it."""
        with self._lock:
            return self.lost or ("The tensor-parallel ranks were ended." if self.killed else None)

    @property
    def ended(self) -> bool:
        """Whether one of them has."""
        return any(process.poll() is not None for process in self.processes)

    @property
    def _ranks(self) -> range:
        return range(1, len(self.processes) + 1)

    def _watch(self) -> None:
        while not (self.expected or self.killed):
            since = self.since
            if self.ended:
                if not self.expected:
                    self.lose("A tensor-parallel rank has ended.")
            elif since is not None and time.monotonic() - since > self._step_timeout:
                stopped = [f" Rank {rank} is stopped." for rank, process
                           in zip(self._ranks, self.processes, strict=True)
                           if _stopped(process.pid)]
                self.lose(f"A step over the tensor-parallel ranks has not ended in "
                          f"{self._step_timeout:g} seconds, so they were given up."
                          f"{''.join(stopped)}")
            time.sleep(0.2)

    def _cause(self) -> str | None:
        """What the first rank that failed shows. When one is gone the others fail too: a rank that
        was killed is to blame, else the one whose error is the oldest."""
        deadline = time.monotonic() + _EVIDENCE
        failed: list[tuple[float, int, str, str]] = []
        while True:
            for rank, process in zip(self._ranks, self.processes, strict=True):
                code = process.poll()
                if code is not None and code < 0:
                    hint = " (as happens where memory runs out)" if code == -9 else ""
                    return (f"Tensor-parallel rank {rank} was ended by "
                            f"{signal.Signals(-code).name}{hint}; the engine cannot go on without "
                            f"it.")
            left = deadline - time.monotonic()
            if left <= 0 or (failed and left < _EVIDENCE / 2):
                break
            failed = self._failed()
            time.sleep(0.02)
        if failed:
            _, rank, sentence, trace = min(failed)
            if trace:
                logger.error("Tensor-parallel rank %d failed:\n%s", rank, trace)
            return f"Tensor-parallel rank {rank} failed: {sentence}"
        for rank, process in zip(self._ranks, self.processes, strict=True):
            if process.poll() is not None:
                return (f"Tensor-parallel rank {rank} has ended with exit code "
                        f"{process.returncode}; the engine cannot go on without it.")
        return None

    def _failed(self) -> list[tuple[float, int, str, str]]:
        """(when, rank, error, traceback) of those that said why they end."""
        keys = {rank: key_of("failed", rank) for rank in self._ranks}
        return [(moment, rank, *words) for rank, key in keys.items() if self._words.check([key])
                for moment, *words in [json.loads(self._words.get(key))]]


def key_of(word: str, rank: int) -> str:
    """Where in the store a rank says a word: here, ready or failed."""
    return f"kilter/{word}/{rank}"


def said(error: BaseException) -> str:
    """An error as a sentence."""
    if isinstance(error, ValueError | OSError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ") + "."


def _stopped(pid: int) -> bool:
    """Whether somebody has stopped a process (where the system tells)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
