"""The rollout replicas and their work: a thread beside the trainer's first rank.

    trainer:   publish v ─ collect ─ learn ──────────── publish v+1 ─ collect ─ learn ───
    replica:   take v ─ sample ─ sample ahead ────────┤ take v+1 ─ go on ─ sample ahead ──

New weights interrupt what samples: each replica gives back what it has, takes the weights and goes
on. A replica that dies is replaced, and so is one that works and does not get on; what it had is
given out again, as it was when it got it. All state is in the trainer's first rank, so that nothing
is lost with a replica.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from kilter.rl.config import RLJob
from kilter.rl.distributed.book import Ahead, Book, Group
from kilter.rl.experience import Rollout
from kilter.rl.prompts import Question
from kilter.serve.params import SamplingParams


class Stalled(RuntimeError):
    """A replica is alive, for all that anybody knows, but does not get on."""


class RolloutsLost(RuntimeError):
    """Replicas die faster than they can be replaced."""


@dataclass(frozen=True)
class Weights:
    """New weights for replicas.

    Attributes:
        whole: all parameters; else those that have been trained.
        sums: the trainer's checksums of what comes.
        parcels: by part of a replica and group of parameters: what to fetch.
    """

    version: int
    whole: bool
    sums: Mapping[str, int]
    parcels: tuple[tuple[tuple[Any, ...], ...], ...]


class Worker(Protocol):
    """What is asked of a replica; see `kilter.rl.distributed.replica.Replica`."""

    def start(self, done: Callable[[Any, BaseException | None], None]) -> None: ...
    def update(self, weights: Weights, done: Callable[[Any, BaseException | None], None]
               ) -> None: ...
    def sample(self, number: int, groups: Sequence[Group],
               done: Callable[[Any, BaseException | None], None]) -> None: ...
    def interrupt(self, number: int) -> None: ...
    def progress(self) -> int | None: ...
    def lost(self, error: BaseException) -> bool: ...
    def cause(self, error: BaseException) -> BaseException: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class _Slot:
    """A replica's place.

    Attributes:
        version: of its weights.
        based: it has had all parameters.
        sampling: how many times it was told to sample.
        groups: that it has.
        seen: what it said last of its progress, and ``moved`` when that was new.
        lost: how often it died since something came of it.
    """

    worker: Worker
    state: Literal["busy", "idle", "sampling"] = "busy"
    version: int | None = None
    based: bool = False
    sampling: int = 0
    interrupted: bool = False
    groups: list[Group] = field(default_factory=list)
    since: float = 0.0
    seen: int | None = None
    moved: float = field(default_factory=time.monotonic)
    lost: int = 0


class Rollouts:
    """Of one run.

    Args:
        make: a new replica for place i.
        replicas: how many.
    """

    def __init__(self, job: RLJob, make: Callable[[int], Worker], replicas: int) -> None:
        self._make, self._most_lost = make, job.launch.max_restarts
        self._deadline = job.placement.deadline
        self._book = Book(job.rollout.prompts, job.placement.max_staleness, job.steps)
        self._share = -(-job.rollout.prompts // replicas)  # groups that a replica gets at a time
        self._changed = threading.Condition()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._base: Weights | None = None  # the last whole ones
        self._latest: Weights | None = None
        self._spans: list[tuple[float, float]] = []  # in which a replica sampled
        self._counts = {"interrupted": 0, "replaced": 0}
        self._asked = self._learning = time.time()
        self._slots = [_Slot(make(index)) for index in range(replicas)]
        for slot in self._slots:
            self._tell(slot, slot.worker.start, self._started)
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    # ---- for the trainer ----

    def publish(self, weights: Weights) -> None:
        """From now on prompts are begun, and unfinished answers go on, with these weights."""
        with self._changed:
            self._latest = weights
            if weights.whole:
                self._base = weights
            self._interrupt()
        self._events.put(self._nothing)

    def collect(self, questions: Sequence[Question], step: int, params: SamplingParams,
                ahead: Ahead | None) -> list[Rollout]:
        """All samples of the questions, in order, when they are done.

        Raises:
            RolloutsLost: if replicas die and die.
            Exception: what a replica raised, if it is alive.
        """
        with self._changed:
            self._asked = time.time()
            self._book.ask(questions, step, params, ahead)
            if ahead is None:
                self._interrupt()  # somebody waits for these; the rest can wait
            self._events.put(self._nothing)
            found: list[Rollout] | None = None

            def there() -> bool:
                nonlocal found
                if self._failure is None:
                    found = self._book.take()
                return found is not None or self._failure is not None

            self._changed.wait_for(there)
            if self._failure is not None:
                raise self._failure
            self._learning = time.time()
            assert found is not None
            return found

    def told(self) -> dict[str, Any]:
        """What happened since the last call, seconds of this machine's clock: when replicas
        sampled, when the trainer waited and learned, and how long it learned while one sampled."""
        with self._changed:
            now = time.time()
            spans, self._spans = self._spans, []
            running = [(slot.since, now) for slot in self._slots if slot.state == "sampling"]
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
            return {"sampling": spans + running, "waiting": (self._asked, self._learning),
                    "learning": (self._learning, now),
                    "overlap": covered(spans + running, self._learning, now),
                    "ahead": self._book.ahead, **counts}

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()
        for slot in self._slots:
            slot.worker.close()

    # ---- the thread ----

    def _run(self) -> None:
        while (event := self._next()) is not None:
            with self._changed:
                try:
                    event()
                    self._watch()
                    self._hand_out()
                except BaseException as error:  # the trainer raises it
                    self._failure = error
                self._changed.notify_all()
                if self._failure is not None:
                    return

    def _next(self) -> Callable[[], None] | None:
        """An event, of which there is one every few moments."""
        try:
            return self._events.get(timeout=min(1.0, self._deadline / 4))
        except queue.Empty:
            return self._nothing

    def _watch(self) -> None:
        """Replaces replicas that work and have not got on for too long."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.state == "idle":
                continue
            if (seen := slot.worker.progress()) != slot.seen:
                slot.seen, slot.moved = seen, now
            elif now - slot.moved > self._deadline:
                self._replace(slot, Stalled(f"it did not get on for {self._deadline:g} s, see "
                                            "placement.deadline"))

    def _nothing(self) -> None:
        """An event after which there may be something to hand out."""

    def _hand_out(self) -> None:
        for slot in self._slots:
            if slot.state != "idle" or self._latest is None or self._base is None:
                continue
            if slot.version != self._latest.version:
                weights = self._latest if slot.based else self._base
                slot.state = "busy"
                self._tell(slot, partial(slot.worker.update, weights), self._updated, weights)
            elif groups := self._book.give(self._share):
                slot.groups, slot.state, slot.since = groups, "sampling", time.time()
                slot.sampling += 1
                slot.interrupted = False
                self._tell(slot, partial(slot.worker.sample, slot.sampling, groups), self._sampled)

    def _interrupt(self) -> None:
        for slot in self._slots:
            if slot.state == "sampling" and not slot.interrupted:
                slot.interrupted = True
                self._counts["interrupted"] += 1
                slot.worker.interrupt(slot.sampling)

    def _tell(self, slot: _Slot, call: Callable[[Callable[..., None]], None],
              then: Callable[..., None], *more: Any) -> None:
        """Calls a replica, which has one call at a time; what comes of it is an event."""

        worker, slot.moved = slot.worker, time.monotonic()

        def event(result: Any, error: BaseException | None) -> None:
            if slot.worker is not worker:
                return  # it has been replaced meanwhile
            if error is not None:
                self._fail(slot, error)
            else:
                then(slot, result, *more)

        call(lambda result, error: self._events.put(lambda: event(result, error)))

    def _started(self, slot: _Slot, _: None) -> None:
        slot.state = "idle"

    def _updated(self, slot: _Slot, _: None, weights: Weights) -> None:
        slot.state, slot.version, slot.based = "idle", weights.version, True

    def _sampled(self, slot: _Slot, groups: list[Group]) -> None:
        self._spans.append((slot.since, time.time()))
        slot.state, slot.groups = "idle", []
        if self._book.back(groups):
            slot.lost = 0

    def _fail(self, slot: _Slot, error: BaseException) -> None:
        """Replaces a replica that is dead; raises what one that is alive has raised."""
        if not slot.worker.lost(error):
            raise slot.worker.cause(error)
        self._replace(slot, error)

    def _replace(self, slot: _Slot, error: BaseException) -> None:
        if slot.state == "sampling":
            self._spans.append((slot.since, time.time()))
        index = self._slots.index(slot)
        slot.lost += 1
        if slot.lost > self._most_lost:
            raise RolloutsLost(f"Rollout replica {index} died {slot.lost} times without finishing "
                               f"a prompt ({_first_line(error)}). Look at its memory, and in Ray's "
                               "logs; the same command goes on from the last checkpoint.")
        self._counts["replaced"] += 1
        slot.worker.kill()
        self._book.back(slot.groups)
        slot.groups, slot.state, slot.version, slot.based = [], "busy", None, False
        slot.sampling, slot.seen = 0, None
        slot.worker = self._make(index)
        self._tell(slot, slot.worker.start, self._started)


def covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How much of [begin, end] lies in one of the spans."""
    total, reached = 0.0, begin
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        if last > first:
            total, reached = total + last - first, last
    return total


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
