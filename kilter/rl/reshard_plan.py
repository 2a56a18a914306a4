"""From a trainer's shards to rollout parts by the least bytes: who sends which box to whom.

    rank 0  holds ▓▓░░░░░░   needs ▓▓▓▓          a rank receives exactly
    rank 1  holds ░░▓▓░░░░   needs ▓▓▓▓            what it needs − what it holds
    rank 2  holds ░░░░▓▓░░   needs     ▓▓▓▓
    rank 3  holds ░░░░░░▓▓   needs     ▓▓▓▓      of one of the ranks that hold it

All of it is arithmetic on boxes of whole parameters (`kilter.parallel.shards`): it knows neither
FSDP nor tensor parallelism, and needs no process group. A parameter is cut into regions that
everybody holds whole or not at all and needs whole or not at all; what is left is to choose, among
the holders of a region, who sends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kilter.parallel.shards import Box, Shape, Shard

Shards = Mapping[str, Shard]  # one rank's part of a model: what it lacks, the mapping lacks


@dataclass(frozen=True)
class Transfer:
    """A box of a parameter on its way. It lies within one box of what its source holds and within
    one of what its destination needs."""

    name: str
    source: int
    destination: int
    box: Box


@dataclass(frozen=True)
class Exchange:
    """Parameters that travel at one time."""

    names: tuple[str, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Group:
    """Parameters that are assembled together: a layer, the embedding, the last norm or the head.

    Parameters whose pieces must be copied on the way (to be rounded, or because they are not one
    piece of memory) travel alone and first, the largest before others, when little else of the
    group is there yet; the rest travels at once, without copies. So in a decoder's layer no more is
    alive at a time than the whole layer takes in float32 (`Plan.peak_bytes`).
    """

    name: str
    exchanges: tuple[Exchange, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for exchange in self.exchanges for name in exchange.names)


@dataclass(frozen=True)
class Plan:
    """What every rank does so that each has its rollout part.

    Attributes:
        held, needed: what each rank has of the parameters, and what it is to have.
        formats: the dtype that each parameter travels and arrives in.
        groups: in the order of the model.
        counted: for each rank the regions it counts for: of all ranks that hold an element, one
            does (`kilter.parallel.checksum`).
    """

    held: tuple[Shards, ...]
    needed: tuple[Shards, ...]
    formats: Mapping[str, torch.dtype]
    groups: tuple[Group, ...]
    counted: tuple[Shards, ...] = field(repr=False)

    @property
    def world(self) -> int:
        return len(self.held)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.names)

    def received_bytes(self, rank: int) -> int:
        """The least this rank can receive: needed elements that it does not hold."""
        return self.needed_bytes(rank) - sum(
            a.overlap_numel(b) * self.formats[name].itemsize
            for name, a, b in self._pairs(rank))

    def sent_bytes(self, rank: int) -> int:
        return self._sent[rank]

    def needed_bytes(self, rank: int) -> int:
        """Of this rank's rollout part."""
        return sum(shard.numel * self.formats[name].itemsize
                   for name, shard in self.needed[rank].items())

    def peak_bytes(self, rank: int) -> int:
        """The most that is alive on this rank at a time above its shards, if the trainer holds
        float32 and every group is gone before the next: the group's tensors that are there, and
        copies of what is on its way."""
        peak = 0
        for group in self.groups:
            alive = 0
            for exchange in group.exchanges:
                alive += sum(self.needed[rank][name].numel * self.formats[name].itemsize
                             for name in exchange.names if name in self.needed[rank])
                copies = {(t.name, t.box) for t in exchange.transfers
                          if t.source == rank and self._copied_by_source(t)}
                both = [*copies, *((t.name, t.box) for t in exchange.transfers
                                   if t.destination == rank and self._copied_by_destination(t))]
                peak = max(peak, alive + sum(box.numel * self.formats[name].itemsize
                                             for name, box in both))
        return peak

    def _copied_by_source(self, t: Transfer) -> bool:
        return (self.formats[t.name] != torch.float32
                or _is_strided(t.box, self.held[t.source][t.name]))

    def _copied_by_destination(self, t: Transfer) -> bool:
        return _is_strided(t.box, self.needed[t.destination][t.name])

    @cached_property
    def _sent(self) -> Counter[int]:
        sent: Counter[int] = Counter()
        for group in self.groups:
            for exchange in group.exchanges:
                for t in exchange.transfers:
                    sent[t.source] += t.box.numel * self.formats[t.name].itemsize
        return sent

    def _pairs(self, rank: int) -> Iterator[tuple[str, _Boxes, _Boxes]]:
        for name, shard in self.needed[rank].items():
            if name in self.held[rank]:
                yield name, _Boxes(shard.boxes), _Boxes(self.held[rank][name].boxes)


