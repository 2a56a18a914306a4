"""Placements: every row on one rank, as even as they say; masks over what is left on a rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.comm.axis import Axis
from kilter.parallel.context.balance import PlacementKind, place
from kilter.parallel.context.mask import Mask, side_by_side
from kilter.parallel.context.placement import Placement
from kilter.parallel.context.plan import PLACEMENTS, ContextConfig, spread_batch
from tests.parallel.context.packs import boundaries, dense, dense_runs, masks, pack

KINDS = st.sampled_from(PLACEMENTS)
RANKS = st.integers(1, 5)
MULTIPLES = st.sampled_from([1, 2, 4])
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(masks(), KINDS, RANKS, MULTIPLES, st.integers(1, 7))
def test_every_row_is_on_one_rank(mask: Mask, kind: PlacementKind, ranks: int, multiple: int,
                                  block: int) -> None:
    placement = place(kind, mask, ranks, block, multiple)
    assert sorted(placement.order.tolist()) == list(range(mask.rows + placement.pads))
    assert [len(placement.rows(rank)) for rank in range(ranks)] == list(placement.sizes)
    assert all(size % multiple == 0 and size for size in placement.sizes)
    assert all((np.diff(placement.rows(rank)) > 0).all() for rank in range(ranks))


@given(masks(), KINDS, RANKS, MULTIPLES)
def test_whole_inverts_local(mask: Mask, kind: PlacementKind, ranks: int, multiple: int) -> None:
    placement = place(kind, mask, ranks, 3, multiple)
    x_T = torch.randn(mask.rows, 2)
    parts = [placement.local(x_T, rank, -5.0) for rank in range(ranks)]
    assert torch.equal(placement.whole(parts), x_T)
    assert sum(int((part == -5.0).all(1).sum()) for part in parts) == placement.pads


@given(masks())
def test_a_mask_is_its_runs(mask: Mask) -> None:
    seen = dense(mask)
    assert (dense_runs(mask.runs, mask.rows, mask.rows) == seen).all()
    assert (mask.row_work == seen.sum(1)).all()
    assert mask.work() == seen.sum()


@given(masks(), KINDS, RANKS, MULTIPLES, st.integers(1, 7), st.data())
def test_a_ranks_part_of_a_mask(mask: Mask, kind: PlacementKind, ranks: int, multiple: int,
                                block: int, data: st.DataObject) -> None:
    placement = place(kind, mask, ranks, block, multiple)
    padded = mask.padded(placement.pads)
    seen = dense(padded)
    rank = data.draw(st.integers(0, ranks - 1))
    own, parts = placement.rows(rank), []
    for other in range(ranks):
        bands = padded.bands(placement.strips[rank], placement.strips[other])
        expected = seen[np.ix_(own, placement.rows(other))]
        if bands is None:
            assert not expected.any()
        else:
            assert (dense_runs(bands.runs.numpy(), *expected.shape) == expected).all()
            assert (bands.runs[1:, 0] >= bands.runs[:-1, 0]).all()
        parts.append(bands)
    every = side_by_side(parts, placement.sizes).runs
    assert (dense_runs(every.numpy(), len(own), len(placement.order))
            == seen[np.ix_(own, placement.order)]).all()
    ranges = sorted({(int(a), int(b)) for a, b in every[:, :2]})
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


@given(LENGTHS, RANKS)
def test_zigzag_pieces(lengths: list[int], ranks: int) -> None:
    """Each document's pieces are runs in order whose lengths differ by one at most, and rank r has
    pieces r and 2 n - 1 - r."""
    bounds = boundaries(lengths)
    placement = Placement.zigzag(bounds, ranks)
    owner = np.empty(bounds[-1], dtype=int)
    for rank in range(ranks):
        owner[placement.rows(rank)] = rank
    for start, end in pairwise(bounds):
        counts = np.bincount(owner[start:end], minlength=ranks)
        assert counts.max() - counts.min() <= 2
        order = owner[start:end].tolist()
        turned = [*range(ranks), *reversed(range(ranks))]
        at = 0
        for rank in order:  # ranks come in the order 0 … n - 1, n - 1 … 0
            while turned[at] != rank:
                at += 1
    assert max(placement.sizes) - min(placement.sizes) <= 2


@given(LENGTHS, RANKS)
def test_striped_rows(lengths: list[int], ranks: int) -> None:
    """In every document a rank has every n-th token, and ranks have as many rows, within one."""
    bounds = boundaries(lengths)
    placement = Placement.striped(bounds, ranks)
    for rank in range(ranks):
        rows = placement.rows(rank)
        for start, end in pairwise(bounds):
            mine = rows[(rows >= start) & (rows < end)]
            assert (np.diff(mine) == ranks).all()
            assert abs(len(mine) - (end - start) / ranks) < 1
    assert max(placement.sizes) - min(placement.sizes) <= 1


def test_examples() -> None:
    """Those of the module's picture."""
    bounds = [0, 8, 12]
    assert [Placement.contiguous(bounds, 2).rows(r).tolist() for r in (0, 1)] == [
        [0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert [Placement.zigzag(bounds, 2).rows(r).tolist() for r in (0, 1)] == [
        [0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert [Placement.striped(bounds, 2).rows(r).tolist() for r in (0, 1)] == [
        [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert Placement.contiguous([0, 3, 5], 2, multiple=4).sizes == (4, 1)


@pytest.mark.parametrize(("bounds", "spans", "window", "word"), [
    ([0, 5, 3], [], None, "rise"), ([1, 5], [], None, "rise"), ([0, 5], [], 0, "window is 0"),
    ([0, 5, 9], [(4, 6)], None, r"\[4, 6\]"), ([0, 9], [(1, 4), (3, 6)], None, r"\[3, 6\]"),
    ([0, 9], [(4, 4)], None, r"\[4, 4\]"), ([0, 9], [(4, 10)], None, r"\[4, 10\]"),
    ([0, 9], [(-2, 3)], None, r"\[-2, 3\]"),
])
def test_masks_that_cannot_be(bounds: list[int], spans: list[tuple[int, int]], window: int | None,
                              word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Mask.with_spans(bounds, spans, window)


def test_rows_that_do_not_fit() -> None:
    placement = Placement.zigzag([0, 8], 2)
    with pytest.raises(ValueError, match="8 rows, but 7"):
        placement.local(torch.zeros(7), 0, 0.0)
    with pytest.raises(ValueError, match=r"\[4, 4\] rows, but parts of \[4, 3\]"):
        placement.whole([torch.zeros(4), torch.zeros(3)])


@given(LENGTHS, KINDS, RANKS, MULTIPLES)
def test_local_batches(lengths: list[int], kind: PlacementKind, ranks: int, multiple: int) -> None:
    """Tokens, positions and boundaries of the ranks' rows; boundaries part documents."""
    batch = pack(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    config = ContextConfig("all_gather", kind, block=4)
    for rank in range(ranks):
        axis = Axis("cp", tuple(range(ranks)), rank)
        local = spread_batch(batch, axis, config, multiple)
        rows = local.placement.rows(rank)
        cu = local.batch.cu_seqlens_S1.tolist()
        assert cu[0] == 0 and cu[-1] == len(rows) == local.batch.num_tokens
        assert local.batch.max_seqlen == max(b - a for a, b in pairwise(cu))
        for start, end in pairwise(cu):
            run = rows[start:end]
            if run[0] >= batch.num_tokens:
                assert len(run) == 1
                assert (local.batch.tokens_T[start], local.batch.positions_T[start]) == (0, 0)
            else:
                assert len(set(document[run])) == 1
                assert torch.equal(local.batch.tokens_T[start:end], batch.tokens_T[run])
                assert torch.equal(local.batch.positions_T[start:end], batch.positions_T[run])
        assert (local.batch.attend is None) == (ranks == 1)
        if ranks == 1 and not local.placement.pads:
            assert local.batch is batch
