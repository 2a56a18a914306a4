"""The scheduler without a model: every request ends, the oldest goes on in every step, nobody
starves, and prefixes are computed once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.serve.radix import RadixTree
from kilter.serve.request import Request, Status
from kilter.serve.scheduler import Scheduler, SchedulerConfig, peak_pages
from tests.serve.remembering_pages import RememberingPages

POLICIES = ["fcfs", "prefix", "priority"]


class Run:
    """Drives a scheduler as an engine would, with made-up tokens. Slots remember what was written
    into them, so that a page that is read after it was given to another request is seen."""

    def __init__(self, pages: int, page_size: int, **config: Any) -> None:
        self.pages = RememberingPages(pages, page_size)
        self.scheduler = Scheduler(RadixTree(self.pages), SchedulerConfig(**config))
        self.lengths: dict[Request, int] = {}  # at how many tokens each will end
        self.computed = 0  # tokens over all steps
        self.number = 0
        self.ended: list[Request] = []

    def add(self, prompt: Sequence[int], answer: int, most: int | None = None, **options: Any
            ) -> Request:
        request = Request(self.number, list(prompt), len(prompt) + (most or answer), **options)
        self.number += 1
        self.lengths[request] = len(prompt) + answer
        self.scheduler.add(request)
        return request

    def step(self) -> dict[Request, int]:
        scheduler, config = self.scheduler, self.scheduler.config
        assert not scheduler.idle
        before = [r for r in scheduler.running if r.computed + 1 == r.length]
        work = scheduler.step()
        assert work, "somebody waits or runs but nothing is done"
        assert set(work) <= set(scheduler.running)
        assert len(scheduler.running) <= config.max_running
        oldest = min(scheduler.running, key=self.rank)
        assert work.get(oldest, 0) >= 1, "the oldest makes no progress"
        # Every decode is in, unless it gave way, or is the newest and there is no page for it.
        stalled = [r for r in before if r.status is Status.RUNNING and r not in work and r.computed]
        assert stalled in ([], scheduler.running[-1:])
        assert not stalled or self.pages.num_available == 0
        decodes = [r for r in before if r in work]
        limit = config.mixed_tokens if decodes else config.prefill_tokens
        if before and not decodes:  # they gave way, or stalled
            limit = max(limit, config.mixed_tokens)
        assert sum(work.values()) <= max(limit, len(decodes) + max(limit // 4, 1))
        for request, count in work.items():
            assert 1 <= count <= request.length - request.computed
            write(self.pages, request, count)
        scheduler.settle(work)
        self.computed += sum(work.values())
        for request in work:
            if request.computed == request.length:
                request.append(1000 + request.id)
                if request.length == self.lengths[request]:
                    scheduler.finish(request)
                    self.ended.append(request)
        scheduler.check_integrity()
        return work

    def rank(self, request: Request) -> tuple[int, int]:
        return self.scheduler._rank(request)

    def drain(self, steps: int = 20000, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(steps):
            if self.scheduler.idle:
                assert self.pages.num_held == 0
                assert all(r.status is Status.FINISHED for r in self.lengths)
                return
            self.step()
            each()
        raise AssertionError(f"not done after {steps} steps")


def write(pages: RememberingPages, request: Request, count: int) -> None:
    """What the executor does: reads all tokens before, writes the next ones."""
    for i in range(request.computed + count):
        slot = request.pages[i // pages.page_size] * pages.page_size + i % pages.page_size
        text = (request.namespace, request.key(i + 1))
        if i >= request.computed:
            pages.slots[slot] = text
        assert pages.slots[slot] == text, f"position {i} holds something else"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_ends(data: st.DataObject) -> None:
    """Random workloads on tiny pools, aborts and restarts among them."""
    size = data.draw(st.sampled_from([1, 2, 3, 16]))
    pages = data.draw(st.integers(1, 12))
    run = Run(pages, size, policy=data.draw(st.sampled_from(POLICIES)),
              max_running=data.draw(st.sampled_from([1, 2, 20])),
              prefill_tokens=data.draw(st.sampled_from([1, 7, 100])),
              mixed_tokens=data.draw(st.sampled_from([1, 5, 100])))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    capacity = pages * size
    added = 0
    while added < 15:
        for _ in range(rng.randrange(4)):
            length = rng.randint(1, capacity)
            answer = rng.randint(1, capacity + 1 - length)
            prompt = [rng.randrange(2) for _ in range(length)] if rng.random() < 0.3 else (
                [7] * rng.randint(0, length - 1))
            prompt += [rng.randrange(9) for _ in range(length - len(prompt))]
            run.add(prompt, answer, rng.randint(answer, capacity + 1 - length),
                    namespace=rng.choice([None, None, "x"]), priority=rng.randrange(3),
                    reuse=rng.random() < 0.8)
            added += 1
        for _ in range(rng.randrange(6)):
            if not run.scheduler.idle:
                run.step()
        running = run.scheduler.running
        if running and rng.random() < 0.2:
            run.scheduler.restart(rng.choice(running))
        alive = running + run.scheduler.waiting
        if alive and rng.random() < 0.2:
            run.scheduler.finish(rng.choice(alive), keep=rng.random() < 0.5)
        if rng.random() < 0.1:
            run.scheduler.tree.reset()
        if not run.scheduler.idle:
            run.scheduler.check_integrity()
    run.drain()
    # Each older request is wrong about its length once.
    assert max(r.preemptions for r in run.lengths) <= 15


@pytest.mark.parametrize("policy", POLICIES)
def test_preemptions_are_few_when_answers_are_much_longer_than_before(policy: str) -> None:
    run = Run(16, 4, policy=policy)
    for _ in range(20):
        run.add([1, 2], 1, 40)
    run.drain()
    assert run.scheduler.preemptions == 0
    run.scheduler.tree.reset()
    rng = random.Random(0)
    late = [run.add([rng.randrange(100) for _ in range(8)], 40) for _ in range(12)]
    run.drain()
    assert 0 < max(r.preemptions for r in late) <= 6
    assert late[0].preemptions == 0 or policy == "prefix"


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_under_a_stream_of_newcomers(policy: str) -> None:
    """Newcomers that the policy prefers keep the engine full for ever; the one it likes least
    still ends, and it ends after a bounded number of steps."""
    run = Run(8, 4, policy=policy, max_running=4)
    for _ in range(6):
        run.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, priority=2)
    victim = run.add([50] * 20, 13)
    for _ in range(2000):
        while len(run.scheduler.waiting) < 6:
            run.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, priority=2)
        run.step()
        if victim.status is Status.FINISHED:
            return
    raise AssertionError("it starved")


def test_priority_goes_first_and_fcfs_does_not_care() -> None:
    for policy, expected in (("priority", [2, 1, 0]), ("fcfs", [0, 1, 2])):
        run = Run(64, 4, policy=policy, max_running=1)
        requests = [run.add([i, i], 3, priority=i) for i in range(3)]
        run.drain()
        assert [requests.index(r) for r in run.ended] == expected


def test_longest_cached_prefix_goes_first_unless_the_queue_is_long() -> None:
    for others, first in ((10, "hit"), (200, "old")):
        run = Run(512, 2, policy="prefix", max_running=1)
        run.add([9] * 40, 1)
        run.drain()
        old = run.add([1, 2, 3], 1)
        for i in range(others):
            run.add([100 + i], 1)
        hit = run.add([9] * 30, 1)
        run.step()
        assert run.ended[-1] is {"hit": hit, "old": old}[first]


def test_decodes_are_always_in_and_chunks_are_shorter_beside_them() -> None:
    run = Run(200, 4, prefill_tokens=50, mixed_tokens=12)
    long = run.add(range(100), 2)
    assert run.step() == {long: 50}
    decoding = run.add([7], 40)
    assert run.step() == {long: 50}
    assert run.step() == {long: 1, decoding: 1}
    longer = run.add(range(300, 400), 2)
    for _ in range(3):
        assert run.step() == {decoding: 1, longer: 11}

    # With more decodes than the budget, a prefill still gets a share of it.
    run = Run(600, 4, prefill_tokens=50, mixed_tokens=12)
    decodes = [run.add([500 + i], 60) for i in range(30)]
    for _ in range(12):
        run.step()
    assert run.step() == dict.fromkeys(decodes, 1)
    long = run.add(range(30), 2)
    assert run.step() == {**dict.fromkeys(decodes, 1), long: 3}
    assert run.step() == {**dict.fromkeys(decodes, 1), long: 3}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_shared_prefix_is_computed_once(policy: str, size: int) -> None:
    run = Run(4096 // size, size, policy=policy, prefill_tokens=64)
    prefix = list(range(96))  # whole pages
    for i in range(40):
        run.add(prefix + [200 + i] * 5, 2)
    run.drain()
    assert run.computed == 96 + 40 * (5 + 1)


def test_a_prefix_is_waited_for_only_where_it_may_be_shared() -> None:
    run = Run(256, 4, prefill_tokens=100)
    run.add(range(128), 1)
    run.step()
    # Another namespace, and one that wants its own prompt's log-probabilities, do not wait.
    sharing = run.add(range(128), 1)
    own = [run.add(range(128), 1, namespace="salt"), run.add(range(128), 1, reuse=False)]
    run.step()
    assert run.scheduler.waiting == [sharing, own[1]] and own[0].computed == 72
    run.step()
    run.drain()
    assert [sharing.found, own[0].found, own[1].found] == [127, 0, 0]


def test_admission_expects_answers_as_long_as_recent_ones() -> None:
    """More run together than if max_tokens were reserved, and preemption is rare."""
    rng = random.Random(3)

    def together(most: int) -> tuple[int, Run]:
        run = Run(64, 4)
        for _ in range(30):
            run.add([rng.randrange(10**6) for _ in range(4)], rng.randint(8, 12), most)
        run.drain()
        before, peak = run.scheduler.preemptions, 0
        for _ in range(60):
            run.add([rng.randrange(10**6) for _ in range(4)], rng.randint(8, 12), most)

        def look() -> None:
            nonlocal peak
            peak = max(peak, len(run.scheduler.running))

        run.drain(each=look)
        assert run.scheduler.preemptions - before <= 2
        return peak, run

    reserved = 64 // 32  # 4 + 124 tokens are 32 pages
    assert together(124)[0] >= 12 > 3 * reserved
    assert together(12)[0] >= 12


def test_admission_counts_cached_pages_that_it_would_hold() -> None:
    """A prefix hit is not free: pages that were only cached cannot be evicted any more."""
    run = Run(10, 1)
    run.add([1, 2, 3, 4], 1)
    run.drain()
    growing = run.add([9], 8)
    run.step()
    hit = run.add([1, 2, 3, 4, 5], 1)
    run.step()
    assert hit in run.scheduler.waiting  # 8 + 5 pages
    run.drain()
    assert run.scheduler.preemptions == 0 and growing.preemptions == 0


def test_a_decode_gives_way_to_a_prefill_that_goes_first() -> None:
    """Though it was in the step already."""
    run = Run(8, 1, policy="priority", prefill_tokens=3, mixed_tokens=3)
    run.scheduler._fits = lambda *_: True  # type: ignore[method-assign]
    decoding = run.add([50], 6)
    run.step()
    prefilling = run.add(range(7), 1, priority=1)
    run.step()
    assert run.step() == {decoding: 1, prefilling: 2}
    assert run.step() == {prefilling: 2} and decoding.preemptions == 1
    run.drain()


def test_what_waits_is_matched_again_when_the_cache_changes() -> None:
    run = Run(64, 1, policy="prefix")
    run.add([9] * 40, 2)
    large, hit = run.add(range(100, 160), 1), run.add([9] * 30, 1)
    run.step()
    assert run.scheduler.waiting == [large, hit]
    run.drain()
    assert run.ended[1:] == [hit, large] and hit.cached == 29


@pytest.mark.parametrize("pages,size", [(1, 1), (1, 16), (8, 1), (8, 16)])
def test_a_request_of_exactly_the_pool_and_one_token_more(pages: int, size: int) -> None:
    capacity = pages * size
    run = Run(pages, size)
    # The last token is given out but not computed on.
    run.add(range(capacity), 1)
    run.drain()
    run.add([5], capacity)
    run.drain()
    for prompt, answer in ((capacity + 1, 0), (capacity, 2), (1, capacity + 1)):
        with pytest.raises(ValueError, match=rf"needs .* pages .* but the cache has {pages} "):
            run.add(range(prompt), answer, answer or 0)
    assert run.scheduler.idle
    run.lengths.clear()
    for _ in range(5):
        run.add(range(capacity), 1)
        run.add(range(100, 100 + capacity), 1)
    run.drain()


def test_what_a_request_computed_itself_is_no_cache_hit() -> None:
    run = Run(8, 1)
    run.add([1], 1, 4)
    run.drain()
    first, second = run.add([1, 2, 3], 3), run.add([11, 12, 13], 3)
    run.drain()
    assert second.preemptions > 0 and first.preemptions == 0
    assert second.cached > 0 and second.found == 0


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"max_running is 0 .*; mixed_tokens is -1 .*; policy is "):
        SchedulerConfig(max_running=0, mixed_tokens=-1, policy="newest")  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(1, 20), st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90),
                                              st.integers(0, 5)), min_size=1, max_size=9))
def test_peak_pages_is_what_stepping_through_finds(size: int, requests: list[tuple[int, int, int]]
                                                   ) -> None:
    requests = [(length, left, min(shared, length // size)) for length, left, shared in requests]
    peak = 0
    for step in range(max(left for _, left, _ in requests) + 1):
        there = [(length + step - 1, shared) for length, left, shared in requests if step <= left]
        peak = max(peak, sum(-(-tokens // size) - shared for tokens, shared in there))
    assert peak_pages(*np.array(requests).T, size) == peak
