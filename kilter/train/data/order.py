"""The order of an epoch, without a list of it.

A source of n units (documents, or pieces of them) is an endless row of passes, each a permutation
of 0 … n−1 of its own. Epoch e takes the next weight·n units of every source's row, and one more
permutation mixes the sources. A permutation is a function of its seed that can be asked at any
place, so an epoch of any length takes no memory and can be entered anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

_ROUNDS = 6


class Permutation:
    """A pseudo-random permutation of 0 … size−1: a Feistel network over the next power of four,
    applied again to whatever falls outside."""

    def __init__(self, size: int, *seed: object) -> None:
        self.size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        digest = hashlib.blake2b(repr(seed).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """int64 [N] places, each within 0 … size−1 -> int64 [N] what stands there."""
        values = self._network(places.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self.size)):
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & self._mask)
        return (left << self._half) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of the value (the splitmix64 finaliser)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """Which unit of which source stands where in every epoch.

    sizes, weights: per source, its units and how often an epoch goes through them.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    shuffle: bool
    seed: int

    def length(self, epoch: int) -> int:
        """Units in an epoch."""
        return sum(end - start for start, end in self._ranges(epoch))

    def units(self, epoch: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [N] places within an epoch -> int64 [N] sources, int64 [N] units of them."""
        ranges = self._ranges(epoch)
        bounds = np.cumsum([0, *(end - start for start, end in ranges)])
        if self.shuffle and len(places):
            places = Permutation(int(bounds[-1]), self.seed, "epoch", epoch)(places)
        sources = np.searchsorted(bounds, places, side="right") - 1
        units = np.empty_like(places)
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            units[mine] = self._row(int(source), ranges[source][0] + places[mine] - bounds[source])
        return sources, units

    def _ranges(self, epoch: int) -> list[tuple[int, int]]:
        """Per source, the part of its endless row that an epoch takes."""
        taken = [Fraction(str(weight)) * size
                 for weight, size in zip(self.weights, self.sizes, strict=True)]
        return [(int(n * epoch), int(n * (epoch + 1))) for n in taken]

    def _row(self, source: int, places: np.ndarray) -> np.ndarray:
        passes, units = np.divmod(places, self.sizes[source])
        if self.shuffle:
            for number in np.unique(passes):
                mine = np.flatnonzero(passes == number)
                permutation = Permutation(self.sizes[source], self.seed, source, int(number))
                units[mine] = permutation(units[mine])
        return units
