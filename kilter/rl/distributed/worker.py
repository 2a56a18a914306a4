"""What an actor of Ray does: a rank of the trainer's world, or a rank of a rollout replica's.

Methods run on threads of their own, so that a rank can be told to stop, and a replica to interrupt
its answers, while it works.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.ops.cpu import library
from kilter.rl.config import RLJob
from kilter.rl.distributed.book import Group
from kilter.rl.distributed.cluster import Reserved, load_ray
from kilter.rl.distributed.replica import make_replica
from kilter.rl.distributed.roles import DistantRoles, Parcels
from kilter.rl.distributed.rollouts import Rollouts
from kilter.rl.distributed.weights import Piece, unpack
from kilter.rl.environment import environment_of
from kilter.rl.judging import close_rewards, judged
from kilter.rl.loop import RLRun
from kilter.rl.rewards import build_rewards
from kilter.rl.roles import RLInputs, Roles
from kilter.rl.rollout import RolloutEngine
from kilter.train.inputs import open_start

Address = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """How the driver works, which its actors do too.

    Attributes:
        folder: relative paths of a job are in it.
        device: ``cpu`` or ``cuda``.
        threads: of a rank.
    """

    folder: str
    device: str
    threads: int


class Rank:
    """What both kinds of rank are."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: dist.Store | None = None

    def address(self, timeout: float) -> Address:
        """Of the first rank: where the others of its world find it."""
        host = load_ray().util.get_node_ip_address()
        store = dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout),
                              wait_for_workers=False)
        self._store = store
        return host, store.port

    def alive(self) -> bool:
        return True

    def _join(self, rank: int, world: int, address: Address, timeout: timedelta) -> None:
        """Becomes a rank of a world; on the thread that will work.

        Raises:
            ValueError: if this machine does not have the job's folder.
        """
        folder = self._place.folder
        if not Path(folder).is_dir():
            raise ValueError(
                f"The folder {folder}, where the command was started, is not on the machine "
                f"{os.uname().nodename}. All machines of the cluster need the job's files under "
                "the same paths; start it in a folder that they share.")
        os.chdir(folder)
        sys.path.insert(0, folder)  # the job's own tasks and rewards
        self._threads()
        if self._place.device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each actor its own
        if world == 1:
            return
        store = self._store or dist.TCPStore(*address, None, False, timeout)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self._place.device == "cuda" else "gloo",
                                store=store, rank=rank, world_size=world, timeout=timeout)

    def _threads(self) -> None:
        """A thread's own number of threads, too."""
        torch.set_num_threads(self._place.threads)
        if library.available():
            library.set_num_threads(self._place.threads)