def make_plan(held: Sequence[Shards], needed: Sequence[Shards],
              formats: Mapping[str, torch.dtype] | None = None, *, adapters_only: bool = False
              ) -> Plan:
    """The plan of least bytes. The same arguments give the same plan on every rank.

    Sources are chosen so that ranks send evenly within each group of parameters: pieces that few
    hold first, large ones before small, each from the holder that sends least so far.

    Args:
        held: by rank, what it holds (`kilter.rl.reshard.gather_holdings`,
            `kilter.rl.reshard_layout.trainer_shards`).
        needed: by rank, what it is to have (`kilter.rl.reshard_layout.rollout_needs`).
        formats: dtype by parameter; default float32.
        adapters_only: only parameters of adapters, for an engine that has the others already.

    Raises:
        ValueError: listing parameters that no rank, or not all of which any rank, holds, or whose
            whole shape ranks do not agree on.
    """
    if len(held) != len(needed):
        raise ValueError(f"{len(held)} ranks hold parameters but {len(needed)} need some; a plan "
                         f"is for one world of ranks.")
    names = list(dict.fromkeys(name for shards in needed for name in shards))
    if adapters_only:
        names = [name for name in names if ".adapter." in name]
        if not names:
            raise ValueError("Only adapters were to be sent, but the model has none; leave "
                             "adapters_only out.")
    formats = {name: (formats or {}).get(name, torch.float32) for name in names}
    held = tuple({name: s[name] for name in names if name in s} for s in held)
    needed = tuple({name: s[name] for name in names if name in s} for s in needed)
    shapes = _shapes(names, held, needed)
    known: dict[object, list[_Region]] = {}  # layers are alike
    regions: dict[str, list[_Region]] = {}
    for name in names:
        parts = [tuple(shards[name].boxes if name in shards else () for shards in side)
                 for side in (held, needed)]
        key = (shapes[name], *parts)
        if key not in known:
            known[key] = _regions(shapes[name], *parts)
        regions[name] = known[key]
    gone = [name for name in names if any(r.needers and not r.holders for r in regions[name])]
    if gone:
        raise ValueError(f"Rollouts need elements that no rank holds, of {_some(gone)}; give the "
                         f"holdings of all ranks of the trainer.")
    total: Counter[int] = Counter()
    groups = [_group(name, members, regions, held, needed, formats, total)
              for name, members in _grouped(names).items()]
    counted: list[dict[str, Shard]] = [{} for _ in held]
    for name in names:
        for rank, shard in enumerate(counted):
            boxes = [r.box for r in regions[name] if r.holders and r.holders[0] == rank]
            if boxes:
                shard[name] = Shard(shapes[name], tuple(boxes), (True,) * len(boxes))
    return Plan(held, needed, formats, tuple(groups), tuple(counted))


def full_gather(held: Sequence[Shards], formats: Mapping[str, torch.dtype] | None = None) -> Plan:
    """What is done where nobody plans: every rank receives all of every parameter, to cut its part
    out of them afterwards."""
    whole = {name: Shard.whole(shard.shape) for shards in held for name, shard in shards.items()}
    return make_plan(held, [whole] * len(held), formats)


