"""Blocks of rows dealt out so that all ranks have the same attention work, whatever the mask.

Work is pairs (row, row it sees). Every rank gets as many blocks of as many rows, within one row per
block, so that everything but attention stays even too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from kilter.comm.collectives import split_sizes
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.placement import Placement
from kilter.parallel.context.strips import Ints, strips

PlacementKind = Literal["contiguous", "zigzag", "striped", "balanced"]

_TOLERANCE = 1e-4  # of the mean: where exchanging blocks stops
_EXCHANGES = 1000


def place(kind: PlacementKind, mask: Mask, ranks: int, block: int = 128,
          multiple: int = 1) -> Placement:
    """The placement of that name for a pack with this mask; every rank has rows.

    Args:
        block: most rows that stay together under ``balanced``.
        multiple: of the rows of each rank.
    """
    bounds = mask.bounds.tolist()
    if kind == "balanced":
        placement = balanced(mask, ranks, block)
    elif kind == "striped":
        placement = Placement.striped(bounds, ranks)
    elif kind == "zigzag":
        placement = Placement.zigzag(bounds, ranks)
    else:
        placement = Placement.contiguous(bounds, ranks, multiple)
    return placement.padded(multiple)


def balanced(mask: Mask, ranks: int, block: int = 128) -> Placement:
    """Runs of at most ``block`` rows, as many for each rank, heaviest first: one to each rank in
    turn, the heavier to the rank with less work so far. Then runs are exchanged in pairs between
    the ranks with the most and the least until nothing is gained."""
    each = -(-mask.rows // (block * ranks))
    counts = np.array(split_sizes(mask.rows, each * ranks), dtype=np.int64)
    ends = counts.cumsum()
    starts = ends - counts
    total = np.append(0, mask.row_work.cumsum())
    work = total[ends] - total[starts]
    owner = _deal(work, ranks)
    return Placement(mask.rows, tuple(
        strips(starts[owner == rank], counts[owner == rank]) for rank in range(ranks)))


def work_of_ranks(mask: Mask, placement: Placement) -> list[int]:
    """Pairs that each rank's rows see; of pads, none."""
    rows = [placement.rows(rank) for rank in range(placement.ranks)]
    return [mask.work(own[own < placement.tokens]) for own in rows]


def imbalance(work: Sequence[int]) -> float:
    """Largest over mean, minus one: the share of time that the other ranks wait."""
    return max(work) * len(work) / sum(work) - 1.0 if sum(work) else 0.0


def _deal(work: Ints, ranks: int) -> Ints:
    """The rank of each block."""
    owner = np.zeros(len(work), dtype=np.int64)
    load = np.zeros(ranks, dtype=np.int64)
    heaviest = np.argsort(-work, kind="stable")
    for first in range(0, len(work), ranks):  # one to each rank
        some = heaviest[first:first + ranks]
        to = np.argsort(load, kind="stable")[:len(some)]
        owner[some] = to
        load[to] += work[some]
    for _ in range(_EXCHANGES):
        most, least = int(load.argmax()), int(load.argmin())
        gap = load[most] - load[least]
        if gap <= _TOLERANCE * load.mean():
            break
        a, b = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        if not len(a) or not len(b):
            break
        moved = work[a][:, None] - work[b][None]
        best = int(np.abs(gap - 2 * moved).argmin())
        i, j = a[best // len(b)], b[best % len(b)]
        change = work[i] - work[j]
        if abs(gap - 2 * change) >= gap:
            break
        owner[i], owner[j] = least, most
        load[most] -= change
        load[least] += change
    return owner
