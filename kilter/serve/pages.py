"""The paged KV cache: per layer two tensors of slots, handed out in fixed-size pages.

A slot is ``page * page_size + offset``; page ids and slots mean the same in every layer.
"""

from __future__ import annotations

import torch

from kilter.models.spec import ModelSpec


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens for every layer of a model.

    Bytes: ``num_pages * page_size * spec.kv_elements_per_token * dtype.itemsize``.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, page_size: int = 16,
                 dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu") -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"A page pool needs at least one page of at least one token; got "
                             f"{num_pages} pages of {page_size}.")
        shape = (num_pages * page_size, spec.num_kv_heads, spec.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in spec.layers]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in spec.layers]
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` page ids.

        Raises:
            OutOfPages: if fewer are free.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages were asked for but {len(self._free)} of "
                             f"{self.num_pages} are free.")
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Gives pages back.

        Raises:
            ValueError: for a page that is not held.
        """
        for page in pages:
            if page not in self._held:
                raise ValueError(f"Page {page} was released but is not held.")
            self._held.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free or held, and only one of the two."""
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert not self._held & set(self._free), "a page is both free and held"
        assert len(self._free) + len(self._held) == self.num_pages, "pages were lost"
