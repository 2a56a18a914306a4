"""An all-gather and a reduce-scatter of rows in steps, for those who compute meanwhile.

    rank 0 of 4    step 1          step 2          step 3
    sends to       1               2               3
    receives from  3               2               1

Rows go straight from the rank that has them to the one that needs them, as many bytes as in a ring.
A step is one batch of both directions (of NCCL one kernel). All ranks post their steps in this
order, so no message waits behind one that waits for it. Waiting for a step stops the host on gloo
and the current stream on NCCL; what is computed next finds the rows there either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.ops.linear import tree_add


def rows_of(place: int, rows: int) -> slice:
    """A rank's rows of all ranks', each of which has ``rows``."""
    return slice(place * rows, (place + 1) * rows)


def gather_in_steps(own: Tensor, whole: Tensor, axis: Axis) -> Iterator[int]:
    """Fills ``whole`` [n · rows, ...] with all ranks' ``own`` [rows, ...], and gives each rank's
    place on the axis as soon as its rows are there: this rank's first, with everything else posted;
    then those of the ranks before it, the nearest first. To be gone through to the end."""
    rows = own.shape[0]
    mine = whole[rows_of(axis.index, rows)]
    mine.copy_(own)
    steps = [(source, _exchange(mine, target, whole[rows_of(source, rows)], source, axis))
             for target, source in _steps(axis)]
    yield axis.index
    for source, works in steps:
        _wait(works)
        yield source


def sum_in_steps(part_of: Callable[[int], Tensor], axis: Axis) -> Callable[[], Tensor]:
    """Starts this rank's part of a reduce-scatter: makes ``part_of(place)`` [rows, ...] for every
    rank, the next one's first and its own last, and sends each off before it makes the next.

    Returns:
        What waits for the other ranks' parts and gives the sum of all for this rank, with the bits
        of `kilter.comm.collectives.tree_reduce_scatter_rows`.
    """
    parts: dict[int, Tensor] = {}
    posted = []
    for target, source in _steps(axis):
        part = part_of(target).contiguous()
        parts[source] = torch.empty_like(part)
        # A message that is under way keeps what it sends alive.
        posted.append((part, _exchange(part, target, parts[source], source, axis)))
    parts[axis.index] = part_of(axis.index)

    def finish() -> Tensor:
        for _, works in posted:
            _wait(works)
        return tree_add([parts[place] for place in range(axis.size)])

    return finish


def _steps(axis: Axis) -> list[tuple[int, int]]:
    """(where a step sends to, where it receives from)."""
    n, me = axis.size, axis.index
    return [((me + step) % n, (me - step) % n) for step in range(1, n)]


def _exchange(outgoing: Tensor, target: int, incoming: Tensor, source: int, axis: Axis
              ) -> list[dist.Work]:
    return dist.batch_isend_irecv([
        dist.P2POp(dist.isend, outgoing, axis.ranks[target], axis.members),
        dist.P2POp(dist.irecv, incoming, axis.ranks[source], axis.members)])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
