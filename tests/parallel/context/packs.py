"""Packs and masks that the tests are made of, and what a mask says, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from hypothesis import strategies as st

from kilter.models.batch import Batch
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.strips import Ints


def boundaries(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def pack(lengths: Sequence[int], vocab: int = 100) -> Batch:
    """Documents of these lengths, of arbitrary tokens."""
    return Batch.of([[(7 * i + 13 * d + i * i // 3) % vocab for i in range(length)]
                     for d, length in enumerate(lengths)])


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Of some short documents with or without spans, with or without a window."""
    bounds = boundaries(draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)))
    cuts = sorted(draw(st.sets(st.integers(0, bounds[-1]), max_size=6)))
    spans = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)
             if not any(a < bound < b for bound in bounds)]
    return Mask.with_spans(bounds, spans, draw(st.none() | st.integers(1, 9)))


def dense(mask: Mask) -> np.ndarray:
    """bool [rows, rows]: whether a row sees another, from the words of `Mask`."""
    document = np.searchsorted(mask.bounds, np.arange(mask.rows), side="right")
    end = np.arange(1, mask.rows + 1)
    for first, stop in mask.spans.tolist():
        end[first:stop] = stop
    row, column = np.arange(mask.rows)[:, None], np.arange(mask.rows)[None]
    seen = (document[:, None] == document[None]) & (column < end[:, None])
    if mask.window is not None:
        seen &= column > row - mask.window
    return seen


def dense_runs(runs: Ints, rows: int, columns: int) -> np.ndarray:
    """bool [rows, columns]: what runs say, each cell once."""
    count = np.zeros((rows, columns), dtype=int)
    for q0, q1, k0, k1, low, high in runs.tolist():
        step = np.arange(k1 - k0)[None] - np.arange(q1 - q0)[:, None]
        count[q0:q1, k0:k1] += (step >= low) & (step <= high)
    assert count.max(initial=0) <= 1
    return count > 0
