"""The order of epochs: permutations, weights as passes, and independence of how it is asked."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.train.data.order import Order, Permutation

weights = st.sampled_from([0.25, 0.3, 0.5, 1.0, 1.5, 2.0])


def epoch_of(order: Order, epoch: int) -> list[tuple[int, int]]:
    sources, units = order.units(epoch, np.arange(order.length(epoch)))
    return list(zip(sources.tolist(), units.tolist(), strict=True))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 99))
def test_a_permutation_has_every_number_once(size: int, seed: int) -> None:
    found = Permutation(size, seed)(np.arange(size))
    assert np.array_equal(np.sort(found), np.arange(size))


def test_every_number_comes_to_every_place() -> None:
    """Over many seeds each of 5 numbers stands at each of 5 places about equally often."""
    seen = np.array([Permutation(5, seed)(np.arange(5)) for seed in range(1000)])
    counts = np.array([[np.sum(seen[:, place] == n) for n in range(5)] for place in range(5)])
    assert np.abs(counts - 200).max() < 5 * 200**0.5
    neighbours = Permutation(10_000, 1)(np.arange(10_000))
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.05


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 20), weights), min_size=1, max_size=3),
       st.booleans(), st.integers(0, 9))
def test_sources_are_gone_through_evenly(
    sources: list[tuple[int, float]], shuffle: bool, seed: int
) -> None:
    """After any number of epochs no unit of a source came more than once more than another, and
    in all the source came weight times."""
    order = Order([n for n, _ in sources], [w for _, w in sources], shuffle, seed)
    seen: Counter[tuple[int, int]] = Counter()
    for epoch in range(4):
        seen.update(epoch_of(order, epoch))
        for number, (size, weight) in enumerate(sources):
            counts = [seen[number, unit] for unit in range(size)]
            assert sum(counts) == int(Fraction(str(weight)) * size * (epoch + 1))
            assert not counts or max(counts) - min(counts) <= 1


def test_epochs_and_seeds_differ_and_shuffle_can_be_off() -> None:
    order = Order([50, 50], [1, 1], True, 3)
    plain = [(source, unit) for source in (0, 1) for unit in range(50)]
    orders = [epoch_of(order, 0), epoch_of(order, 1),
              epoch_of(Order([50, 50], [1, 1], True, 4), 0), plain]
    assert len({tuple(found) for found in orders}) == 4
    mixes = [[source for source, _ in found] for found in orders[:2]]
    assert set(mixes[0][:20]) == {0, 1} and mixes[0] != mixes[1]
    assert epoch_of(Order([50, 50], [1, 1], False, 3), 7) == plain


def test_a_share_of_a_source_is_another_one_in_every_pass() -> None:
    halves = [frozenset(epoch_of(Order([20], [0.5], True, 0), epoch)) for epoch in range(6)]
    assert all(a.isdisjoint(b) for a, b in zip(halves[::2], halves[1::2], strict=True))
    assert len(set(halves)) == 6


def test_any_place_can_be_asked_alone() -> None:
    order = Order([13, 7], [1.5, 1], True, 0)
    whole = epoch_of(order, 1)
    for place in range(order.length(1)):
        source, unit = order.units(1, np.array([place]))
        assert (int(source[0]), int(unit[0])) == whole[place]
