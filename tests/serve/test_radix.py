"""The radix tree against a plain model: a dict of texts, and pages whose slots remember what was
written into them, so that a page reused while somebody still counts on it is seen."""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kilter.serve import radix
from kilter.serve.pages import OutOfPages, Pages
from kilter.serve.radix import RadixTree
from kilter.serve.radix_node import common_prefix, token_key
from tests.serve.remembering_pages import RememberingPages

Text = tuple[int, ...]


@dataclass(eq=False)
class Request:
    """A request as an engine keeps it."""

    namespace: Hashable
    text: Text
    pages: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def key(self) -> bytes:
        return token_key(self.text[:self.computed])


class Engine:
    """Does to a tree what an engine would, without a model."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pages = RememberingPages(num_pages, page_size)
        self.tree = RadixTree(self.pages)

    def start(self, text: Text, namespace: Hashable = None) -> Request:
        request = Request(namespace, text)
        request.pages, request.computed = self.tree.acquire(token_key(text), namespace)
        return request

    def compute(self, request: Request, tokens: int) -> None:
        end = min(request.computed + tokens, len(request.text))
        self.pages.grow(request.pages, request.computed, end)
        size = self.pages.page_size
        for i in range(request.computed, end):
            slot = request.pages[i // size] * size + i % size
            self.pages.slots[slot] = (request.namespace, request.text[:i + 1])
        request.computed = end

    def run(self, text: Text, namespace: Hashable = None) -> Request:
        """A request computed to its end, not finished."""
        request = self.start(text, namespace)
        self.compute(request, len(text))
        self.tree.insert(request.key, request.pages, namespace)
        return request

    def finish(self, request: Request) -> None:
        self.tree.finish(request.key, request.pages, request.namespace)

    def serve(self, text: Text, namespace: Hashable = None) -> None:
        self.finish(self.run(text, namespace))

    def texts(self) -> dict[Hashable, list[Text]]:
        """Every text in the tree, its slots checked on the way."""
        found: dict[Hashable, list[Text]] = {}
        size = self.pages.page_size
        for namespace, root in self.tree._roots.items():
            stack = [(child, ()) for child in root.children.values()]
            while stack:
                node, before = stack.pop()
                text: Text = before + tuple(memoryview(node.run).cast("I"))
                for i in range(len(before), len(text)):
                    page = node.pages[i // size - len(before) // size]
                    assert self.pages.slots[page * size + i % size] == (namespace, text[:i + 1])
                found.setdefault(namespace, []).append(text)
                stack += [(child, text) for child in node.children.values()]
        return found

    def check(self, requests: list[Request]) -> None:
        self.pages.forget_free()
        self.tree.check_integrity()
        size = self.pages.page_size
        for request in requests:
            assert len(request.pages) >= self.pages.pages_for(request.computed)
            for i in range(request.computed):
                slot = request.pages[i // size] * size + i % size
                assert self.pages.slots[slot] == (request.namespace, request.text[:i + 1])
        held = {page for request in requests for page in request.pages}
        assert len(held) == self.pages.num_held
        assert self.tree.num_protected + self.pages.num_cached == self.tree.num_pages
        self.texts()


def longest_common(text: Text, others: list[Text]) -> int:
    best = 0
    for other in others:
        shared = 0
        while shared < min(len(text), len(other)) and text[shared] == other[shared]:
            shared += 1
        best = max(best, shared)
    return best


BASES = [tuple(random.Random(seed).choices(range(7), k=260)) for seed in range(3)]
SIZES = st.sampled_from([1, 2, 3, 4, 16, 64])


@st.composite
def texts(draw: st.DrawFn, size: int) -> Text:
    """Texts that often share long prefixes and part at any place of a page."""
    base = draw(st.sampled_from(BASES))
    length = draw(st.integers(0, 4 * size))
    return base[:length] + tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))


class TreeMachine(RuleBasedStateMachine):
    """Case 13: insert, match, hold, split, fork, evict and drop in any order."""

    @initialize(size=SIZES, num_pages=st.sampled_from([1, 2, 8, 20, 400]))
    def begin(self, size: int, num_pages: int) -> None:
        self.engine = Engine(num_pages, size)
        self.running: list[Request] = []
        self.known: dict[Hashable, set[Text]] = {}  # all that was ever kept
        self.complete = True  # nothing was evicted yet, so `known` is what the tree holds
        if num_pages < 400:
            self.complete = False

    def keep(self, request: Request, length: int) -> None:
        """Checks that a request's text is in the tree, as far as no fork shares its pages."""
        kept = self.engine.tree.match(token_key(request.text[:length] + (9,)),
                                      request.namespace).length
        if not any(set(request.pages) & set(other.pages)
                   for other in self.running if other is not request):
            assert kept == length
        if kept:
            self.known.setdefault(request.namespace, set()).add(request.text[:kept])

    @rule(data=st.data(), namespace=st.sampled_from([None, "adapter"]))
    def start(self, data: st.DataObject, namespace: Hashable) -> None:
        text = data.draw(texts(self.engine.pages.page_size))
        match = self.engine.tree.match(token_key(text), namespace)
        kept = self.engine.texts().get(namespace, [])
        assert match.length == longest_common(text[:-1], kept)
        if self.complete:
            assert match.length == longest_common(text[:-1], list(self.known.get(namespace, ())))
        free = self.engine.pages.num_available
        request = self.engine.start(text, namespace)
        size = self.engine.pages.page_size
        assert request.pages[:len(match.pages)] == match.pages
        if request.computed != match.length:  # no page was left for the copy
            assert request.computed == match.length // size * size and free <= len(match.pages) + 1
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 100), publish=st.booleans())
    def compute(self, data: st.DataObject, tokens: int, publish: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        pages = self.engine.pages
        try:
            self.engine.compute(request, tokens)
        except OutOfPages:
            end = min(request.computed + tokens, len(request.text))
            needed = pages.growth(request.pages, request.computed, end)
            assert needed > pages.num_available
            return
        if publish:
            self.engine.tree.insert(request.key, request.pages, request.namespace)
            self.keep(request, request.computed // pages.page_size * pages.page_size)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def fork(self, data: st.DataObject, tail: list[int]) -> None:
        """Goes on differently from any place of what a request has computed."""
        request = data.draw(st.sampled_from(self.running))
        at = data.draw(st.integers(0, request.computed))
        pages = request.pages[:self.engine.pages.pages_for(at)]
        self.running.append(Request(request.namespace, request.text[:at] + tuple(tail),
                                    self.engine.pages.share(pages), at))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        pages = list(request.pages)
        self.engine.finish(request)
        assert request.pages == []
        request.pages = pages  # as they were, to see whether a fork shared them
        self.keep(request, request.computed)
        self.running.remove(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.engine.pages.release(request.pages)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        pages, tree = self.engine.pages, self.engine.tree
        free, cached, protected = pages.num_free, pages.num_cached, tree.num_protected
        freed = tree.evict(count)
        assert freed == min(count, cached)
        assert pages.num_free == free + freed
        assert pages.num_cached == cached - freed and tree.num_protected == protected
        self.complete = self.complete and freed == 0

    @rule(namespace=st.sampled_from([None, "adapter"]))
    def drop(self, namespace: Hashable) -> None:
        for request in [r for r in self.running if r.namespace == namespace]:
            self.running.remove(request)  # its weights are gone
            self.engine.pages.release(request.pages)
        self.engine.tree.drop_namespace(namespace)
        self.known.pop(namespace, None)

    @rule()
    def reset(self) -> None:
        """Requests that run go on and may publish what they hold again."""
        self.engine.tree.reset()
        self.known.clear()
        assert self.engine.tree.num_tokens == self.engine.pages.num_cached == 0

    @invariant()
    def whole(self) -> None:
        self.engine.check(self.running)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        pages, tree = self.engine.pages, self.engine.tree
        for request in self.running:
            pages.release(request.pages)
        assert pages.num_held == tree.num_protected == 0
        pages.release(pages.allocate(pages.num_pages))  # all that is cached can be had
        assert pages.num_free == pages.num_pages
        assert tree.num_tokens == tree.num_pages == 0
        assert not tree._roots and not tree._leaves
        tree.check_integrity()


TreeMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow])
TestCase13 = TreeMachine.TestCase


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    assert common_prefix(token_key(a), token_key(b)) == longest_common(tuple(a), [tuple(b)])


def test_ids_that_are_no_tokens_are_refused() -> None:
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            token_key([token])
    with pytest.raises(ValueError, match="8 tokens was to enter the prefix cache with 1 pages"):
        RadixTree(Pages(4, 4)).insert(token_key(range(8)), [0])


@pytest.mark.parametrize("size", [1, 4, 64])
def test_a_hit_leaves_the_last_token_to_be_computed(size: int) -> None:
    engine = Engine(40, size)
    text = BASES[0][:2 * size]
    engine.serve(text)
    assert engine.start(text).computed == len(text) - 1
    assert engine.start(text + (1,)).computed == len(text)
    assert engine.start(text[:1]).computed == 0
    assert engine.tree.match(b"").length == 0


@pytest.mark.parametrize("size", [1, 2, 16, 64])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_case_11_identical_prompts_at_once_share_one_copy(size: int, chunk: int) -> None:
    """Neither finds anything in the tree; the one that publishes second gives its pages back and
    reads the first one's from then on. The pool has no page to spare for a leak."""
    text = BASES[0][:2 * size + size // 2]
    engine = Engine(2 * Pages(1, size).pages_for(len(text)), size)
    for _ in range(3):
        engine.tree.reset()
        a, b = engine.start(text), engine.start(text)
        while a.computed < len(text) or b.computed < len(text):
            for request in (a, b):
                engine.compute(request, chunk)
                engine.tree.insert(request.key, request.pages)
                engine.check([a, b])
        whole = len(text) // size
        assert a.pages[:whole] == b.pages[:whole]
        assert engine.pages.num_held == whole + 2 * (len(text) % size > 0)
        engine.finish(a)
        engine.check([b])
        engine.finish(b)
        engine.check([])
        assert engine.pages.num_cached == engine.pages.pages_for(len(text))


def test_case_12_a_cached_prompt_keeps_its_page_table() -> None:
    """A fully cached prompt: its last token goes into a page of its own, and the pages read by the
    next steps are the same ones, published or not."""
    engine = Engine(20, 4)
    engine.serve(BASES[0][:8])
    request = engine.start(BASES[0][:8] + (1, 2, 3))
    first = list(request.pages)
    for _ in range(3):
        engine.compute(request, 1)
        engine.tree.insert(request.key, request.pages)
        assert request.pages[:len(first)] == first
    engine.check([request])


def test_case_24_new_weights_find_nothing_of_the_old() -> None:
    engine = Engine(20, 4)
    text = BASES[0][:10]
    old = engine.run(text, ("weights", 1))
    assert engine.tree.match(token_key(text), ("weights", 2)).length == 0
    engine.tree.drop_namespace(("weights", 1))
    assert engine.tree.match(token_key(text), ("weights", 1)).length == 0
    engine.serve(text, ("weights", 2))
    engine.check([old])  # what still runs reads its own pages
    engine.pages.release(old.pages)
    assert engine.pages.num_held == 0


def test_case_14_pages_of_an_abort_at_any_time_come_back() -> None:
    text = BASES[0][:11]
    for steps in range(12):
        engine = Engine(8, 4)
        engine.serve(BASES[0][:6])
        request = engine.start(text)
        for _ in range(steps):
            engine.compute(request, 1)
            engine.tree.insert(request.key, request.pages)
        engine.pages.release(request.pages)
        engine.check([])
        assert engine.pages.num_free + engine.pages.num_cached == 8


def test_a_page_in_two_places_is_refused() -> None:
    engine = Engine(8, 4)
    request = engine.run(BASES[0][:8], "a")
    with pytest.raises(ValueError, match="second time"):
        engine.tree.insert(request.key, request.pages, "b")
    assert "b" not in engine.tree._roots
    engine.check([request])


def test_a_longer_text_replaces_the_partial_page_it_contains() -> None:
    """A conversation leaves no half-filled pages behind."""
    engine = Engine(30, 8)
    for turn in range(1, 9):
        engine.serve(BASES[0][:turn * 6])
        assert engine.tree.num_pages == engine.pages.pages_for(turn * 6)
        assert engine.tree.num_tokens == turn * 6
    engine.check([])


def test_siblings_share_tokens_inside_a_page() -> None:
    engine = Engine(30, 16)
    stem = BASES[0][:20]
    for end in range(5):
        request = engine.start(stem + (end, 7, 7))
        assert request.computed == (20 if end else 0)
        engine.compute(request, 100)
        engine.finish(request)
    engine.check([])
    assert engine.tree.num_pages == 1 + 5


def test_without_a_page_for_the_copy_the_hit_ends_at_a_page() -> None:
    engine = Engine(3, 4)
    others = [engine.run(BASES[0][:8]), Request(None, (), engine.pages.allocate(1))]
    request = engine.start(BASES[0][:7])  # one whole page and two tokens of the next
    assert request.computed == 4 and len(request.pages) == 1
    engine.check([request, *others])


def test_a_partly_shared_page_that_must_go_for_its_copy_is_taken_over() -> None:
    engine = Engine(3, 4)
    engine.serve(BASES[0][:8])
    other = Request(None, (), engine.pages.allocate(1))
    request = engine.start(BASES[0][:7])
    assert request.computed == 6 and engine.tree.num_tokens == 4
    engine.compute(request, 1)
    engine.check([request, other])


def test_a_fork_keeps_pages_out_of_the_tree_that_stand_on_its_own() -> None:
    """Parent and fork share two pages. Of the first the tree has another copy, which the parent
    takes over and the fork does not hold: were the second page kept below it, the fork would hold
    a page but not its ancestor, which counted as evictable and was not."""
    text = BASES[0][:7]
    for kept in (RadixTree.insert, RadixTree.finish):
        engine = Engine(6, 4)
        parent = engine.start(text)
        engine.compute(parent, 7)
        engine.serve(text[:4])
        fork = Request(None, text, engine.pages.share(parent.pages), 7)
        kept(engine.tree, parent.key, parent.pages)
        running = [r for r in (parent, fork) if r.pages]
        engine.check(running)
        engine.pages.release(engine.pages.allocate(engine.pages.num_available))
        engine.check(running)
        for request in running:
            engine.finish(request)
        engine.check([])
        assert engine.tree.match(token_key(text + (0,))).length == 7


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    engine = Engine(12, 2)
    first, second, third = ((n,) * 8 for n in (1, 2, 3))
    for text in (first, second, third):
        engine.serve(text)
    engine.pages.release(engine.start(first + (9,)).pages)  # used again

    def lengths() -> list[int]:
        return [engine.tree.match(token_key(t + (9,))).length for t in (first, second, third)]

    assert lengths() == [8, 8, 8]  # a match alone does not count as use
    seen = []
    for _ in range(12):
        engine.tree.evict(1)
        engine.check([])
        seen.append(lengths())
    assert seen == ([[8, n, 8] for n in (6, 4, 2, 0)] + [[8, 0, n] for n in (6, 4, 2, 0)]
                    + [[n, 0, 0] for n in (6, 4, 2, 0)])


def test_keeping_a_text_again_counts_as_use() -> None:
    engine = Engine(20, 2)
    late = engine.start((1,) * 4)
    engine.serve((1,) * 4)
    engine.serve((2,) * 4)
    engine.compute(late, 4)
    version = engine.tree.version
    engine.finish(late)
    assert engine.tree.version == version  # nothing is matched that was not before
    assert engine.tree.evict(2) == 2
    assert engine.tree.match(token_key((1,) * 5)).length == 4
    version = engine.tree.version
    engine.serve((2,) * 4)
    assert engine.tree.version != version


def test_a_fork_does_not_write_into_what_the_tree_keeps() -> None:
    engine = Engine(4, 4)
    parent = engine.run((1, 1, 1, 1))
    fork = Request(None, (1, 1, 2, 2), engine.pages.share(parent.pages), 2)
    engine.finish(parent)
    engine.compute(fork, 2)
    engine.check([fork])
    assert engine.tree.match(token_key((1, 1, 1, 1, 1))).length == 4


def test_use_of_a_prefix_leaves_the_rest_its_age() -> None:
    engine = Engine(20, 2)
    engine.serve((1,) * 4 + (2,) * 4)
    engine.serve((3,) * 4)
    engine.pages.release(engine.start((1,) * 4 + (9,)).pages)
    assert engine.tree.evict(4) == 4
    assert engine.tree.match(token_key((1,) * 9)).length == 4
    assert engine.tree.match(token_key((3,) * 9)).length == 0


def test_a_leaf_is_cut_down_to_what_is_held() -> None:
    engine = Engine(8, 2)
    parent = engine.run(BASES[0][:12])
    fork = Request(None, BASES[0][:4], engine.pages.share(parent.pages[:2]), 4)
    engine.finish(parent)
    assert engine.tree.evict(9) == 4
    engine.check([fork])
    engine.pages.release(fork.pages)
    assert engine.tree.evict(9) == 2
    engine.check([])


@pytest.mark.parametrize("num_pages", [1, 8])
def test_an_allocation_that_cannot_be_met_evicts_nothing(num_pages: int) -> None:
    engine = Engine(num_pages, 4)
    engine.serve(BASES[0][:4 * num_pages])
    version = engine.tree.version
    with pytest.raises(OutOfPages):
        engine.pages.allocate(num_pages + 1)
    assert engine.pages.num_cached == num_pages and engine.tree.version == version
    assert len(engine.pages.allocate(num_pages)) == num_pages
    assert engine.tree.num_tokens == 0 and engine.tree.version != version


@pytest.mark.parametrize("leaves", [100, 1000, 4000])
def test_eviction_takes_few_heap_operations(leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: operations per evicted leaf stay constant as the tree grows, though
    every leaf was used again after it entered the heap and half of them are held."""
    engine = Engine(2 * leaves, 1)
    for i in range(leaves):
        engine.serve((0, i + 1))
    requests = []
    for i in random.Random(0).sample(range(leaves), leaves):
        request = engine.start((0, i + 1, 0))
        if i % 2:
            requests.append(request)
        else:
            engine.pages.release(request.pages)
    operations = 0

    class CountingHeap:
        def __getattr__(self, name: str) -> object:
            def counted(*args: object) -> object:
                nonlocal operations
                operations += 1
                return getattr(heapq, name)(*args)
            return counted

    monkeypatch.setattr(radix, "heapq", CountingHeap())
    for _ in range(leaves // 2):
        assert engine.tree.evict(1) == 1
    assert operations <= 3 * leaves
    assert engine.tree.evict(1) == 0
    for request in requests:
        engine.pages.release(request.pages)
    assert engine.tree.evict(leaves) == leaves // 2 + 1  # and the page they share
    assert operations <= 6 * leaves
    engine.check([])


def test_the_heap_does_not_grow_with_what_is_gone() -> None:
    """A conversation whose turns replace each other's leaves, in a pool that never evicts."""
    engine = Engine(200, 64)
    for turn in range(1, 2000):
        engine.serve((turn // 60,) + BASES[0][:1 + turn % 60])
    assert len(engine.tree._heap) <= 2 * len(engine.tree._leaves) + 66
    engine.check([])


def test_the_same_calls_give_the_same_tree() -> None:
    def play() -> tuple[object, ...]:
        rng = random.Random(4)
        engine = Engine(24, 4)
        for _ in range(300):
            text = BASES[rng.randrange(3)][:rng.randrange(1, 30)] + (rng.randrange(3),)
            engine.serve(text)
        return engine.texts(), list(engine.pages.slots), engine.pages._free
    assert play() == play()