class TrainerRank(Rank):
    """A rank of the loop."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._stop = threading.Event()
        self._lines = _Lines()
        self._parcels = _Mailbox()

    def work(self, job: RLJob, open_job: Callable[[RLJob], RLInputs], rank: int, address: Address,
             first: Any, reserved: Reserved) -> str:
        """The run; how it ended, as a sentence.

        Args:
            open_job: opens and checks what the job names.
            first: the actor of rank 0.
            reserved: what the rollout's replicas may have, where they are apart.
        """
        world = job.placement.inside(job.layout.world)
        timeout = timedelta(seconds=job.launch.timeout)
        self._join(rank, world, address, timeout)
        if rank == 0:  # alone first: it says what is wrong
            opened = open_job(job)
        if world > 1:
            dist.barrier()
        if rank != 0:
            opened = open_job(job)
        with ExitStack() as closing:
            if rank == 0:
                closing.enter_context(contextlib.redirect_stdout(self._lines))
            roles = self._roles(job, opened, timeout, rank, first, reserved, closing)
            text = RLRun(job, opened, roles, closing).go(self._stop).text
        if world > 1:
            dist.barrier()  # nobody leaves while another still needs it
            dist.destroy_process_group()
        return text

    def stop(self) -> None:
        """After the present step, with a checkpoint."""
        self._stop.set()

    def said(self, wait: float) -> list[str]:
        """Lines for the console since the last call, or those of the next ``wait`` seconds."""
        return self._lines.take(wait)

    def take(self, version: int, rank: int, parcels: Parcels) -> None:
        """What another rank of the trainer has packed."""
        self._parcels.put((version, rank), parcels)

    def _roles(self, job: RLJob, opened: RLInputs, timeout: timedelta, rank: int, first: Any,
               reserved: Reserved, closing: ExitStack) -> Roles:
        if not job.placement.apart:
            return Roles(job, opened, self._place.device, timeout)
        ray = load_ray()
        rollouts = None
        if rank == 0:
            def make(index: int) -> Any:
                return make_replica(job, reserved, index, self._place)

            rollouts = Rollouts(job, make, job.placement.rollout // job.rollout.tp)
            closing.callback(rollouts.close)

        def deliver(version: int, parcels: Parcels) -> list[Parcels] | None:
            if rank:
                first.take.remote(version, rank, parcels)
                return None
            others = [self._parcels.get((version, other), job.launch.timeout)
                      for other in range(1, job.layout.world)]
            return [parcels, *others]

        return DistantRoles(job, opened, self._place.device, timeout, rollouts, ray.put, deliver)


class RolloutRank(Rank):
    """A rank of a replica."""

    _engine: RolloutEngine
    _job: RLJob

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._marks = 0  # pieces of work done, but for the engine's steps

    def start(self, job: RLJob, rank: int, address: Address | None) -> None:
        """Makes the engine, without weights."""
        self._job = job
        tp, timeout = job.rollout.tp, timedelta(seconds=job.launch.timeout)
        self._join(rank, tp, address or ("", 0), timeout)
        start = open_start(job.model)
        mesh = (Mesh.single(self._place.device) if tp == 1 else
                Mesh(Layout(tp=tp, sequence_parallel=False), self._place.device, timeout=timeout))
        self._tokenizer = start.tokenizer
        self._engine = RolloutEngine(start.spec, start.tokenizer,
                                     job.rollout_config(start.eos_token_ids), mesh)
        self._rewards = build_rewards(job.rewards)
        self._environment = environment_of(job.rollout.environment, start.tokenizer,
                                           start.spec.vocab_size)
        self._over = 0  # samplings that have ended
        self._marks += 1

    def progress(self) -> int:
        """A number that changes for as long as this rank gets on."""
        return self._marks + (self._engine.steps if self._marks else 0)

    def update(self, version: int, groups: Sequence[Sequence[Any]], sums: Mapping[str, int]
               ) -> None:
        """Takes new weights.

        Args:
            groups: of each group of parameters, references to what the trainer's ranks have packed
                for this rank.
        """
        self._threads()
        engine = self._engine
        fetched = (self._counted_fetch(references) for references in groups)
        engine.update(unpack(fetched, engine.shards, sums, engine.mesh.axis("tp")), version)

    def sample(self, number: int, groups: Sequence[Group]) -> list[Group]:
        """Goes on with groups of one step until they are done, or interrupted. Those that are done
        have been judged.

        Args:
            number: of this sampling, from 1.
        """
        self._threads()
        job, first = self._job, groups[0]
        try:
            found = {rollout.id: rollout for rollout in self._engine.resume(
                [rollout for group in groups for rollout in group.unfinished], first.params,
                seed=job.seed, step=first.step, environment=self._environment,
                in_flight=job.placement.in_flight)}
            after = [replace(group, rollouts=tuple(found.get(r.id, r) for r in group.rollouts))
                     for group in groups]
            questions = {group.id: group.question for group in groups}
            done = [group for group in after if not group.unfinished]
            self._marks += 1
            rewarded = {rollout.id: rollout for rollout in judged(
                [rollout for group in done for rollout in group.rollouts], questions,
                self._rewards, self._tokenizer, self._engine.mesh.axis("tp"))}
            return [replace(group, rollouts=tuple(rewarded.get(r.id, r) for r in group.rollouts))
                    for group in after]
        finally:
            self._over = number

    def interrupt(self, number: int) -> None:
        """Makes a sampling return after its present step, also if it has not begun yet."""
        while self._over < number:
            self._engine.interrupt()
            time.sleep(0.002)

    def _counted_fetch(self, references: Sequence[Any]) -> list[list[Piece]]:
        self._marks += 1
        return self._fetch(references)

    def _fetch(self, references: Sequence[Any]) -> list[list[Piece]]:
        found: list[list[Piece]] = load_ray().get(list(references))
        return found

    def close(self) -> None:
        """Ends the processes that judge answers."""
        close_rewards(self._rewards)


class _Lines(io.TextIOBase):
    """Whole lines that were written, for another thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._text = ""

    def write(self, text: str) -> int:
        with self._changed:
            self._text += text
            if "\n" in text:
                self._changed.notify_all()
        return len(text)

    def take(self, wait: float) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: "\n" in self._text, wait)
            whole, newline, rest = self._text.rpartition("\n")
            self._text = rest
            return whole.split("\n") if newline else []


class _Mailbox:
    """Things by name that one thread leaves and another waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: dict[Any, Any] = {}

    def put(self, name: Any, thing: Any) -> None:
        with self._changed:
            self._there[name] = thing
            self._changed.notify_all()

    def get(self, name: Any, timeout: float) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._there, timeout):
                raise RuntimeError(f"Rank {name[1]} of the trainer did not pack its weights in "
                                   f"{timeout:g} s (launch.timeout).")
            return self._there.pop(name)
