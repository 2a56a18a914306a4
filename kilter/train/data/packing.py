"""Packs: documents side by side in one micro-batch, each a sequence of its own.

    tokens      [ a0 a1 a2 | b0 b1 | c0 c1 c2 c3 ]     at most seq_len
    positions   [ 0  1  2  | 0  1  | 0  1  2  3  ]
    labels      [ a1 a2 -  | b1 -  | c1 c2 c3 -  ]     "-": no target, IGNORE
    cu_seqlens  [ 0, 3, 5, 9 ]

Which documents share a pack is arithmetic over lengths: it begins with the one that has waited
longest, then takes the longest that still fits of those in view, until none does.

A pair is a document of two sequences, the chosen one and the rejected one, so it is in one pack.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kilter.models.batch import Batch
from kilter.train.data.corpus import IGNORE, Sample, SampleId


@dataclass(frozen=True)
class Pack:
    """One micro-batch of T tokens of S documents, on the CPU."""

    tokens_T: Tensor  # int64 [T]
    positions_T: Tensor  # int32 [T]
    cu_seqlens_S1: Tensor  # int32 [S + 1]
    labels_T: Tensor  # int64 [T]
    ids: tuple[SampleId, ...]  # of the documents, in their order; none for padding
    margins_P: Tensor | None = None  # float64 [P], of P pairs: sequences 2p and 2p + 1 each

    @staticmethod
    def of(samples: Sequence[Sample]) -> Pack:
        """The samples, at least one, side by side."""
        lengths = [n for s in samples for n in (s.chosen, len(s.tokens_N) - s.chosen) if n]
        pairs = any(sample.chosen for sample in samples)
        return Pack(
            torch.from_numpy(np.concatenate([sample.tokens_N for sample in samples])),
            torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
            torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            torch.from_numpy(np.concatenate([sample.labels_N for sample in samples])),
            tuple(sample.id for sample in samples),
            torch.tensor([s.margin for s in samples], dtype=torch.float64) if pairs else None,
        )

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def targets_T(self) -> Tensor:
        """The labels under the name that a training step has for them."""
        return self.labels_T

    @cached_property
    def valid(self) -> int:
        """What a step's loss is divided by: how many tokens have a label, or how many pairs there
        are."""
        if self.margins_P is not None:
            return len(self.margins_P)
        return int((self.labels_T != IGNORE).sum())

    def batch(self, device: torch.device | str = "cpu") -> Batch:
        """What the model computes. The labels stay here."""
        longest = int(self.cu_seqlens_S1.diff().max())
        return Batch(self.tokens_T.to(device), self.positions_T.to(device),
                     self.cu_seqlens_S1.to(device), longest)

    def padded(self, num_tokens: int) -> Pack:
        """The pack made `num_tokens` long by one more sequence, of token 0 and without labels: for
        what needs a fixed or divisible T.

        Raises ValueError if the pack is longer than that.
        """
        missing = num_tokens - self.num_tokens
        if missing < 0:
            raise ValueError(f"A pack of {self.num_tokens} tokens cannot be padded to {num_tokens}."
                             " Pad to seq_len.")
        if missing == 0:
            return self
        return Pack(
            torch.cat([self.tokens_T, torch.zeros(missing, dtype=torch.int64)]),
            torch.cat([self.positions_T, torch.arange(missing, dtype=torch.int32)]),
            torch.cat([self.cu_seqlens_S1, torch.tensor([num_tokens], dtype=torch.int32)]),
            torch.cat([self.labels_T, torch.full((missing,), IGNORE, dtype=torch.int64)]),
            self.ids, self.margins_P,
        )

    def blank(self) -> Pack:
        """The same tokens without a label or an id: work that counts for nothing, for a rank that
        must take part though it has nothing of its own."""
        return replace(self, labels_T=torch.full_like(self.labels_T, IGNORE), ids=(),
                       margins_P=None if self.margins_P is None else self.margins_P[:0])


class Packer:
    """The documents in view, and which of them goes into a pack next.

    A document is named by its place, a number that grows in the order of arrival.
    """

    def __init__(self, waiting: Iterable[tuple[int, int]] = ()) -> None:
        self._length: dict[int, int] = {}  # by place, in the order of arrival
        self._sorted: list[tuple[int, int]] = []  # (length, -place)
        for place, length in waiting:
            self.add(place, length)

    def __len__(self) -> int:
        return len(self._length)

    @property
    def places(self) -> list[int]:
        return list(self._length)

    def add(self, place: int, length: int) -> None:
        """A document comes into view."""
        self._length[place] = length
        insort(self._sorted, (length, -place))

    def first(self) -> int | None:
        """Takes the document that has waited longest."""
        place = next(iter(self._length), None)
        if place is not None:
            index = bisect_right(self._sorted, (self._length[place], -place)) - 1
            self._take(index)
        return place

    def fitting(self, room: int) -> int | None:
        """Takes the longest document of at most `room` tokens, the earliest of equals."""
        index = bisect_right(self._sorted, (room, 0)) - 1
        return self._take(index) if index >= 0 else None

    def _take(self, index: int) -> int:
        _, negative = self._sorted.pop(index)
        del self._length[-negative]
        return -negative
