"""`Placement`: which rows of a pack each context-parallel rank has, and in which order.

    pack          a0 a1 a2 a3 a4 a5 a6 a7 | b0 b1 b2 b3          two documents, two ranks
    contiguous    a0 a1 a2 a3 a4 a5       | a6 a7 b0 b1 b2 b3    n equal runs of the pack
    zigzag        a0 a1 a6 a7 b0 b3       | a2 a3 a4 a5 b1 b2    each document in 2n pieces, rank r
                                                                 has pieces r and 2n - 1 - r
    striped       a0 a2 a4 a6 b0 b2       | a1 a3 a5 a7 b1 b3    row t on rank t mod n

A causal row sees more, the later it stands; zigzag and striped give every rank late and early ones
(arXiv 2407.21783 §3.3.2, 2311.09431). `kilter.parallel.context.balance` makes a placement for any
mask.

Ranks may have different numbers of rows. Where every rank needs a multiple (sequence parallelism
cuts its rows again), the pack is taken to go on after its last row with documents of one row: pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from kilter.comm.collectives import split_sizes
from kilter.parallel.context.strips import Ints, strip_rows, strips


@dataclass(frozen=True, eq=False)
class Placement:
    """Attributes:
        tokens: rows of the pack, T.
        strips: of each rank, the rows it has (see `kilter.parallel.context.strips`). Pads are rows
            from T on.
        pads: how many there are, over all ranks.
    """

    tokens: int
    strips: tuple[Ints, ...]
    pads: int = 0

    @staticmethod
    def contiguous(cu_seqlens: Sequence[int], ranks: int, multiple: int = 1) -> Placement:
        """The pack cut into equal runs, wherever documents start; all but the last a multiple, so
        that pads stand at the end."""
        tokens = cu_seqlens[-1]
        units = split_sizes(-(-tokens // multiple), ranks)
        ends = [min(end * multiple, tokens) for end in accumulate(units, initial=0)]
        return Placement(tokens, tuple(strips(np.array([start]), np.array([end - start]))
                                       for start, end in pairwise(ends)))

    @staticmethod
    def zigzag(cu_seqlens: Sequence[int], ranks: int) -> Placement:
        """Each document in 2 n pieces as even as possible; rank r has pieces r and 2n - 1 - r. The
        rows that are left over go to the ranks that have fewest so far."""
        total = [0] * ranks
        starts: list[list[int]] = [[] for _ in range(ranks)]
        counts: list[list[int]] = [[] for _ in range(ranks)]
        for start, end in pairwise(cu_seqlens):
            even, left = divmod(end - start, 2 * ranks)
            pieces = [even] * (2 * ranks)
            for turn in (0, 1):
                fewest = sorted(range(ranks), key=lambda rank: total[rank])
                for rank in fewest[:max(left - turn * ranks, 0)]:
                    pieces[2 * ranks - 1 - rank if turn else rank] += 1
                    total[rank] += 1
            first = list(accumulate(pieces, initial=start))
            for rank in range(ranks):
                for piece in (rank, 2 * ranks - 1 - rank):
                    starts[rank].append(first[piece])
                    counts[rank].append(pieces[piece])
        return Placement(cu_seqlens[-1], tuple(
            strips(np.array(s, dtype=np.int64), np.array(c, dtype=np.int64))
            for s, c in zip(starts, counts, strict=True)))

    @staticmethod
    def striped(cu_seqlens: Sequence[int], ranks: int) -> Placement:
        """Row t of the pack on rank t mod n: within a document every n-th token, from a first rank
        that keeps the ranks' rows even."""
        rows = cu_seqlens[-1]
        return Placement(rows, tuple(
            strips(np.array([rank]), np.array([(rows - rank + ranks - 1) // ranks]), ranks)
            for rank in range(ranks)))

    def padded(self, multiple: int) -> Placement:
        """With every rank's rows made a multiple, and no rank left without any, by pads."""
        missing = [-size % multiple if size else multiple for size in self.sizes]
        if not any(missing):
            return self
        first = list(accumulate(missing, initial=self.tokens + self.pads))
        return Placement(self.tokens, tuple(
            np.concatenate([own, strips(np.array([at]), np.array([count]))])
            for own, at, count in zip(self.strips, first, missing, strict=False)),
            self.pads + sum(missing))

    @property
    def ranks(self) -> int:
        return len(self.strips)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank, pads among them."""
        return tuple(int(own[:, 1].sum()) for own in self.strips)

    def rows(self, rank: int) -> Ints:
        """int64: the pack's rows that a rank has, in its order; pads are T and above."""
        return strip_rows(self.strips[rank])

    @cached_property
    def order(self) -> Ints:
        """int64 [T + pads]: the pack row of every row of all ranks, rank after rank."""
        return np.concatenate([self.rows(rank) for rank in range(self.ranks)])

    def local(self, x_T: Tensor, rank: int, fill: float) -> Tensor:
        """A rank's rows of x, [T, …]; pads hold ``fill``.

        Raises:
            ValueError: if x has not T rows.
        """
        if x_T.shape[0] != self.tokens:
            raise ValueError(f"The pack has {self.tokens} rows, but {x_T.shape[0]} were given; "
                             "give one per token of the whole pack.")
        rows = torch.from_numpy(self.rows(rank)).to(x_T.device)
        real = rows < self.tokens
        if not self.pads or bool(real.all()):
            return x_T[rows]
        out = x_T.new_full((rows.shape[0], *x_T.shape[1:]), fill)
        out[real] = x_T[rows[real]]
        return out

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """[T, …] of all ranks' rows: what `local` was made of. Pads are dropped.

        Raises:
            ValueError: if the parts are not one per rank of that rank's size.
        """
        found = [part.shape[0] for part in parts]
        if found != list(self.sizes):
            raise ValueError(f"The ranks have {list(self.sizes)} rows, but parts of {found} were "
                             "given.")
        every = torch.cat(list(parts))
        place = torch.from_numpy(self.order).to(every.device)
        out = every.new_empty(every.shape)
        out[place] = every
        return out[:self.tokens]
