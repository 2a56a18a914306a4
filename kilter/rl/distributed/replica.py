"""A rollout replica as the trainer's first rank holds it: actors, in a world of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kilter.rl.config import RLJob
from kilter.rl.distributed.book import Group
from kilter.rl.distributed.cluster import Reserved, load_ray
from kilter.rl.distributed.rollouts import Weights

if TYPE_CHECKING:
    from kilter.rl.distributed.worker import Place

Done = Callable[[Any, BaseException | None], None]  # the first rank's result, or an error
_ANSWER = 60.0  # seconds in which a rank that is alive answers, on a busy machine too


class Replica:
    """Calls return at once; ``done`` is told, on some thread, when all ranks have, or one failed.
    """

    def __init__(self, actors: Sequence[Any], job: RLJob) -> None:
        self._actors, self._job = list(actors), job
        self._asked: Any = None  # a reference to the answer that `progress` waits for
        self._heard: int | None = None

    def start(self, done: Done) -> None:
        address = (self._actors[0].address.remote(self._job.launch.timeout)
                   if len(self._actors) > 1 else None)
        _watch([actor.start.remote(self._job, rank, address)
                for rank, actor in enumerate(self._actors)], done)

    def update(self, weights: Weights, done: Done) -> None:
        _watch([actor.update.remote(weights.version, weights.parcels[part], weights.sums)
                for part, actor in enumerate(self._actors)], done)

    def sample(self, number: int, groups: Sequence[Group], done: Done) -> None:
        _watch([actor.sample.remote(number, groups) for actor in self._actors], done)

    def interrupt(self, number: int) -> None:
        self._actors[0].interrupt.remote(number)

    def progress(self) -> int | None:
        """What the first rank said last of how far it is; asks again, and waits for nothing."""
        ray = load_ray()
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with suppress(ray.exceptions.RayError):  # its end is told to what it works on
                self._heard = ray.get(self._asked)
            self._asked = None
        if self._asked is None:
            self._asked = self._actors[0].progress.remote()
        return self._heard

    def lost(self, error: BaseException) -> bool:
        """Whether an error means that a rank is dead, be it that it only lost another one. One that
        does not answer is as good as dead."""
        ray = load_ray()
        if isinstance(error, ray.exceptions.RayActorError):
            return True
        if len(self._actors) > 1:
            time.sleep(1.0)  # Ray hears of a dead process a little later than its peers
            for actor in self._actors:
                try:
                    ray.get(actor.alive.remote(), timeout=_ANSWER)
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                    return True
        return False

    def cause(self, error: BaseException) -> BaseException:
        """What was raised in the rank."""
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, BaseException) else error

    def close(self) -> None:
        """Ends its ranks, with the processes that they have started."""
        ray = load_ray()
        with suppress(Exception):  # a dead one has nothing to close
            ray.get([actor.close.remote() for actor in self._actors], timeout=5.0)
        self.kill()

    def kill(self) -> None:
        for actor in self._actors:
            load_ray().kill(actor)


def make_replica(job: RLJob, reserved: Reserved, index: int, place: Place) -> Replica:
    """New actors in the bundles of replica ``index``."""
    from kilter.rl.distributed.worker import RolloutRank

    group = reserved.replicas[index]
    return Replica([reserved.actor(RolloutRank, group, part).remote(place)
                    for part in range(job.rollout.tp)], job)


def _watch(references: Sequence[Any], done: Done) -> None:
    futures = [reference.future() for reference in references]
    lock, left, told = threading.Lock(), len(futures), False

    def one(future: Any) -> None:
        nonlocal left, told
        error = future.exception()
        with lock:
            left -= 1
            if told or (error is None and left):
                return
            told = True
        done(None if error is not None else futures[0].result(), error)

    for future in futures:
        future.add_done_callback(one)