def group_of(name: str) -> str:
    """The group that a parameter is assembled in."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


@dataclass(frozen=True)
class _Region:
    """A box that each rank holds whole or not at all, and needs whole or not at all."""

    box: Box
    holders: tuple[int, ...] = ()
    needers: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Boxes:
    """Boxes without common elements."""

    boxes: tuple[Box, ...]

    def overlap_numel(self, other: _Boxes) -> int:
        return sum(both.numel for a in self.boxes for b in other.boxes
                   if (both := a.overlap(b)) is not None)

    def index(self, box: Box) -> int:
        """Which of them holds all of a box."""
        return next(i for i, outer in enumerate(self.boxes) if outer.overlap(box) == box)


def _regions(shape: Shape, held: Sequence[tuple[Box, ...]], needed: Sequence[tuple[Box, ...]]
             ) -> list[_Region]:
    regions = [_Region(Box((0,) * len(shape), shape))]
    for rank, (holds, needs) in enumerate(zip(held, needed, strict=True)):
        for side, boxes in (("holders", holds), ("needers", needs)):
            for box in boxes:
                cut = []
                for region in regions:
                    common = region.box.overlap(box)
                    if common is None:
                        cut.append(region)
                        continue
                    cut.append(replace(region, box=common,
                                       **{side: (*getattr(region, side), rank)}))
                    cut += [replace(region, box=rest) for rest in _outside(region.box, common)]
                regions = cut
    return sorted(regions, key=lambda region: region.box.start)


def _outside(box: Box, inner: Box) -> Iterator[Box]:
    """The rest of a box without one that lies in it, cut along rows first."""
    start, size = list(box.start), list(box.size)
    for dim, (first, count) in enumerate(zip(inner.start, inner.size, strict=True)):
        for low, high in ((start[dim], first), (first + count, start[dim] + size[dim])):
            if low < high:
                yield Box((*start[:dim], low, *start[dim + 1:]),
                          (*size[:dim], high - low, *size[dim + 1:]))
        start[dim], size[dim] = first, count


def _group(name: str, members: Sequence[str], regions: Mapping[str, list[_Region]],
           held: Sequence[Shards], needed: Sequence[Shards],
           formats: Mapping[str, torch.dtype], total: Counter[int]) -> Group:
    """Chooses sources; ``total`` is what ranks sent in the groups before, and is brought up."""
    pieces = [(member, region, rank, region.box.numel * formats[member].itemsize)
              for member in members for region in regions[member] for rank in region.needers
              if rank not in region.holders]
    pieces.sort(key=lambda piece: (len(piece[1].holders), -piece[3]))
    here: Counter[int] = Counter()
    chosen: dict[str, dict[tuple[int, int], list[Box]]] = {member: {} for member in members}
    for member, region, rank, nbytes in pieces:
        *_, source = min((here[holder], total[holder], abs(holder - rank), holder)
                         for holder in region.holders)
        here[source] += nbytes
        chosen[member].setdefault((source, rank), []).append(region.box)
    total.update(here)
    transfers: dict[str, list[Transfer]] = {}
    for member in members:
        transfers[member] = [
            Transfer(member, source, rank, box)
            for (source, rank), boxes in sorted(chosen[member].items())
            for box in _joined(boxes, _Boxes(held[source][member].boxes),
                               _Boxes(needed[rank][member].boxes))]
    copied = [member for member in members
              if any(_is_copied(t, held, needed, formats) for t in transfers[member])]
    copied.sort(key=lambda m: -sum(r.box.numel for r in regions[m]) * formats[m].itemsize)
    straight = [member for member in members if member not in copied]
    exchanges = [Exchange((member,), tuple(transfers[member])) for member in copied]
    if straight:
        exchanges.append(Exchange(tuple(straight),
                                  tuple(t for member in straight for t in transfers[member])))
    return Group(name, tuple(exchanges))


def _joined(boxes: Sequence[Box], source: _Boxes, destination: _Boxes) -> list[Box]:
    """Boxes that follow on each other as one, where they do so on both sides."""
    found = list(boxes)
    for dim in range(len(found[0].start)):
        found.sort(key=lambda box: (*box.start[:dim], *box.start[dim + 1:], box.start[dim]))
        joined = [found[0]]
        for box in found[1:]:
            last = joined[-1]
            end = (*last.start[:dim], last.start[dim] + last.size[dim], *last.start[dim + 1:])
            across = [size[:dim] + size[dim + 1:] for size in (last.size, box.size)]
            if (box.start == end and across[0] == across[1]
                    and source.index(last) == source.index(box)
                    and destination.index(last) == destination.index(box)):
                joined[-1] = Box(last.start, (*last.size[:dim], last.size[dim] + box.size[dim],
                                              *last.size[dim + 1:]))
            else:
                joined.append(box)
        found = joined
    return sorted(found, key=lambda box: box.start)


def _is_copied(t: Transfer, held: Sequence[Shards], needed: Sequence[Shards],
               formats: Mapping[str, torch.dtype]) -> bool:
    """Whether a transfer cannot go from the trainer's own memory into the rollout tensor."""
    return (formats[t.name] != torch.float32 or _is_strided(t.box, held[t.source][t.name])
            or _is_strided(t.box, needed[t.destination][t.name]))


def _is_strided(box: Box, shard: Shard) -> bool:
    """Whether a box is not one piece of memory in the local tensor that holds it."""
    return box.size[0] > 1 and box.size[1:] != shard.boxes[0].size[1:]


def _grouped(names: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    return groups


def _shapes(names: Sequence[str], held: Sequence[Shards], needed: Sequence[Shards]
            ) -> dict[str, Shape]:
    shapes: dict[str, set[Shape]] = {name: set() for name in names}
    for shards in (*held, *needed):
        for name, shard in shards.items():
            shapes[name].add(tuple(shard.shape))
    wrong = [f"{name} is {' and '.join(map(str, map(list, sorted(found))))}"
             for name, found in shapes.items() if len(found) != 1]
    if wrong:
        raise ValueError(f"Ranks disagree about whole shapes: {_some(wrong)}.")
    return {name: found.pop() for name, found in shapes.items()}


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - 20} more" if len(items) > 20 else ""
    return ", ".join(items[:20]) + more
