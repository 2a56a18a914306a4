"""`kilter rl` with ``placement.ray``: reserves room, starts the trainer's ranks as actors, waits
for their end, and starts them again from the last checkpoint if one dies."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kilter.ops.cpu import library
from kilter.rl.config import RLJob
from kilter.rl.distributed.cluster import Reserved, connected, device_of, reserved
from kilter.rl.distributed.rollouts import RolloutsLost
from kilter.train.elastic import Exit, Program
from kilter.train.loop import stop_signals

_GRACE = 5.0  # seconds that ranks get to notice that another one failed
_TURN = 0.5  # seconds between looks at whether we are to stop
_ANSWER = 60.0  # seconds in which a rank that is alive answers, on a busy machine too


def run(program: Program, job: RLJob) -> Exit:
    """Runs a job on a cluster.

    Raises:
        ValueError: for a job that cannot be run, before anything was started, or, as OSError,
            for what a rank found so.
    """
    program.open(job)  # says what is wrong
    Path(job.output).mkdir(parents=True, exist_ok=True)
    library.available()  # compiled once, before the ranks of this machine need it
    with connected() as ray:
        device = device_of(job)
        with reserved(job, device) as room, stop_signals() as stop:
            for restart in range(job.launch.max_restarts + 1):
                if restart:
                    print(f"A rank died; restart {restart} of at most {job.launch.max_restarts}.",
                          file=sys.stderr, flush=True)
                ending = _Attempt(ray, program, job, room, device).run(stop)
                if isinstance(ending, Exit):
                    return ending
    return Exit(1, f"The run stopped: {ending}, and {job.launch.max_restarts} restarts did not "
                "help. The same command goes on from the last checkpoint.")


class _Attempt:
    """The trainer's ranks from their start to their end."""

    def __init__(self, ray: Any, program: Program, job: RLJob, room: Reserved, device: str) -> None:
        from kilter.rl.distributed.worker import Place, TrainerRank

        place = Place(os.getcwd(), device, job.launch.threads or max(1, int(job.placement.cpus)))
        self._ray, self._program, self._job = ray, program, job
        self._ranks = [room.actor(TrainerRank, room.trainer, rank).remote(place)
                       for rank in range(job.placement.inside(job.layout.world))]
        first = self._ranks[0]
        address = first.address.remote(job.launch.timeout)
        self._work = {actor.work.remote(job, program.open, rank, address, first, room): rank
                      for rank, actor in enumerate(self._ranks)}
        self._ended: dict[int, str] = {}
        self._failed: dict[int, BaseException] = {}

    def run(self, stop: threading.Event) -> Exit | str:
        """How it ended; as a text, why it may help to start again."""
        try:
            self._wait(stop)
        finally:
            for actor in self._ranks:
                self._ray.kill(actor)
        if not self._failed:
            missing = len(self._ended) < len(self._work)
            return (Exit(1, "The ranks were stopped before they could write a checkpoint.")
                    if missing else Exit(0, self._ended[0]))
        return self._judge()

    def _wait(self, stop: threading.Event) -> None:
        """Until all ranks have ended, or one failed and the others had time to, or until the grace
        of a stop is over. Says what they say."""
        said = self._ranks[0].said.remote(_TURN)
        deadline = stopped = float("inf")
        left, over = list(self._work), False
        while left and not over:
            over = time.monotonic() >= min(deadline, stopped)  # and then a last look
            ready, _ = self._ray.wait([*left, said], timeout=_TURN)
            if said in ready:
                ready.remove(said)
                self._say(said)
                said = self._ranks[0].said.remote(_TURN)
            for reference in ready:
                left.remove(reference)
                rank = self._work[reference]
                try:
                    self._ended[rank] = self._ray.get(reference)
                except Exception as error:
                    self._failed[rank] = error
                    deadline = min(deadline, time.monotonic() + _GRACE)
            if stop.is_set() and stopped == float("inf"):
                stopped = time.monotonic() + self._job.launch.grace
                for actor in self._ranks:
                    actor.stop.remote()
        # Two are asked for: the last lines may be in an answer that is under way.
        for last in (said, self._ranks[0].said.remote(0.0)):
            self._say(last)

    def _say(self, said: Any) -> None:
        with suppress(self._ray.exceptions.RayError):  # its end is found elsewhere
            for line in self._ray.get(said, timeout=_ANSWER):
                print(line, flush=True)

    def _judge(self) -> Exit | str:
        """The cause among the failures: an error of ours, then a dead rank, then what only lost
        the connection to it."""
        causes = {rank: getattr(error, "cause", None) or error
                  for rank, error in self._failed.items()}
        for cause in causes.values():
            if isinstance(cause, (*self._program.failures, RolloutsLost)):
                return Exit(1, str(cause))
        for cause in causes.values():
            if isinstance(cause, ValueError | OSError):
                raise cause
        dead = self._ray.exceptions.RayActorError
        rank, cause = min(causes.items(), key=lambda item: (
            not isinstance(item[1], dead), "onnection" in str(item[1]), item[0]))
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        return f"rank {rank} failed ({lines[0]})"
