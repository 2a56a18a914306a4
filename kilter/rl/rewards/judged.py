"""What the rewards have in common that judge an answer in a process of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kilter.rl.rewards.jails import Isolation, Jails, Limits, Outcome, Work


@dataclass(frozen=True, kw_only=True)
class Jailed:
    """Options of such a reward, and its pool, which starts with the first answer.

    Attributes:
        workers: answers judged at once.
        seconds: of wall clock one judgement may take; then the answer gets nothing.
        memory_mb: MiB it may use.
        isolation: "full" or "limits"; what each means is in docs/rewards.md.
    """

    workers: int = 2
    seconds: float = 10.0
    memory_mb: int = 1024
    isolation: Isolation = "full"
    _pool: list[Jails] = field(default_factory=list, init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        if self.workers < 1:
            problems.append(f"workers is {self.workers} but must be at least 1.")
        if self.isolation not in ("full", "limits"):
            problems.append(f"isolation is {self.isolation!r} but must be 'full' or 'limits'.")
        try:
            self._limits()
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError(" ".join(problems))

    def close(self) -> None:
        """Ends the processes; the next answer starts new ones."""
        with self._lock:
            while self._pool:
                self._pool.pop().close()

    def _limits(self) -> Limits:
        return Limits(seconds=self.seconds, memory_mb=self.memory_mb)

    def _run(self, work: Work, jobs: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        with self._lock:
            if not self._pool:
                self._pool.append(Jails(work, self._limits(), self.workers, self.isolation))
            pool = self._pool[0]
        return pool.run(jobs)


def reported(outcome: Outcome) -> dict[str, Any]:
    """The record a judgement wrote; empty where it wrote none, as after its time was up.

    Raises ValueError where the record says that the reference cannot be used.
    """
    if outcome.end == "error":
        raise ValueError(f"The reference cannot be used: {outcome.output}.")
    try:
        record = json.loads(outcome.output) if outcome.ok else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    if "error" in record:
        raise ValueError(f"The reference cannot be used: {record['error']}.")
    return record


def number(record: Mapping[str, Any]) -> float:
    """A record's value in 0 … 1; 0 where there is none."""
    value = record.get("value", 0.0)
    good = isinstance(value, int | float) and 0.0 <= value <= 1.0
    return float(value) if good else 0.0
