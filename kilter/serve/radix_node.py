"""What a prefix tree is made of: tokens as keys; nodes, each a run of pages and what follows it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator

TOKEN_BYTES = 4  # in a key


def token_key(tokens: Iterable[int]) -> bytes:
    """Token ids as the tree compares them: 4 bytes each. Make it once per request.

    Raises:
        OverflowError: for an id outside [0, 2**32).
    """
    key = array("I", tokens)
    assert key.itemsize == TOKEN_BYTES
    return key.tobytes()


def common_prefix(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two keys, tokens. O(length), at memory speed."""
    size = min(len(a), len(b))
    different = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (different.bit_length() + 7) // 8) // TOKEN_BYTES


class Node:
    """A run of whole pages, in a leaf also a partly filled last one."""

    __slots__ = ("children", "order", "pages", "parent", "queued", "run", "serial", "used")

    def __init__(self, run: bytes, pages: list[int], used: int, serial: int) -> None:
        self.parent: Node | None = None  # None: a root, or no longer in the tree
        self.run = run  # token key
        self.pages = pages
        self.used = used  # the tree's clock when last acquired or inserted
        self.serial = serial  # orders equal times in the heap
        self.queued = False  # in the heap
        self.children: dict[bytes, Node] = {}  # by their first page's tokens
        self.order: list[bytes] = []  # the children's keys, sorted

    @property
    def tokens(self) -> int:
        """How many its run has."""
        return len(self.run) // TOKEN_BYTES

    def put(self, child: Node, page_bytes: int) -> None:
        key = child.run[:page_bytes]
        self.children[key] = child
        insort(self.order, key)
        child.parent = self

    def take(self, child: Node, page_bytes: int) -> None:
        key = child.run[:page_bytes]
        del self.children[key]
        del self.order[bisect_left(self.order, key)]
        child.parent = None

    def neighbours(self, head: bytes) -> list[Node]:
        """The up to two children next to where ``head`` would stand; one of them shares most
        tokens with it."""
        place = bisect_left(self.order, head)
        return [self.children[key] for key in self.order[max(place - 1, 0):place + 1]]

    def whole_pages(self, key: bytes, offset: int, page_bytes: int) -> int:
        """How many whole pages of its run the text goes on with at ``offset``."""
        run = self.run
        if key.startswith(run, offset):
            return len(run) // page_bytes
        same, different = 0, min(len(run), len(key) - offset) // page_bytes + 1
        while different - same > 1:
            middle = (same + different) // 2
            part = run[same * page_bytes:middle * page_bytes]
            if key.startswith(part, offset + same * page_bytes):
                same = middle
            else:
                different = middle
        return same

    def descend(self) -> Iterator[Node]:
        """Every node below, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


class Root(Node):
    """The start of a namespace; it has no pages."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(b"", [], 0, 0)
        self.namespace = namespace
