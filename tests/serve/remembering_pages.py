"""Pages that remember what was written into them, so that a page reused while somebody still counts
on it is seen."""

from __future__ import annotations

from kilter.serve.pages import Pages


class RememberingPages(Pages):
    """Every slot holds what its keys and values would depend on: the namespace and the text up to
    its token."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.slots: list[object] = [None] * (num_pages * page_size)

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        start, end = source * self.page_size, target * self.page_size
        self.slots[end:end + tokens] = self.slots[start:start + tokens]

    def forget_free(self) -> None:
        """A page that became free forgets, so a stale reference reads None."""
        for page in self._free:
            start = page * self.page_size
            self.slots[start:start + self.page_size] = [None] * self.page_size
