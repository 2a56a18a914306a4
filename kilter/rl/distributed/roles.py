"""`Roles` of a trainer whose rollouts are in worlds of their own: what goes to them goes through
the object store, what comes from them through the trainer's first rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from kilter.comm.objects import share_result
from kilter.parallel.checksum import combined
from kilter.rl.config import RLJob
from kilter.rl.distributed.rollouts import Rollouts, Weights
from kilter.rl.distributed.weights import pack, parcel_plan, trainer_sums
from kilter.rl.experience import Rollout
from kilter.rl.prompts import Question
from kilter.rl.reshard import RolloutWeights, WeightSync, gather_holdings
from kilter.rl.reshard_plan import Plan
from kilter.rl.roles import RLInputs, Roles
from kilter.serve.params import SamplingParams

Parcels = list[list[Any]]  # by part of a replica and group of parameters: a reference, or None


class TooStale(RuntimeError):
    """A token is older than placement.max_staleness allows."""


class DistantRoles(Roles):
    """Of one rank of the trainer's world.

    Args:
        rollouts: on the first rank.
        put: makes a parcel a reference that others can fetch it by.
        deliver: (version, this rank's parcels) -> on the first rank those of all that train.
    """

    def __init__(self, job: RLJob, inputs: RLInputs, device_type: str, timeout: timedelta | None,
                 rollouts: Rollouts | None, put: Callable[[Any], Any],
                 deliver: Callable[[int, Parcels], list[Parcels] | None]) -> None:
        self._rollouts, self._put, self._deliver = rollouts, put, deliver
        self._sums: dict[str, int] = {}
        self._plan: Plan | None = None
        self._later: Plan | None = None  # from the second update on: what has been trained
        super().__init__(job, inputs, device_type, timeout)

    def sample(self, questions: Sequence[Question], step: int, params: SamplingParams,
               ahead: Callable[[int], Question] | None = None) -> list[Rollout]:
        """As `Roles.sample`; meanwhile, and after, ``ahead`` is begun.

        Raises:
            TooStale: for a token that is older than the job allows.
        """

        def work() -> list[Rollout]:
            assert self._rollouts is not None
            return self._rollouts.collect(questions, step, params, ahead)

        # No other rank is in the middle of anything, so that all can raise whatever the first does.
        rollouts = share_result(work if self._rank == 0 else None, self.world)
        assert self._version is not None
        check_staleness(rollouts, self._version, self.job.placement.max_staleness)
        return rollouts

    def told(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts.told()} if self._rollouts is not None else {}

    def _send(self, version: int) -> RolloutWeights | None:
        """Packs the actor's weights; replicas take them when they have interrupted what they do."""
        start = time.perf_counter()
        if self.policy is None or self._plan is None:
            return None
        plan, parts = self._plan, self.job.rollout.tp
        axis = self.policy.spread.mesh.axis("world")
        local = {name: (parameter.detach(), shard)
                 for name, (parameter, shard) in self.policy.spread.local.items()}
        parcels: Parcels = [[] for _ in range(parts)]
        for group in pack(local, plan, axis.index, parts):
            for part, pieces in enumerate(group):
                parcels[part].append(self._put(pieces) if pieces else None)
        sums = trainer_sums(local, plan, axis.index, axis)
        every = self._deliver(version, parcels)
        if self._rollouts is not None:
            assert every is not None
            self._rollouts.publish(Weights(
                version, self._later is None or not self._sums, sums,
                tuple(tuple(tuple(ref for rank in every if (ref := rank[part][group]) is not None)
                            for group in range(len(plan.groups))) for part in range(parts))))
        changed = sum(self._sums.get(name) != value for name, value in sums.items())
        replicas = self.job.placement.rollout // parts
        report = RolloutWeights(
            version,
            tuple(0 for _ in range(axis.size))
            + tuple(map(plan.received_bytes, range(axis.size, plan.world))) * replicas,
            tuple(map(plan.sent_bytes, range(axis.size))), time.perf_counter() - start, len(sums),
            changed, combined(plan.names, sums.values()))
        if self._later is not None and not self._sums:
            self._plan = self._later
        self._sums |= sums
        return report

    def _make_sync(self) -> WeightSync | None:
        """Plans in place of a `WeightSync`, whose ranks would have to be of one world."""
        if self.policy is None:
            return None
        spread = self.policy.spread
        held = gather_holdings(spread.local, spread.mesh.axis("world"))
        parts, formats = self._replica()
        self._plan = parcel_plan(held, parts, formats)
        if self.job.lora is not None:
            self._later = parcel_plan(held, parts, formats, adapters_only=True)
        return None


def check_staleness(rollouts: Sequence[Rollout], version: int, most: int) -> None:
    """Raises `TooStale` for a token that is more than ``most`` versions older than the trainer's
    weights, or newer."""
    for rollout in rollouts:
        versions = [own for own in rollout.versions if own >= 0]
        if versions and not version - most <= min(versions) <= max(versions) <= version:
            raise TooStale(
                f"Sample {rollout.id!r} has tokens of the weights {min(versions)} to "
                f"{max(versions)}, but the trainer's are {version} and placement.max_staleness is "
                f"{most}. That is a fault of the hand-out of prompts, not of the job.")
