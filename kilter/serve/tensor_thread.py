"""The thread in which rank 0 does what it cannot do without the other ranks.

Gloo can wait for ever for a rank that died: it tells a send that is queued, or a receipt that has
begun, nothing of the end of its connection (torch 2.13), and no call ends such a wait before its
timeout. So the thread that waits is another one than the caller's, and can be left behind: the
caller hears why. What is left behind ends, and lets go of its memory, at gloo's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kilter.serve.executor import RanksLost

T = TypeVar("T")
_LOOK = 0.1  # seconds after which one who waits looks whether it is in vain
_FAREWELL = 5.0  # seconds that one who was left behind at work gets to end before the process does
_alive: set[threading.Thread] = set()


class StepThread:
    """Does one thing after the other.

    Args:
        lost: why nothing that it does will come to an end any more, a sentence, or None.
    """

    def __init__(self, lost: Callable[[], str | None]) -> None:
        self._lost = lost
        self._jobs: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        thread = threading.Thread(target=self._run, name="kilter-tp-step", daemon=True)
        _alive.add(thread)
        thread.start()

    def do(self, what: Callable[[], T]) -> T:
        """Has it done there, after all that was asked for before. An interrupt of the wait leaves
        it to be done.

        Raises:
            RanksLost: if it will not end; else whatever it raises.
        """
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._jobs.put((what, answer))
        while True:
            with contextlib.suppress(Empty):
                result, error = answer.get(timeout=_LOOK)
                break
            if (sentence := self._lost()) is not None:
                raise RanksLost(sentence)
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """It ends when all is done."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            what, answer = job
            try:
                answer.put((what(), None))
            except BaseException as error:
                answer.put((None, error))
            del job, what, answer  # nothing of it stays while there is nothing to do
        _alive.discard(threading.current_thread())


@atexit.register
def _part() -> None:
    """Torch ends the process badly if one of its calls comes back while Python is being taken down.
    A wait of gloo's does not."""
    deadline = time.monotonic() + _FAREWELL
    for thread in list(_alive):
        thread.join(max(deadline - time.monotonic(), 0.0))
