"""The trainer's weights into the ranks' rollout parts, group by group, by a `Plan`'s messages.

    held = gather_holdings(spread.local, world)           # once
    parts = rollout_parts(whole_model, degree)
    groups = consecutive_groups(world.size, degree)
    plan = make_plan(held, rollout_needs(parts, groups), rollout_formats(whole_model, dtype))
    sync = WeightSync(plan, world)
    ...
    for tensors in sync.send(spread.local, version):      # of the embedding, of layer 0, ...
        engine.take(tensors)
    print(sync.report)

Training shards stay where they are, so there is no way back to send. Above them one group of
parameters is alive at a time. Values are those of training, rounded where the rollout holds them in
a narrower format, and before they travel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_reduce_sum
from kilter.comm.objects import gather_objects
from kilter.parallel.checksum import checksum, combined
from kilter.parallel.shards import Box, Shard
from kilter.rl.reshard_plan import Exchange, Group, Plan

Local = Mapping[str, tuple[Tensor, Shard]]  # `Spread.local`: this rank's parameters


@dataclass(frozen=True)
class RolloutWeights:
    """What one update of the rollout's weights was.

    Attributes:
        version: of the weights, as the caller counts them.
        received_bytes, sent_bytes: by rank.
        seconds: this rank spent on it, without what the caller did with the tensors.
        tensors, changed: parameters that were sent, and those of them whose bits are not those of
            the update before (of the first one: all).
        checksum: of the bits of all of them, the same in every layout; trainer and rollouts have
            been found to agree in it.
    """

    version: int
    received_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    seconds: float
    tensors: int
    changed: int
    checksum: int

    def __str__(self) -> str:
        return (f"weights {self.version}: {self.changed} of {self.tensors} tensors changed, "
                f"checksum {self.checksum:016x}, at most {max(self.received_bytes):,} bytes to a "
                f"rank, {sum(self.received_bytes):,} in all, {self.seconds:.3f} s")


def gather_holdings(local: Local, world: Axis) -> list[dict[str, Shard]]:
    """By rank, what each holds; a rank of another pipeline stage lacks names. Collective, once
    before the first plan."""
    return gather_objects({name: shard for name, (_, shard) in local.items()}, world)


@torch.no_grad()
def reshard(local: Local, plan: Plan, world: Axis) -> Iterator[dict[str, Tensor]]:
    """This rank's rollout tensors by name, one group of parameters after the other. Collective:
    all ranks take all groups.

    A group is emptied when the next one is asked for, so that its memory is free by then; what is
    to stay must be taken out or copied.

    Raises:
        ValueError: if the plan is for another number of ranks, or this rank holds other parts than
            those it was made for.
    """
    _check(local, plan, world)
    for group in plan.groups:
        tensors = _assembled(local, plan, group, world)
        yield tensors
        tensors.clear()


class WeightSync:
    """Updates of the rollout's weights, one after the other, and what each was.

    Attributes:
        report: of the last update that came to its end.
    """

    def __init__(self, plan: Plan, world: Axis) -> None:
        self.plan, self._world = plan, world
        self.report: RolloutWeights | None = None
        self._replicas = {name: _replicas(plan, name) for name in plan.names}
        self._last: list[int] | None = None  # checksums by parameter

    @torch.no_grad()
    def send(self, local: Local, version: int) -> Iterator[dict[str, Tensor]]:
        """As `reshard`; at the end every rank has the report.

        Raises:
            ValueError: as `reshard`.
            RuntimeError: if what arrived is not what the trainer has.
        """
        plan, world = self.plan, self._world
        needed, device = plan.needed[world.index], _device(local)
        arrived: dict[str, Tensor] = {}
        seconds, start = 0.0, time.perf_counter()
        for tensors in reshard(local, plan, world):
            for name in tensors:  # and keep none of them: its memory is to be free after the group
                arrived[name] = checksum(
                    ((box, part) for box, own, part in needed[name].parts(tensors[name]) if own),
                    plan.formats[name], device)
            seconds += time.perf_counter() - start
            yield tensors
            start = time.perf_counter()
        sent = own_checksums(local, plan, world.index)
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        both = torch.stack([*sent, *(arrived.get(n, nothing) for n in plan.names)])
        sums = all_reduce_sum(both, world).tolist()
        ours, theirs = sums[:len(sent)], sums[len(sent):]
        self._compare(ours, theirs)
        changed = (len(ours) if self._last is None else
                   sum(a != b for a, b in zip(ours, self._last, strict=True)))
        self._last = ours
        self.report = RolloutWeights(
            version, tuple(map(plan.received_bytes, range(plan.world))),
            tuple(map(plan.sent_bytes, range(plan.world))),
            seconds + time.perf_counter() - start, len(ours), changed, combined(plan.names, ours))

    def _compare(self, ours: list[int], theirs: list[int]) -> None:
        """Of every parameter as many copies arrived as there are replicas."""
        wrong = [name for name, a, b in zip(self.plan.names, ours, theirs, strict=True)
                 if (a * self._replicas[name] - b) % (1 << 64)]
        if wrong:
            raise RuntimeError(f"The weights that arrived for rollouts are not the trainer's: "
                               f"{', '.join(wrong[:20])} ({len(wrong)} of {len(ours)}) differ in "
                               f"their checksums. The trainer's weights must not change while they "
                               f"are sent.")


def own_checksums(local: Local, plan: Plan, rank: int) -> list[Tensor]:
    """Of every parameter, that of what a rank counts for."""

    def counted(name: str) -> Iterator[tuple[Box, Tensor]]:
        shard = plan.counted[rank].get(name)
        for box in shard.boxes if shard is not None else ():
            yield box, view_of(*local[name], box)

    device = _device(local)
    return [checksum(counted(name), plan.formats[name], device) for name in plan.names]


def view_of(local: Tensor, shard: Shard, box: Box) -> Tensor:
    """A box of the whole in a local tensor; it lies in one of the shard's boxes."""
    for outer, _, part in shard.parts(local):
        if outer.overlap(box) == box:
            return part[box.within(outer)]
    raise ValueError(f"A rank that holds {[(b.start, b.size) for b in shard.boxes]} of a parameter "
                     f"was to send or take {box.start, box.size}; make a new plan for this layout.")


