"""Rollout replicas on threads of this process: what Ray's actors do, without Ray."""

from __future__ import annotations

import copy
import os
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


class Dead(RuntimeError):
    """What calls to a dead replica end with."""


class LocalRank(RolloutRank):
    """Takes ``slow`` seconds more for every step of its engine."""

    def __init__(self, slow: float) -> None:
        super().__init__(Place(os.getcwd(), "cpu", 1))
        self._slow = slow

    def start(self, *args: Any) -> None:
        super().start(*args)
        engine = self._engine.engine
        assert engine is not None
        step = engine.step

        def slowly() -> Any:
            time.sleep(self._slow)
            return step()

        engine.step = slowly  # type: ignore[method-assign]

    def _threads(self) -> None:
        pass

    def _fetch(self, references: Sequence[Any]) -> list[Any]:
        return list(references)


class LocalReplica:
    """A replica of one rank that dies in its samplings number ``dies``, after the work, and never
    comes back from those number ``hangs``."""

    def __init__(self, job: RLJob, dies: frozenset[int] = frozenset(),
                 hangs: frozenset[int] = frozenset(), slow: float = 0.0) -> None:
        self._job, self._dies, self._hangs, self._dead = job, dies, hangs, False
        self._killed = threading.Event()
        self._rank, self._thread = LocalRank(slow), ThreadPoolExecutor(1)

    def start(self, done: Callable[..., None]) -> None:
        self._call(done, self._rank.start, self._job, 0, None)

    def update(self, weights: Weights, done: Callable[..., None]) -> None:
        self._call(done, self._rank.update, weights.version, weights.parcels[0], weights.sums)

    def sample(self, number: int, groups: Sequence[Group], done: Callable[..., None]) -> None:
        def work() -> list[Group]:
            if number in self._hangs:
                self._killed.wait()
                raise Dead
            found = self._rank.sample(number, groups)
            if number in self._dies:
                self._dead = True
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
        self._killed.set()
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        self._thread.shutdown()
        self._rank.close()

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
              hangs: Sequence[frozenset[int]] = (), pause: float = 0.0, slow: float = 0.0,
              stop_after: int | None = None, apart: bool = True) -> Seen:
    """A run with its trainer in this process, or as the rank it is; replicas are with the first.

    Args:
        deaths: samplings that the first, second, ... replica that is made dies in; ``hangs`` those
            that it never comes back from.
        pause: seconds more that the trainer learns in every step.
        slow: seconds more that each step of a replica's engine takes.
        stop_after: a step after which it is told to stop.
        apart: whether rollouts are on replicas; else the ordinary synchronous run.
    """
    seen, stop, inputs = Seen(), threading.Event(), open_rl(job)
    dying, hanging = iter(deaths), iter(hangs)

    class Run(RLRun):
        def learn(self, experience: Experience, version: int, *args: Any) -> Any:
            seen.experiences.append(experience)
            seen.versions.append(version)
            time.sleep(pause)
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
        rollouts = None
        if apart and first:
            rollouts = Rollouts(job, lambda _: LocalReplica(
                job, next(dying, frozenset()), next(hanging, frozenset()), slow),
                job.placement.rollout)
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
