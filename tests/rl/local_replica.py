"""Rollout replicas on threads of this process: what Ray's actors do, without Ray. What has to come
before what is waited for, so that a run is the same on a machine that is busy."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from kilter.rl.config import RLJob
from kilter.rl.distributed.book import Group
from kilter.rl.distributed.roles import DistantRoles, Parcels
from kilter.rl.distributed.rollouts import Rollouts, Weights
from kilter.rl.distributed.worker import Place, RolloutRank
from kilter.rl.experience import Experience
from kilter.rl.launch import open_rl
from kilter.rl.loop import RLRun
from kilter.rl.roles import Roles
from kilter.train.loop import Ending

PATIENCE = 300.0  # seconds in which what is waited for comes, on a busy machine too


class Dead(RuntimeError):
    """What calls to a dead replica end with."""


class Hold:
    """The prompts of a step are not answered before its weights are there: a sampling of them that
    has begun waits to be interrupted, in the middle."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.waits = threading.Event()  # set when one does


class Clock:
    """This machine's, and what it leaps ahead of it."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.leapt = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.leapt


class LocalRank(RolloutRank):
    def __init__(self, hold: Hold | None) -> None:
        super().__init__(Place("", "cpu", 1))
        self._hold, self._left = hold, 0
        self._changed, self._interrupted = threading.Condition(), 0

    def start(self, *args: Any) -> None:
        super().start(*args)
        engine = self._engine.engine
        assert engine is not None
        step = engine.step

        def held() -> Any:
            self._left -= 1
            if self._left == 0 and self._hold is not None:
                self._hold.waits.set()
                with self._changed:
                    assert self._changed.wait_for(lambda: self._interrupted >= self._number,
                                                  PATIENCE), "nobody has interrupted it"
            return step()

        engine.step = held  # type: ignore[method-assign]

    def sample(self, number: int, groups: Sequence[Group]) -> list[Group]:
        self._number = number
        early = self._hold is not None and groups[0].step == self._hold.step > self._engine.version
        self._left = 4 if early else 0  # steps of the engine to the one that is held
        return super().sample(number, groups)

    def interrupt(self, number: int) -> None:
        self.let_go(number)
        super().interrupt(number)

    def let_go(self, number: int) -> None:
        with self._changed:
            self._interrupted = max(self._interrupted, number)
            self._changed.notify_all()

    def _join(self, *_: Any) -> None:
        """The process is one already, and others' too."""

    def _threads(self) -> None:
        pass

    def _fetch(self, references: Sequence[Any]) -> list[Any]:
        return list(references)


class LocalReplica:
    """A replica of one rank that dies in its samplings number ``dies``, after the work, and never
    comes back from those number ``hangs``.

    Args:
        lost: its deaths and hangs are told to, as "death" and "hang".
        hanging: is called again and again while it hangs.
    """

    def __init__(self, job: RLJob, dies: frozenset[int], hangs: frozenset[int], lost: list[str],
                 hanging: Callable[[], None], hold: Hold | None) -> None:
        self._job, self._dies, self._hangs, self._dead = job, dies, hangs, False
        self._lost, self._hanging, self._killed = lost, hanging, threading.Event()
        self._rank, self._thread = LocalRank(hold), ThreadPoolExecutor(1)

    def start(self, done: Callable[..., None]) -> None:
        self._call(done, self._rank.start, self._job, 0, None)

    def update(self, weights: Weights, done: Callable[..., None]) -> None:
        self._call(done, self._rank.update, weights.version, weights.parcels[0], weights.sums)

    def sample(self, number: int, groups: Sequence[Group], done: Callable[..., None]) -> None:
        def work() -> list[Group]:
            if number in self._hangs:
                self._lost.append("hang")
                end = time.monotonic() + PATIENCE
                while not self._killed.wait(0.01):
                    assert time.monotonic() < end, "nobody has replaced it"
                    self._hanging()
                raise Dead
            found = self._rank.sample(number, groups)
            if number in self._dies:
                self._dead = True
                self._lost.append("death")
                raise Dead
            return found

        self._call(done, work)

    def interrupt(self, number: int) -> None:
        threading.Thread(target=self._rank.interrupt, args=(number,), daemon=True).start()

    def progress(self) -> int:
        return self._rank.progress()

    def lost(self, error: BaseException) -> bool:
        return self._dead

    def cause(self, error: BaseException) -> BaseException:
        return error

    def kill(self) -> None:
        self._rank._over = sys.maxsize  # nobody is left to interrupt
        self._let_go()
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        self._let_go()
        self._thread.shutdown()
        self._rank.close()

    def _let_go(self) -> None:
        self._killed.set()
        self._rank.let_go(sys.maxsize)

    def _call(self, done: Callable[..., None], work: Callable[..., Any], *args: Any) -> None:
        def told(future: Future[Any]) -> None:
            error = future.exception()
            done(None if error is not None else future.result(), error)

        self._thread.submit(work, *args).add_done_callback(told)


