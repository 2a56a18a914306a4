"""The prefix cache: a radix tree from token sequences to the pages that hold their keys and values.

A node is a run of whole pages; only a leaf may end in a partly filled one. So a page belongs to
one node, nodes split between pages, and a match is still exact to the token: what is shared
inside a page is copied into a page of the request's own.

    page size 4      root
                      └── [a b c d | e f g h]              2 pages
                           ├── [i j k l | m n]             2 pages, the last one half full
                           └── [i j x y]                   shares "i j" with its sibling, by copy

No key of a child (the tokens of its first page) is a prefix of a sibling's: a partial page is
replaced when a longer one arrives. Keys are kept sorted, so the sibling that shares most tokens
with a text is a neighbour of the place where the text would stand.

**Locking.** There are no locks beside the pages' reference counts, so none can go out of step. A
request holds the tree's own pages from the root down to where its prefix ends (`acquire` shares
them; `insert` swaps duplicates for them, and takes no page that a fork still holds, which may
have other pages before it). Hence whatever is held has all its ancestors held, every page that is
only cached can be evicted leaf by leaf, and releasing a request's pages is all that unlocks them.
Splits, evictions and `drop_namespace` do not concern a request.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from typing import NamedTuple

from kilter.serve.pages import Pages
from kilter.serve.radix_node import TOKEN_BYTES, Node, Root, common_prefix


class Match(NamedTuple):
    """The longest cached prefix of a text."""

    length: int  # tokens, those in the partly shared page included
    pages: list[int]  # wholly shared pages, from the start
    partial: int | None  # page whose first ``length % page_size`` tokens are shared, if any


class RadixTree:
    """A prefix cache over ``pages``, whose cached state it alone governs.

    A namespace (adapter, weight version, salt: anything hashable) shares nothing with another.
    Deterministic; time is a counter of `acquire` and `insert` calls.

    Cost, for a text of T tokens: `match`, `acquire`, `insert` O(T) with the compares in C, plus a
    binary search where a node has several children. Evicting a leaf is O(log leaves), beside
    removing its key from its parent's sorted list (a memmove).
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.num_tokens = 0  # in the tree
        self.num_pages = 0  # in the tree; pages.num_cached of them can be evicted
        self.version = 0  # changes whenever a match could
        self._page_bytes = pages.page_size * TOKEN_BYTES
        self._roots: dict[Hashable, Node] = {}
        self._leaves: dict[int, Node] = {}  # by their last page
        # Leaves that may be evictable, least recently used first. An entry is checked when it
        # comes up: a leaf that was used since is put back, one that cannot be evicted dropped.
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._serial = 0
        pages.attach(self)

    @property
    def num_protected(self) -> int:
        """Pages of the tree that requests hold; the others are ``pages.num_cached``."""
        return self.num_pages - self.pages.num_cached

    # What requests do

    def match(self, key: bytes, namespace: Hashable = None) -> Match:
        """The longest cached prefix of a text, at most its length - 1: the last token is always
        computed, since its logits are what comes next. Changes nothing; the pages are not held
        (see `acquire`)."""
        return self._find(key, namespace)[0]

    def acquire(self, key: bytes, namespace: Hashable = None) -> tuple[list[int], int]:
        """Holds the longest cached prefix for a request, as `match` defines it.

        A partly shared page is copied into a fresh one, unless no page is left for that: then
        the prefix ends at the page before.

        Returns:
            (pages, length): the request's pages, to be released like any other, and how many
            tokens they hold.
        """
        match, node, taken = self._find(key, namespace)
        pages = self.pages.share(match.pages)
        if node is not None:
            # The part that is not shared keeps its age.
            self._touch(self._split(node, taken) if 0 < taken < len(node.pages) else node)
        if match.partial is None:
            return pages, match.length
        if self.pages.num_available == 0:
            return pages, len(pages) * self.pages.page_size
        pages += self.pages.allocate(1)
        # Where the partly shared page was itself evicted to make room, it is the one that was
        # allocated: it still holds what it held, and is copied onto itself.
        self.pages.copy_page(match.partial, pages[-1], match.length % self.pages.page_size)
        return pages, match.length

    def insert(self, key: bytes, pages: list[int], namespace: Hashable = None) -> None:
        """Keeps the whole pages of a running request's computed text; see `finish` for the rest.

        Where the tree already has the same text, the request's ``pages`` are replaced in place by
        the tree's and its own released: identical prompts computed at the same time end up on
        one copy. Pages shared with a fork enter when only one of the two holds them (insert
        before forking, and they are in the tree already).

        Args:
            key: the text of which keys and values are computed.
            pages: the request's pages, all held by it.

        Raises:
            ValueError: for too few pages, or a page that nobody holds or that is in the tree at
                another place.
        """
        self._insert(key[:len(key) // self._page_bytes * self._page_bytes], pages, namespace)

    def finish(self, key: bytes, pages: list[int], namespace: Hashable = None) -> None:
        """Keeps all of a text, its partly filled last page too, and releases the request's
        pages (the list is emptied). Else as `insert`."""
        self._insert(key, pages, namespace)
        self.pages.release(pages)
        pages.clear()

    # What the engine does

    def evict(self, count: int) -> int:
        """Frees ``count`` cached pages, or all if there are fewer: least recently used leaves
        first, each from its end, held pages never. Returns how many."""
        freed = 0
        while freed < count and self._heap:
            used, serial, leaf = self._heap[0]
            if leaf.parent is None or leaf.children or self.pages.is_held(leaf.pages[-1]):
                heapq.heappop(self._heap)
                leaf.queued = False
            elif used != leaf.used:
                heapq.heapreplace(self._heap, (leaf.used, serial, leaf))
            else:
                freed += self._shorten(leaf, count - freed)
        return freed

    def unheld(self, page: int) -> None:
        """Called by `Pages` where a text's pages lost their last request. This is the last one;
        the others have it after them in the tree, so only this can be the end of a leaf."""
        leaf = self._leaves.get(page)
        if leaf is not None:
            self._queue(leaf)

    def drop_namespace(self, namespace: Hashable) -> None:
        """Forgets everything in a namespace (after a weight update, say). Pages that requests
        hold stay theirs and are free after them."""
        root = self._roots.pop(namespace, None)
        if root is None:
            return
        for node in list(root.descend()):
            self._leaves.pop(node.pages[-1], None)
            self._give_up(node.pages, node.run)
            node.parent = None

    def reset(self) -> None:
        """Forgets everything in all namespaces."""
        for namespace in list(self._roots):
            self.drop_namespace(namespace)

    def walk(self) -> Iterator[Node]:
        """Every node, those nearer to a root first."""
        level = [node for root in self._roots.values() for node in root.children.values()]
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

    def check_integrity(self) -> None:
        """Walks the tree and recounts the pages: raises AssertionError for anything that does not
        hold. O(pages)."""
        self.pages.check_integrity()
        tokens, leaves, seen = 0, {}, []
        for root in self._roots.values():
            assert root.children, "an empty namespace is kept"
            for node in root.descend():
                parent, run = node.parent, node.run
                assert parent is not None and parent.children[run[:self._page_bytes]] is node
                assert len(node.pages) == -(-len(run) // self._page_bytes) > 0
                assert len(run) % self._page_bytes == 0 or not node.children
                assert node.order == sorted(node.children), "children out of order"
                assert not any(b.startswith(a) for a, b in pairwise(node.order)), (
                    "a child is another's prefix")
                held = [self.pages.is_held(page) for page in parent.pages[-1:] + node.pages]
                assert held == sorted(held, reverse=True), "a page is held but not its ancestors"
                assert node.queued or node.children or held[-1], "an evictable leaf is not queued"
                assert parent is root or parent.used >= node.used, "used, but its prefix was not"
                tokens += len(run) // TOKEN_BYTES
                seen += node.pages
                if not node.children:
                    leaves[node.pages[-1]] = node
        assert len(set(seen)) == len(seen) == self.num_pages, "a page is in the tree twice"
        assert tokens == self.num_tokens and leaves == self._leaves
        assert self.num_protected == sum(map(self.pages.is_held, seen))

    # The walk

    def _find(self, key: bytes, namespace: Hashable) -> tuple[Match, Node | None, int]:
        """The match; the deepest node with a wholly shared page (the root if there is none, None
        if there is no root), and how many of its pages are shared."""
        size = self._page_bytes
        key = key[:-TOKEN_BYTES]
        pages: list[int] = []
        node: Node | None = self._roots.get(namespace)
        if node is None:
            return Match(0, pages, None), None, 0
        offset = taken = 0
        partials: list[tuple[bytes, int]]  # pages that may begin as the text goes on
        while True:
            head = key[offset:offset + size]
            child = node.children.get(head)
            count = child.whole_pages(key, offset, size) if child is not None else 0
            if child is None or count == 0:
                partials = [(near.run[:size], near.pages[0]) for near in node.neighbours(head)]
                break
            node, taken = child, count
            pages += child.pages[:count]
            offset += count * size
            if count < len(child.pages):
                head = key[offset:offset + size]
                partials = [(child.run[count * size:(count + 1) * size], child.pages[count])]
                break
        shared, partial = max(((common_prefix(text, head), page) for text, page in partials),
                              default=(0, 0))
        length = offset // TOKEN_BYTES + shared
        return Match(length, pages, partial if shared else None), node, taken

    def _insert(self, key: bytes, pages: list[int], namespace: Hashable) -> None:
        size = self._page_bytes
        if len(pages) * size < len(key):
            raise ValueError(f"A text of {len(key) // TOKEN_BYTES} tokens was to enter the prefix "
                             f"cache with {len(pages)} pages of {self.pages.page_size}.")
        node: Node = self._roots.get(namespace) or Root(namespace)
        offset = 0
        while offset < len(key):
            head = key[offset:offset + size]
            child = node.children.get(head)
            count = child.whole_pages(key, offset, size) if child is not None else 0
            if child is None or count == 0:
                node = self._graft(node, key[offset:], pages[offset // size:])
                break
            self._adopt(child.pages[:count], pages, offset // size)
            offset += count * size
            if count < len(child.pages) and offset < len(key):
                child = self._split(child, count)
            node = child
        self._touch(node)

    def _graft(self, node: Node, run: bytes, pages: SequenceOf[int]) -> Node:
        """Puts the rest of a text below a node that no child goes on with for a whole page.
        Returns the deepest node with the text."""
        pages = pages[:-(-len(run) // self._page_bytes)]
        pages = pages[:self.pages.num_unshared(pages)]
        run = run[:len(pages) * self._page_bytes]
        if not run:
            return node
        head = run[:self._page_bytes]
        for near in node.neighbours(head):
            if near.run.startswith(head):  # a partial page, and the tree has it
                return near
            if head.startswith(near.run):  # a partial page of the tree that this one replaces
                self._remove(near)
        return self._add(node, run, pages)

    def _adopt(self, ours: list[int], pages: list[int], start: int) -> None:
        """Replaces a request's copies of the tree's pages ``ours`` by those."""
        own = pages[start:start + len(ours)]
        if own == ours:  # fast where they are the very same numbers
            return
        swaps = [(i, page) for i, page in enumerate(ours) if own[i] != page]
        self.pages.release([own[i] for i, _ in swaps])
        self.pages.share([page for _, page in swaps])
        pages[start:start + len(ours)] = ours

    # The shape of the tree

    def _add(self, parent: Node, run: bytes, pages: SequenceOf[int]) -> Node:
        self.pages.enter_cache(pages)
        if isinstance(parent, Root):
            self._roots[parent.namespace] = parent
        else:
            self._leaves.pop(parent.pages[-1], None)
        leaf = self._node(run, list(pages), self._clock)
        parent.put(leaf, self._page_bytes)
        self._leaves[pages[-1]] = leaf
        self.num_tokens += len(run) // TOKEN_BYTES
        self.num_pages += len(pages)
        self.version += 1
        return leaf

    def _split(self, node: Node, count: int) -> Node:
        """Makes the first ``count`` pages of a node its parent, and returns that. The node stays
        what it was for the heap and the register of leaves: the end of its run."""
        parent, cut = node.parent, count * self._page_bytes
        assert parent is not None
        head = self._node(node.run[:cut], node.pages[:count], node.used)
        parent.take(node, self._page_bytes)
        parent.put(head, self._page_bytes)
        node.run, node.pages = node.run[cut:], node.pages[count:]
        head.put(node, self._page_bytes)
        return head

    def _shorten(self, leaf: Node, count: int) -> int:
        """Frees up to ``count`` pages from a leaf's end, down to one that is held."""
        held = bisect_left(leaf.pages, True, key=lambda page: not self.pages.is_held(page))
        keep = max(len(leaf.pages) - count, held)
        if keep == 0:
            count = len(leaf.pages)
            self._remove(leaf)
            return count
        cut = keep * self._page_bytes
        gone = leaf.pages[keep:]
        del self._leaves[leaf.pages[-1]]
        self._give_up(gone, leaf.run[cut:])
        leaf.run, leaf.pages = leaf.run[:cut], leaf.pages[:keep]
        self._leaves[leaf.pages[-1]] = leaf
        return len(gone)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        parent.take(leaf, self._page_bytes)
        del self._leaves[leaf.pages[-1]]
        self._give_up(leaf.pages, leaf.run)
        if parent.children:
            return
        if isinstance(parent, Root):
            del self._roots[parent.namespace]
            return
        self._leaves[parent.pages[-1]] = parent
        if not self.pages.is_held(parent.pages[-1]):
            self._queue(parent)

    def _give_up(self, pages: SequenceOf[int], run: bytes) -> None:
        self.pages.leave_cache(pages)
        self.num_tokens -= len(run) // TOKEN_BYTES
        self.num_pages -= len(pages)
        self.version += 1

    def _node(self, run: bytes, pages: list[int], used: int) -> Node:
        self._serial += 1
        return Node(run, pages, used, self._serial)

    # The order of eviction

    def _touch(self, node: Node | None) -> None:
        self._clock += 1
        while node is not None:
            node.used = self._clock
            node = node.parent

    def _queue(self, leaf: Node) -> None:
        if leaf.queued:
            return
        if len(self._heap) > 2 * len(self._leaves) + 64:  # mostly nodes that are leaves no more
            entries, self._heap = self._heap, []
            for entry in entries:
                node = entry[2]
                node.queued = node.parent is not None and not node.children
                if node.queued:
                    self._heap.append(entry)
            heapq.heapify(self._heap)
        leaf.queued = True
        heapq.heappush(self._heap, (leaf.used, leaf.serial, leaf))
