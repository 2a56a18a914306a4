"""How much is let in at a time: the bounded queue, and the drain before the server stops.

Answers are counted, not requests: one for n answers weighs n. A ticket is taken before anything is
computed and given back when the last byte is out, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from types import TracebackType

from kilter.serve.server.errors import ApiError

_HISTORY = 64  # answers by whose ends the wait is guessed
_LONGEST_WAIT = 60  # seconds, of what Retry-After says


class Admission:
    """Counts the answers that are under way. For one event loop.

    Args:
        running: answers that run together; waiting: how many more may wait.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.limit = running + waiting
        self.unfinished = 0
        self.draining = False
        self._ends: deque[float] = deque(maxlen=_HISTORY)
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, answers: int = 1) -> Ticket:
        """A place for a request, to be used with ``with``.

        Raises:
            ApiError: 429 if the queue is full, 503 if the server is about to stop.
        """
        if self.draining:
            raise ApiError(503, "The server is about to stop and takes no new requests.",
                           headers={"Connection": "close", "Retry-After": "5"})
        ticket = Ticket(self)
        ticket.grow(answers)
        return ticket

    async def wait_idle(self) -> None:
        """Until nothing is under way."""
        await self._idle.wait()

    def retry_after(self, answers: int) -> int:
        """Seconds until there may be room for so many, by how fast answers ended lately."""
        excess = self.unfinished + answers - self.limit
        if len(self._ends) < 2 or excess <= 0:
            return 1
        pace = (time.monotonic() - self._ends[0]) / len(self._ends)
        return max(1, min(math.ceil(excess * pace), _LONGEST_WAIT))

    def add(self, answers: int) -> None:
        if self.unfinished + answers > self.limit:
            raise ApiError(
                429, f"This server takes at most {self.limit} answers at a time and has "
                     f"{self.unfinished} under way, so {answers} more have to come later.",
                headers={"Retry-After": str(self.retry_after(answers))})
        self.unfinished += answers
        self._idle.clear()

    def remove(self, answers: int) -> None:
        self.unfinished -= answers
        self._ends.extend([time.monotonic()] * min(answers, _HISTORY))
        if self.unfinished == 0:
            self._idle.set()


class Ticket:
    """A request's places in the queue."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.answers = 0

    def grow(self, answers: int) -> None:
        """Makes it ``answers`` in all.

        Raises:
            ApiError: 400 for more than the server ever takes, 429 if there is no room now.
        """
        if answers > self._admission.limit:
            raise ApiError(400, f"The request asks for {answers} answers, but this server takes at "
                                f"most {self._admission.limit} at a time; split it.")
        self._admission.add(answers - self.answers)
        self.answers = answers

    def close(self) -> None:
        """Gives the places back; once more does nothing."""
        if self.answers:
            self._admission.remove(self.answers)
            self.answers = 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()
