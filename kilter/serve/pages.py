"""The paged KV cache: fixed-size pages, who uses each, and the tensors behind them.

`Pages` is bookkeeping alone (a scheduler can be simulated on it without a model); `PagePool` adds
the keys and values. A page is in one of three states:

                    allocate                 enter_cache
        free  ───────────────────▶  held  ───────────────────┐
          ▲                          │ ▲                     ▼
          │        last release      │ │ share        held and in the prefix cache
          ├──────────────────────────┘ │                     │ last release
          │         eviction           │                     ▼
          └────────────────────────────┴─────────────────  cached

A page is held while at least one request counts on it, cached while only the prefix cache does
(so it can be had by evicting it), else free: ``free + cached + held == total``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import torch

from kilter.models.spec import ModelSpec


class OutOfPages(RuntimeError):
    """Fewer pages are free or cached than were asked for; nothing was taken or evicted."""


class PrefixCache(Protocol):
    """What pages need of the cache that keeps some of them after their requests are gone."""

    def evict(self, count: int) -> int:
        """Gives up ``count`` cached pages, or all if there are fewer; returns how many."""

    def unheld(self, page: int) -> None:
        """Pages of the cache lost their last request and may be evicted from now on; this is the
        last of them in their text."""


class Pages:
    """Reference counts of ``num_pages`` pages of ``page_size`` tokens.

    A list of pages is a text's or a part of one's: in its order, no page twice.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"A page pool needs at least one page of at least one token; got "
                             f"{num_pages} pages of {page_size}.")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_cached = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._requests = array("i", bytes(4 * num_pages))  # how many requests hold each page
        self._in_cache = bytearray(num_pages)
        # The same memory for numpy: a long text has many pages, and all are counted each time.
        self._requests_P = np.frombuffer(self._requests, np.intc)
        self._in_cache_P = np.frombuffer(self._in_cache, np.bool_)
        self._cache: PrefixCache | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones by eviction."""
        return len(self._free) + self.num_cached

    def is_held(self, page: int) -> bool:
        return self._requests[page] > 0

    def holders(self, page: int) -> int:
        """How many requests hold a page."""
        return self._requests[page]

    def page_map(self) -> str:
        """One character per page: "0" free, "c" only cached, "1" to "9" held by so many requests
        (9: or more)."""
        codes_P = ord("0") + np.minimum(self._requests_P, 9)
        codes_P[(self._requests_P == 0) & self._in_cache_P] = ord("c")
        return codes_P.astype(np.uint8).tobytes().decode("ascii")

    def num_unshared(self, pages: SequenceOf[int]) -> int:
        """How many pages come before the first that several requests hold."""
        shared = np.flatnonzero(self._requests_P[_index(pages)] > 1)
        return int(shared[0]) if len(shared) else len(pages)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    # What requests do

    def allocate(self, count: int) -> list[int]:
        """``count`` page ids with undefined contents, held by the caller; evicts if it must.

        Raises:
            OutOfPages: if fewer are free or cached.
        """
        short = count - len(self._free)
        if short > 0:
            if short > self.num_cached:
                raise OutOfPages(f"{count} pages were asked for but of {self.num_pages} only "
                                 f"{len(self._free)} are free and {self.num_cached} cached.")
            assert self._cache is not None, "pages are cached but no cache is attached"
            evicted = self._cache.evict(short)
            assert evicted == short, f"{short} cached pages were to be evicted, {evicted} were"
        start = len(self._free) - count
        pages = self._free[start:]
        del self._free[start:]
        pages.reverse()
        for page in pages:
            self._requests[page] = 1
        return pages

    def share(self, pages: SequenceOf[int]) -> list[int]:
        """Holds pages once more, for one more request (a prefix hit, a fork).

        Raises:
            ValueError: for a page that is free; nothing was changed.
        """
        index = _index(pages)
        unheld = index[self._requests_P[index] == 0]
        if not self._in_cache_P[unheld].all():
            raise ValueError(f"Page {unheld[~self._in_cache_P[unheld]][0]} was to be shared but "
                             f"is free.")
        self.num_cached -= len(unheld)
        self._requests_P[index] += 1
        return list(pages)

    def release(self, pages: SequenceOf[int]) -> None:
        """Undoes one `allocate` or `share` of each page.

        Raises:
            ValueError: for a page that is not held; nothing was changed.
        """
        index = _index(pages)
        counts = self._requests_P[index] - 1
        if (counts < 0).any():
            raise ValueError(f"Page {index[counts < 0][0]} was released but is not held.")
        self._requests_P[index] = counts
        unheld = index[counts == 0]
        inside = self._in_cache_P[unheld]
        self._free += unheld[~inside].tolist()
        cached = unheld[inside]
        self.num_cached += len(cached)
        if len(cached) and self._cache is not None:
            self._cache.unheld(int(cached[-1]))

    def growth(self, pages: SequenceOf[int], computed: int, end: int) -> int:
        """How many pages `grow` would allocate."""
        fresh = self.pages_for(end) - len(pages)
        return max(fresh, 0) + (end > computed and self._must_copy(pages, computed))

    def grow(self, pages: list[int], computed: int, end: int) -> None:
        """Makes a request's ``pages`` ready for its tokens ``computed .. end - 1`` to be written:
        appends missing pages, and replaces the one that already holds tokens by a copy if others
        count on it too (copy-on-write after a fork).

        Raises:
            OutOfPages: nothing was changed.
        """
        fresh = self.allocate(self.growth(pages, computed, end))
        if end > computed and self._must_copy(pages, computed):
            index, tokens = divmod(computed, self.page_size)
            shared, pages[index] = pages[index], fresh.pop()
            self.copy_page(shared, pages[index], tokens)
            self.release([shared])
        pages.extend(fresh)

    def _must_copy(self, pages: SequenceOf[int], computed: int) -> bool:
        index, tokens = divmod(computed, self.page_size)
        if tokens == 0:
            return False
        return self._requests[pages[index]] > 1 or bool(self._in_cache[pages[index]])

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copies the first ``tokens`` slots of a page. Bookkeeping has no slots to copy."""

    # What the prefix cache does

    def attach(self, cache: PrefixCache) -> None:
        """Makes ``cache`` the one that is asked to evict."""
        if self._cache is not None:
            raise ValueError("These pages have a prefix cache already; a second one would count "
                             "on pages that the first one evicts.")
        self._cache = cache

    def enter_cache(self, pages: SequenceOf[int]) -> None:
        """Keeps held pages in the cache after their requests are gone.

        Raises:
            ValueError: for a page that is not held, or is in the cache already; nothing changed.
        """
        index = _index(pages)
        unheld, inside = self._requests_P[index] == 0, self._in_cache_P[index]
        if unheld.any():
            raise ValueError(f"Page {index[unheld][0]} was to enter the prefix cache but no "
                             f"request holds it, so its contents may be anything.")
        if inside.any():
            raise ValueError(f"Page {index[inside][0]} was to enter the prefix cache a second "
                             f"time; a page belongs to one prefix in one namespace.")
        self._in_cache_P[index] = True

    def leave_cache(self, pages: SequenceOf[int]) -> None:
        """The cache gives pages up; those that no request holds become free."""
        index = _index(pages)
        assert self._in_cache_P[index].all(), "a page is not in the prefix cache"
        self._in_cache_P[index] = False
        unheld = index[self._requests_P[index] == 0].tolist()
        self.num_cached -= len(unheld)
        self._free += unheld

    def check_integrity(self) -> None:
        """Recounts: raises AssertionError unless every page is free, cached or held, and only one
        of them, and the counters say the same."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        held = {page for page, count in enumerate(self._requests) if count}
        cached = {page for page, inside in enumerate(self._in_cache) if inside} - held
        assert min(self._requests) >= 0, "a page was released more often than it was held"
        assert not free & held, f"pages {sorted(free & held)} are both free and held"
        assert not free & cached, f"pages {sorted(free & cached)} are both free and cached"
        assert (len(free), len(cached), len(held)) == (
            self.num_free, self.num_cached, self.num_held), "the counters are off"
        assert len(free) + len(cached) + len(held) == self.num_pages, "pages were lost"


def _index(pages: SequenceOf[int]) -> np.ndarray:
    """A list as a numpy index; by way of `array`, which reads lists several times faster."""
    return np.asarray(array("q", pages))


class PagePool(Pages):
    """Pages with keys and values for every layer of a model.

    ``keys[layer]`` and ``values[layer]`` are ``[num_pages * page_size, G, d]``; a token's slot is
    ``page * page_size + offset`` in each. Bytes: ``num_pages * page_size *
    spec.kv_elements_per_token * dtype.itemsize``, slots rounded up to a multiple of 64.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, page_size: int = 16,
                 dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu") -> None:
        super().__init__(num_pages, page_size)
        slots = num_pages * page_size
        # One tensor, so that a page is copied in all layers by one call; slots are padded so that
        # every layer starts on a cache line.
        self._shape = (2, len(spec.layers), -(-slots // 64) * 64, spec.num_kv_heads, spec.head_dim)
        self._dtype, self._device = dtype, torch.device(device)
        self.wake()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are held now."""
        return self._kv.nbytes

    def sleep(self) -> None:
        """Gives the memory back. Whoever has views of keys and values has to let go of them too.

        Raises:
            RuntimeError: if a page is in use.
        """
        if self.num_free < self.num_pages:
            raise RuntimeError(f"The KV cache cannot give its memory back: of {self.num_pages} "
                               f"pages {self.num_held} are held by requests and "
                               f"{self.num_cached} cached. End the requests and flush the cache.")
        self._kv = torch.empty(0, dtype=self._dtype, device=self._device)
        self.keys.clear()
        self.values.clear()

    def wake(self) -> None:
        """Takes the memory again; what it holds is undefined."""
        slots = self.num_pages * self.page_size
        self._kv = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self.keys = [self._kv[0, layer, :slots] for layer in range(self._shape[1])]
        self.values = [self._kv[1, layer, :slots] for layer in range(self._shape[1])]

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copies the first ``tokens`` slots of a page in every layer."""
        start, end = source * self.page_size, target * self.page_size
        self._kv[:, :, end:end + tokens] = self._kv[:, :, start:start + tokens]
