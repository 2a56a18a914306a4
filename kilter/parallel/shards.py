"""What a rank holds of a parameter, said in coordinates of the whole one.

    whole [2F, D] = [gate; up]              a tensor-parallel rank's local tensor
      ┌───────────────┐ row 0                 ┌───────────────┐
      │ gate          │                       │ gate rows a..b│  Box((a, 0), (b-a, D))
      │ ▒▒▒▒ a..b ▒▒▒ │            →          ├───────────────┤
      ├───────────────┤ row F                 │ up rows a..b  │  Box((F+a, 0), (b-a, D))
      │ up            │                       └───────────────┘
      │ ▒ F+a..F+b ▒▒ │
      └───────────────┘

A local tensor is boxes stacked along dim 0. Loading, checkpoints, the true gradient norm and the
way from one layout to another are all arithmetic on these boxes; none of them knows why a parameter
is cut as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The elements [start_i, start_i + size_i) in every dim i of a whole tensor."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this box in the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """The elements in both, if any."""
        start = tuple(map(max, self.start, other.start))
        end = [min(a + n, b + m) for a, n, b, m in
               zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(e - s for s, e in zip(start, end, strict=True))
        return Box(start, size) if min(size, default=1) > 0 else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, b, n in
                     zip(self.start, outer.start, self.size, strict=True))


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter.

    Attributes:
        shape: of the whole parameter.
        boxes: of the whole, stacked along dim 0 in this order in the local tensor; they agree in
            the size of every other dim.
        owned: for each box, whether this rank counts for it. Of ranks that hold the same elements,
            one owns them: it is the one that norms count and checkpoints save.
    """

    shape: Shape
    boxes: tuple[Box, ...]
    owned: tuple[bool, ...]

    @staticmethod
    def whole(shape: Sequence[int], owned: bool = True) -> Shard:
        """All of a parameter."""
        shape = tuple(shape)
        return Shard(shape, (Box((0,) * len(shape), shape),), (owned,))

    @staticmethod
    def of(shape: Sequence[int], boxes: Sequence[Box], owned: Sequence[bool] | bool = True
           ) -> Shard:
        """Boxes that follow on each other become one."""
        flags = (owned,) * len(boxes) if isinstance(owned, bool) else tuple(owned)
        joined: list[tuple[Box, bool]] = []
        for box, own in zip(boxes, flags, strict=True):
            if joined:
                last, last_own = joined[-1]
                if (own == last_own and box.start[1:] == last.start[1:]
                        and box.size[1:] == last.size[1:]
                        and box.start[0] == last.start[0] + last.size[0]):
                    joined[-1] = (Box(last.start, (last.size[0] + box.size[0], *last.size[1:])),
                                  own)
                    continue
            joined.append((box, own))
        return Shard(tuple(shape), tuple(b for b, _ in joined), tuple(o for _, o in joined))

    @property
    def local_shape(self) -> Shape:
        if not self.boxes:
            return (0, *self.shape[1:])
        return (sum(box.size[0] for box in self.boxes), *self.boxes[0].size[1:])

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)

    def rows(self, start: int, stop: int) -> Shard:
        """Rows [start, stop) of the local tensor, as what a rank of a further cut holds."""
        boxes, owned, row = [], [], 0
        for box, own in zip(self.boxes, self.owned, strict=True):
            low, high = max(start - row, 0), min(stop - row, box.size[0])
            if low < high:
                boxes.append(Box((box.start[0] + low, *box.start[1:]),
                                 (high - low, *box.size[1:])))
                owned.append(own)
            row += box.size[0]
        return Shard(self.shape, tuple(boxes), tuple(owned))

    def owned_by(self, owner: bool) -> Shard:
        """The same elements, owned only if ``owner`` too."""
        return self if owner else Shard(self.shape, self.boxes, (False,) * len(self.boxes))

    def parts(self, local: Tensor) -> Iterator[tuple[Box, bool, Tensor]]:
        """(box, owned, view of the local tensor) of every box."""
        row = 0
        for box, own in zip(self.boxes, self.owned, strict=True):
            yield box, own, local[row:row + box.size[0]]
            row += box.size[0]
