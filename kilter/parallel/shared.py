"""Gradients of what several tensor-parallel ranks hold alike: all of them take one rank's.

These are norms, biases that are added after a sum, a KV head that several ranks hold, the whole
sides of adapters. Their gradients have the same bits on all tensor-parallel ranks until they are
summed over data-parallel ones. A process group adds three numbers or more in an order that depends
on where they stand in a buffer, and buffers differ where shares of heads or of the vocabulary do:

    tp rank 0   [ qkv of 2 groups          | norm ]   norm = (a + b) + c
    tp rank 1   [ qkv of 1 group | norm ]             norm = a + (b + c)

Copies would drift apart by such roundings, and a resume, which reads one rank's, would not be the
run that was not cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kilter.comm.collectives import all_to_all_rows
from kilter.comm.objects import gather_objects
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.parallel.data import Held
from kilter.parallel.shards import Box, Shard

Places = list[list[tuple[Box, bool]]]  # of each parameter, the boxes held and whether they are own


@dataclass(frozen=True)
class _Piece:
    """Elements that are on two ranks: of which parameter and box here, and where in that."""

    parameter: int
    box: int
    within: tuple[slice, ...]
    numel: int


class SharedGrads:
    """This rank's part in it. Made and called by all ranks of a stage together.

    Args:
        held: what this rank holds of the stage's parameters.
        shards: what its place on the tensor axis has of them, and which of it counts there.
    """

    def __init__(self, held: Sequence[Held], shards: Mapping[str, Shard], mesh: Mesh) -> None:
        self._axis = axis = mesh.axis("dp_cp_tp")
        partly = {h.name for h in held if not all(shards[h.name].owned)}
        names = set().union(*gather_objects(partly, mesh.axis("tp")))
        self._held = [h for h in held if h.name in names]
        # Of ranks that hold the same elements for the sake of the data axes, each asks its own
        # copy of the model: no more is sent than tensor-parallel ranks have in common.
        sharded = mesh.layout.zero and mesh.axis("dp_shard_cp").size > 1
        copy = mesh.axis("replicate" if sharded else "dp_cp").index
        mine = [_places(h.shard, shards[h.name]) for h in self._held]
        every: list[tuple[int, Places]] = gather_objects((copy, mine), axis) if names else []
        same = [(rank, places) for rank, (other, places) in enumerate(every) if other == copy]
        self._give = {rank: list(_given(mine, places)) for rank, places in same}
        self._take = {rank: list(_taken(places, mine)) for rank, places in same}

    @torch.no_grad()
    def agree(self) -> None:
        """After the sums over data-parallel ranks."""
        if not self._held:
            return
        parts = []
        for held in self._held:
            assert held.tensor.grad is not None
            parts.append([part for _, _, part in held.shard.parts(held.tensor.grad)])
        give, take = ([some.get(rank, []) for rank in range(self._axis.size)]
                      for some in (self._give, self._take))
        flat = torch.cat([parts[0][0].new_empty(0), *(
            parts[p.parameter][p.box][p.within].reshape(-1) for some in give for p in some)])
        came = all_to_all_rows(flat, self._axis, *(
            [sum(p.numel for p in some) for some in which] for which in (give, take)))
        pieces = [p for some in take for p in some]
        for p, values in zip(pieces, came.split([p.numel for p in pieces]), strict=True):
            place = parts[p.parameter][p.box][p.within]
            place.copy_(values.view(place.shape))


def may_differ(layout: Layout) -> bool:
    """Whether tensor-parallel ranks may get different sums over data-parallel ones: two numbers
    have one sum."""
    shard, replicate = layout.shard * layout.cp, layout.replicate
    if layout.zero == 0 or shard == 1:
        shard, replicate = layout.dp * layout.cp, 1
    return layout.tp > 1 and max(shard, replicate) > 2


def _places(held: Shard, tensor: Shard) -> list[tuple[Box, bool]]:
    """A rank's boxes, and whether its place on the tensor axis is the one that counts for them."""
    owned = [box for box, own in zip(tensor.boxes, tensor.owned, strict=True) if own]
    return [(box, any(box.overlap(other) == box for other in owned)) for box in held.boxes]


def _given(mine: Places, theirs: Places) -> Iterator[_Piece]:
    """What of this rank's own another one holds too, in the order of that one's boxes."""
    for parameter, (ours, wanted) in enumerate(zip(mine, theirs, strict=True)):
        for box, own in wanted:
            for i, (source, is_own) in enumerate(ours):
                if not own and is_own and (common := source.overlap(box)):
                    yield _Piece(parameter, i, common.within(source), common.numel)


def _taken(theirs: Places, mine: Places) -> Iterator[_Piece]:
    """The same, seen from the other side."""
    for parameter, (ours, wanted) in enumerate(zip(theirs, mine, strict=True)):
        for i, (box, own) in enumerate(wanted):
            for source, is_own in ours:
                if not own and is_own and (common := source.overlap(box)):
                    yield _Piece(parameter, i, common.within(box), common.numel)
