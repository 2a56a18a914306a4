"""`Mask`: which rows of a pack each row sees.

    text      s0 s1 s2 t3      a document whose first three rows are a span (an image)
    s0         x  x  x  .      rows of a span see the document's start to the span's end,
    s1         x  x  x  .      others the document's start to themselves;
    s2         x  x  x  .      a window takes away all that is too far back
    t3         x  x  x  x

It is a list of runs, each a band of a rectangle, and stays one when ranks have only some of the
rows: `Mask.bands` gives what `kilter.ops.band_attention` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kilter.ops.band_attention import Bands
from kilter.parallel.context.strips import Ints, cut


@dataclass(frozen=True, eq=False)
class Mask:
    """Causal documents side by side, some rows of which form spans that see all of themselves.

    Attributes:
        bounds: int64 [S + 1], where documents start; the last is the number of rows.
        spans: int64 [m, 2], first row and end of each span, ascending; each lies in one document.
        window: a row sees itself and the window - 1 before it; None: to its document's start.

    Raises:
        ValueError: if bounds do not rise from 0, spans overlap or leave their document, or the
            window is not positive.
    """

    bounds: Ints
    spans: Ints
    window: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if len(self.bounds) < 1 or self.bounds[0] != 0 or (np.diff(self.bounds) < 0).any():
            problems.append(f"documents start at {self.bounds.tolist()}, which does not rise "
                            "from 0")
        elif len(self.spans):
            first, end = self.spans.T
            document = np.searchsorted(self.bounds, first, side="right")
            inside = (document > 0) & (document < len(self.bounds))
            limit = self.bounds[np.where(inside, document, 0)]
            bad = (first >= end) | ~inside | (end > limit)
            bad[1:] |= first[1:] < end[:-1]
            if bad.any():
                problems.append(f"the span {self.spans[bad.argmax()].tolist()} is empty, overlaps "
                                "the one before it, or does not lie in one document")
        if self.window is not None and self.window < 1:
            problems.append(f"window is {self.window}; it must be positive, or None for no window")
        if problems:
            raise ValueError(f"A mask cannot be made: {'; '.join(problems)}.")

    @staticmethod
    def causal(cu_seqlens: Sequence[int] | Tensor, window: int | None = None) -> Mask:
        """Every row sees its document up to itself."""
        return Mask.with_spans(cu_seqlens, [], window)

    @staticmethod
    def with_spans(cu_seqlens: Sequence[int] | Tensor, spans: Sequence[tuple[int, int]],
                   window: int | None = None) -> Mask:
        """Causal, but the rows of a span (first, end) see up to its end."""
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        return Mask(np.array(bounds, dtype=np.int64),
                    np.array(spans, dtype=np.int64).reshape(-1, 2), window)

    @property
    def rows(self) -> int:
        return int(self.bounds[-1])

    @property
    def is_causal(self) -> bool:
        """Whether it has no spans."""
        return len(self.spans) == 0

    def within(self, window: int | None) -> Mask:
        """The same, and no row looks back over more than ``window`` rows."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def padded(self, rows: int) -> Mask:
        """With so many more rows, each a document of its own."""
        more = self.rows + 1 + np.arange(rows)
        return replace(self, bounds=np.concatenate([self.bounds, more]))

    @cached_property
    def runs(self) -> Ints:
        """int64 [n, 6], as `Bands.runs` over the pack's rows, ascending: every row is in one run.
        A side without a bound has one that is out of reach."""
        found = []
        spans = self.spans.tolist()
        at = 0
        for start, end in pairwise(self.bounds.tolist()):
            pieces = []  # (first row, end, end of what they see or None: themselves)
            row = start
            while at < len(spans) and spans[at][0] < end:
                first, stop = spans[at]
                pieces += [(row, first, False), (first, stop, True)]
                row = stop
                at += 1
            pieces.append((row, end, False))
            for first, stop, whole in pieces:
                if first < stop:
                    back = first - start
                    low = back + 1 - self.window if self.window else first - stop
                    found.append((first, stop, start, stop, low, stop if whole else back))
        return np.array(found, dtype=np.int64).reshape(-1, 6)

    @cached_property
    def row_work(self) -> Ints:
        """int64 [rows]: how many rows each row sees."""
        q0, q1, k0, k1, low, high = self.runs.T
        place = np.arange(self.rows) - np.repeat(q0, q1 - q0)
        first, last, keys = (np.repeat(x, q1 - q0) for x in (low, high, k1 - k0))
        return np.maximum(np.minimum(place + last + 1, keys) - np.maximum(place + first, 0), 0)

    def work(self, rows: Ints | None = None) -> int:
        """Pairs (row, row it sees) of these rows; default all."""
        return int((self.row_work if rows is None else self.row_work[rows]).sum())

    def bands(self, queries: Ints, keys: Ints) -> Bands | None:
        """What rows of two sets of strips, as local rows, see of each other; None: nothing.

        In a strip of step s, row a is pack row start + s a. A band of pack rows is then a band of
        local rows too, if both strips have the same step.
        """
        runs = self.runs
        q_run, q_strip, a0, a1 = cut(queries, runs[:, 0], runs[:, 1])
        part, k_strip, b0, b1 = cut(keys, runs[q_run, 2], runs[q_run, 3])
        run, q_strip, a0, a1 = (x[part] for x in (q_run, q_strip, a0, a1))
        q_start, q_count, step = queries[q_strip].T
        k_start, k_count, k_step = keys[k_strip].T
        if ((step != k_step) & (q_count > 1) & (k_count > 1)).any():
            raise ValueError("Rows of different steps see each other, which no band describes; use "
                             "one placement for queries and keys.")
        step = np.where(q_count > 1, step, k_step)
        shift = runs[run, 2] - runs[run, 0] + q_start - k_start
        low = -(-(runs[run, 4] + shift) // step) + a0 - b0
        high = (runs[run, 5] + shift) // step + a0 - b0
        seen = (low <= high) & (low < b1 - b0) & (high > a0 - a1)
        if not seen.any():
            return None
        q_first = (queries[:, 1].cumsum() - queries[:, 1])[q_strip]
        k_first = (keys[:, 1].cumsum() - keys[:, 1])[k_strip]
        local = np.stack([q_first + a0, q_first + a1, k_first + b0, k_first + b1, low, high], 1)
        return Bands(torch.from_numpy(local[seen]))


def side_by_side(bands: Sequence[Bands | None], sizes: Sequence[int]) -> Bands:
    """Bands over several sets of keys, of so many rows each, as bands over all of them in order."""
    found = []
    first = 0
    for part, size in zip(bands, sizes, strict=True):
        if part is not None:
            found.append(part.runs + torch.tensor([0, 0, first, first, 0, 0]))
        first += size
    runs = torch.cat(found) if found else torch.zeros(0, 6, dtype=torch.int64)
    return Bands(runs[runs[:, 0].argsort(stable=True)])
