"""Pages: every page is free, cached or held; copy-on-write keeps each request's slots its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.serve.pages import OutOfPages, PagePool, Pages

SPEC = ModelSpec(
    architecture="test", vocab_size=11, hidden_size=12, ffn_size=8, num_heads=2, num_kv_heads=1,
    head_dim=6, layers=(LayerSpec(RopeSpec(theta=1e4)),) * 3, max_positions=64, tied_head=True)


@pytest.mark.parametrize(("pages", "size"), [(0, 1), (1, 0), (-1, 16)])
def test_a_pool_without_room_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        Pages(pages, size)


def test_an_allocation_that_cannot_be_met_takes_nothing() -> None:
    pages = Pages(4, 16)
    held = pages.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages were asked for but of 4 only 1 are free and 0"):
        pages.allocate(2)
    assert pages.num_free == 1
    pages.release(held)
    assert sorted(pages.allocate(4)) == [0, 1, 2, 3]
    pages.check_integrity()


def test_sharing_counts_and_underflow_is_an_error() -> None:
    pages = Pages(2, 4)
    a, = pages.allocate(1)
    pages.share([a])
    pages.release([a])
    assert pages.num_held == 1
    pages.release([a])
    assert pages.num_free == 2
    with pytest.raises(ValueError, match=f"Page {a} was released but is not held"):
        pages.release([a])
    with pytest.raises(ValueError, match=f"Page {a} was to be shared but is free"):
        pages.share([a])
    with pytest.raises(ValueError, match="no request holds it"):
        pages.enter_cache([a])
    pages.check_integrity()


def test_a_second_cache_is_refused() -> None:
    class Nothing:
        def evict(self, count: int) -> int:
            return 0

        def unheld(self, page: int) -> None:
            pass

    pages = Pages(2, 4)
    pages.attach(Nothing())
    with pytest.raises(ValueError, match="prefix cache already"):
        pages.attach(Nothing())


@pytest.mark.parametrize("damage", [
    lambda pages, held: pages._free.append(pages._free[0]),
    lambda pages, held: pages._free.append(held),
    lambda pages, held: pages._free.pop(),
    lambda pages, held: pages._requests.__setitem__(held, -1),
    lambda pages, held: pages._in_cache.__setitem__(pages._free[0], 1),
    lambda pages, held: setattr(pages, "num_cached", 1),
])
def test_integrity_sees_each_kind_of_damage(damage: Callable[[Pages, int], None]) -> None:
    pages = Pages(5, 2)
    held = pages.allocate(2)
    pages.check_integrity()
    damage(pages, held[0])
    with pytest.raises(AssertionError):
        pages.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_forks_write_into_their_own_slots(data: st.DataObject) -> None:
    """Sequences that fork and grow in any order read back exactly what each of them wrote."""
    size = data.draw(st.sampled_from([1, 2, 3, 16, 64]))
    pool = PagePool(SPEC, data.draw(st.integers(1, 12)), size)
    sequences: list[tuple[list[int], list[float]]] = [([], [])]
    stamp = 0.0
    for _ in range(data.draw(st.integers(1, 25))):
        pages, written = data.draw(st.sampled_from(sequences)) if sequences else ([], [])
        action = data.draw(st.sampled_from(["grow", "grow", "fork", "end", "start"]))
        if action == "start":
            sequences.append(([], []))
        elif action == "fork" and sequences:
            sequences.append((pool.share(pages), list(written)))
        elif action == "end" and sequences:
            index = next(i for i, s in enumerate(sequences) if s[0] is pages)
            del sequences[index]
            pool.release(pages)
        elif sequences:
            end = len(written) + data.draw(st.integers(0, 2 * size + 1))
            before, free = list(pages), pool.num_free
            needed = pool.growth(pages, len(written), end)
            try:
                pool.grow(pages, len(written), end)
            except OutOfPages:
                assert needed > free and pages == before and pool.num_free == free
                continue
            assert free - pool.num_free == needed  # a copied page stays with the others
            for position in range(len(written), end):
                stamp += 1
                slot = pages[position // size] * size + position % size
                for layer in range(3):
                    pool.keys[layer][slot] = stamp + layer / 8
                    pool.values[layer][slot] = -stamp - layer / 8
                written.append(stamp)
        pool.check_integrity()
        for pages, written in sequences:
            slots = [pages[i // size] * size + i % size for i in range(len(written))]
            expected = torch.tensor(written).view(-1, 1, 1).expand(-1, 1, 6)
            for layer in range(3):
                assert torch.equal(pool.keys[layer][slots], expected + layer / 8)
                assert torch.equal(pool.values[layer][slots], -expected - layer / 8)
    for pages, _ in sequences:
        pool.release(pages)
    assert pool.num_free == pool.num_pages


def test_the_last_holder_writes_in_place() -> None:
    pages = Pages(4, 4)
    first = pages.allocate(1)
    second = pages.share(first)
    pages.grow(second, 3, 4)
    assert second != first and pages.num_held == 2
    before = list(first)
    pages.grow(first, 3, 4)
    assert first == before and pages.num_held == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_is_whole_and_starts_on_a_cache_line(dtype: torch.dtype) -> None:
    pool = PagePool(SPEC, 7, 1, dtype)
    for tensor in pool.keys + pool.values:
        assert tensor.shape == (7, 1, 6) and tensor.dtype == dtype
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    starts = sorted(tensor.data_ptr() for tensor in pool.keys + pool.values)
    assert all(b - a >= pool.keys[0].nbytes for a, b in pairwise(starts))