def _assembled(local: Local, plan: Plan, group: Group, world: Axis) -> dict[str, Tensor]:
    needed, device = plan.needed[world.index], _device(local)
    tensors: dict[str, Tensor] = {}
    for exchange in group.exchanges:
        for name in exchange.names:
            if name in needed:
                tensors[name] = _buffer(needed[name].local_shape, plan.formats[name], device)
        _run(exchange, local, tensors, plan, world)
        for name in exchange.names:
            if name in needed and name in local:
                for box, _, view in needed[name].parts(tensors[name]):
                    for mine, _, part in local[name][1].parts(local[name][0]):
                        both = box.overlap(mine)
                        if both is not None:
                            view[both.within(box)].copy_(part[both.within(mine)])
    return {name: tensors[name] for name in needed if name in tensors}


def _run(exchange: Exchange, local: Local, tensors: dict[str, Tensor], plan: Plan, world: Axis
         ) -> None:
    """Sends and receives; straight from and into place where that is one piece of memory."""
    mine = world.index
    copies: dict[tuple[str, Box], Tensor] = {}  # what goes to several ranks is copied once
    arriving: list[tuple[Tensor, Tensor]] = []
    operations = []
    for tag, transfer in enumerate(exchange.transfers):
        name, box = transfer.name, transfer.box
        if transfer.source == mine:
            view = view_of(*local[name], box).detach()
            if view.dtype != plan.formats[name] or not view.is_contiguous():
                if (name, box) not in copies:
                    copy = _buffer(box.size, plan.formats[name], view.device)
                    copies[name, box] = copy.copy_(view)
                view = copies[name, box]
            operations.append(dist.P2POp(dist.isend, view, world.ranks[transfer.destination],
                                         world.members, tag))
        elif transfer.destination == mine:
            view = view_of(tensors[name], plan.needed[mine][name], box)
            target = view
            if not view.is_contiguous():
                target = _buffer(box.size, view.dtype, view.device)
                arriving.append((view, target))
            operations.append(dist.P2POp(dist.irecv, target, world.ranks[transfer.source],
                                         world.members, tag))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for view, target in arriving:
        view.copy_(target)


def _device(local: Local) -> torch.device:
    return next((tensor.device for tensor, _ in local.values()), torch.device("cpu"))


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every tensor that resharding takes memory for."""
    return torch.empty(shape, dtype=dtype, device=device)


def _replicas(plan: Plan, name: str) -> int:
    """How many times the rollout parts of all ranks together hold a parameter."""
    shards = [shards[name] for shards in plan.needed if name in shards]
    owned = sum(box.numel for shard in shards
                for box, own in zip(shard.boxes, shard.owned, strict=True) if own)
    return owned // Shard.whole(shards[0].shape).numel


def _check(local: Local, plan: Plan, world: Axis) -> None:
    if plan.world != world.size:
        raise ValueError(f"The plan is for {plan.world} ranks but {world.name} has {world.size}; "
                         f"make one for this world.")
    held = plan.held[world.index]
    wrong = [name for name, shard in held.items()
             if name not in local or local[name][1].boxes != shard.boxes]
    wrong += [name for name in plan.names if name in local and name not in held]
    if wrong:
        raise ValueError(f"Rank {world.index} does not hold what the plan was made for: "
                         f"{', '.join(wrong[:20])}; gather the holdings again and make a new plan.")
