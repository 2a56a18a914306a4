"""How even the ranks' attention work is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.balance import images, lognormal
from kilter.parallel.context.balance import balanced, imbalance, place, work_of_ranks
from kilter.parallel.context.mask import Mask
from tests.parallel.context.packs import masks


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_one_long_document(tokens: int, ranks: int) -> None:
    mask = Mask.causal([0, tokens])
    for kind in ("zigzag", "striped", "balanced"):
        assert imbalance(work_of_ranks(mask, place(kind, mask, ranks))) < 0.01
    # The last of n equal runs sees 2 n - 1 of n² equal pieces of the triangle.
    found = imbalance(work_of_ranks(mask, place("contiguous", mask, ranks)))
    assert found == pytest.approx((2 * ranks - 1) / ranks - 1, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_packs_and_images(ranks: int, seed: int) -> None:
    bounds = lognormal(16384, seed)
    for mask in (Mask.causal(bounds), images(bounds, seed), Mask.causal(bounds, window=512)):
        placement = balanced(mask, ranks)
        assert imbalance(work_of_ranks(mask, placement)) < 0.05
        assert max(placement.sizes) - min(placement.sizes) <= 128
    mask = Mask.causal(bounds)
    for kind in ("zigzag", "striped"):
        assert imbalance(work_of_ranks(mask, place(kind, mask, ranks))) < 0.01


@given(masks(), st.integers(1, 5), st.integers(1, 5))
def test_work_adds_up(mask: Mask, ranks: int, block: int) -> None:
    placement = balanced(mask, ranks, block)
    assert sum(work_of_ranks(mask, placement)) == mask.work()
    assert max(placement.sizes) - min(placement.sizes) <= -(-mask.rows // (ranks * block))


def test_nothing_much_better_among_all() -> None:
    """Of ten blocks on two ranks, five each: near the best of all 252 ways. Without the exchanges
    some of these are beyond the bound."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        cuts = np.sort(rng.choice(np.arange(1, 80), 8, replace=False)).reshape(4, 2).tolist()
        mask = Mask.with_spans([0, 80], [(a, b) for a, b in cuts])
        work = mask.row_work.reshape(10, 8).sum(1)
        best = min(max(work[list(some)].sum(), work.sum() - work[list(some)].sum())
                   for some in itertools.combinations(range(10), 5))
        found = max(work_of_ranks(mask, balanced(mask, 2, block=8)))
        assert found <= 1.02 * best


def test_imbalance() -> None:
    assert imbalance([3, 1]) == 0.5 and imbalance([2, 2]) == 0.0 and imbalance([0, 0]) == 0.0
