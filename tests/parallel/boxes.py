"""What tests ask of boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kilter.parallel.shards import Box


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether every element of a tensor of this shape is in exactly one of the boxes."""
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    return all(a.overlap(b) is None for a, b in itertools.combinations(boxes, 2))