@dataclass
class Seen:
    """What a run was."""

    ending: Ending | None = None
    experiences: list[Experience] = field(default_factory=list)  # by step
    versions: list[int] = field(default_factory=list)  # the trainer's, likewise
    told: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # "death" or "hang" of each replica that did so
    state: dict[str, Any] = field(default_factory=dict)  # the actor's weights at the end

    @property
    def groups(self) -> list[int]:
        """Prompts in the order in which they were learned from."""
        return [g for e in self.experiences for g in dict.fromkeys(e.group_S.tolist())]

    @property
    def ages(self) -> list[list[int]]:
        """Of each step's sampled tokens."""
        return [(version - e.version_T[e.is_action_T]).tolist()
                for version, e in zip(self.versions, self.experiences, strict=True)]


def run_local(job: RLJob, *, deaths: Sequence[frozenset[int]] = (),
              hangs: Sequence[frozenset[int]] = (), clock: Clock | None = None, ahead: int = 0,
              hold: int | None = None, stop_after: int | None = None, apart: bool = True) -> Seen:
    """A run with its trainer in this process, or as the rank it is; replicas are with the first.

    Args:
        deaths: samplings that the first, second, ... replica that is made dies in; ``hangs`` those
            that it never comes back from.
        clock: leaps beyond every deadline while a replica hangs.
        ahead: in each step but the last the trainer does not go on before so many prompts of later
            ones are done.
        hold: a step whose prompts are begun before its weights are there and finished after.
        stop_after: a step after which it is told to stop.
        apart: whether rollouts are on replicas; else the ordinary synchronous run.
    """
    seen, stop, inputs = Seen(), threading.Event(), open_rl(job)
    dying, hanging = iter(deaths), iter(hangs)
    held = None if hold is None else Hold(hold)
    rollouts: Rollouts | None = None

    def wait_for(there: Callable[[], bool]) -> None:
        """Or for the end of the replicas' work, which `Rollouts.collect` tells of."""
        if rollouts is not None:
            end = time.monotonic() + PATIENCE
            with rollouts._changed:
                while not there() and rollouts._failure is None:
                    assert time.monotonic() < end, "nothing was done ahead"
                    rollouts._changed.wait(0.01)

    def done_ahead() -> int:
        assert rollouts is not None
        return sum(not group.aside for group in rollouts._book._done.values())

    def leap() -> None:
        if clock is not None and rollouts is not None:
            clock.leapt += 2.0 * job.placement.deadline
            rollouts._events.put(rollouts._nothing)

    def make(_: int) -> LocalReplica:
        return LocalReplica(job, next(dying, frozenset()), next(hanging, frozenset()), seen.lost,
                            leap, held)

    class Run(RLRun):
        def learn(self, experience: Experience, version: int, *args: Any) -> Any:
            seen.experiences.append(experience)
            seen.versions.append(version)
            if held is not None and version + 1 == held.step:
                wait_for(held.waits.is_set)
            elif version + 1 < job.steps:
                wait_for(lambda: done_ahead() >= ahead)
            found = super().learn(experience, version, *args)
            seen.told.append(found[0])
            if version + 1 == stop_after:
                stop.set()
            return found

    first = not dist.is_initialized() or dist.get_rank() == 0

    def deliver(version: int, parcels: Parcels) -> list[Parcels]:
        assert roles.policy is not None
        axis = roles.policy.spread.mesh.axis("world")
        every: list[Any] = [parcels] * axis.size
        if axis.size > 1:
            dist.all_gather_object(every, parcels, group=axis.members)
        return every

    with ExitStack() as closing:
        if apart and first:
            rollouts = Rollouts(job, make, job.placement.rollout)
            closing.callback(rollouts.close)
        if apart:
            roles: Roles = DistantRoles(job, inputs, "cpu", None, rollouts, copy.deepcopy, deliver)
        else:
            roles = Roles(job, inputs, "cpu")
        run = Run(job, inputs, roles, closing)
        seen.ending = run.go(stop)
        if roles.policy is not None:
            seen.state = {name: parameter.detach().clone()
                          for name, (parameter, _) in roles.policy.spread.local.items()}
    return seen
