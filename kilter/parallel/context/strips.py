"""Rows of a pack as strips: what masks and placements are both made of.

A strip is ``(start, count, step)``: the rows start, start + step, … of a pack. A set of rows is
int64 [n, 3], its strips in ascending order and their extents disjoint; its local rows are the
strips' rows one after another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def strips(starts: Ints, counts: Ints, step: int = 1) -> Ints:
    """Strips of one step; empty ones are dropped, and with step 1 neighbours joined."""
    kept = counts > 0
    starts, counts = starts[kept], counts[kept]
    if step == 1 and len(starts):
        first = np.concatenate([[True], starts[1:] != starts[:-1] + counts[:-1]])
        group = first.cumsum() - 1
        counts = np.bincount(group, weights=counts).astype(np.int64)
        starts = starts[first]
    return np.stack([starts, counts, np.full_like(starts, step)], axis=1)


def strip_rows(rows: Ints) -> Ints:
    """The pack rows of strips [n, 3], in order."""
    start, count, step = rows.T
    return np.repeat(start, count) + np.repeat(step, count) * _places(count)


def overlapping(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """All pairs (i, j) with first[i] <= j < last[i], i by i."""
    counts = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(first)), counts)
    return index, first[index] + _places(counts)


def cut(rows: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Which part of which strips lies in pack rows [low[i], high[i]), for every i.

    Returns:
        (i, strip, first, last): members first to last of the strip, i by i; parts without members
        are left out.
    """
    start, count, step = rows.T
    end = start + (count - 1) * step + 1
    index, strip = overlapping(np.searchsorted(end, low, side="right"),
                               np.searchsorted(start, high, side="left"))
    first = np.maximum(-((start[strip] - low[index]) // step[strip]), 0)
    last = np.minimum(-((start[strip] - high[index]) // step[strip]), count[strip])
    kept = first < last
    return index[kept], strip[kept], first[kept], last[kept]


def _places(counts: Ints) -> Ints:
    """0, 1, … counts[0] - 1, 0, 1, … counts[1] - 1, …"""
    ends = counts.cumsum()
    return np.arange(counts.sum()) - np.repeat(ends - counts, counts)
