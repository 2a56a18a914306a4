"""The scheduler: which request computes how many tokens in the next step.

It is pure: no model, no tensors, no clock. It sees requests, the pages and the radix tree, and
answers with ``{request: tokens}``; a simulator can drive it as the engine does.

    step():   1. running requests with one token left to compute (decodes), oldest first
              2. running requests with more (prefill chunks), oldest first
              3. waiting requests, in the order of the policy, while tokens and pages last

**Who gives way.** When a running request needs a page and none is left, the newest running request
is preempted: its pages go back (what they hold stays in the prefix cache while there is room) and
it waits, to be computed again. Nobody is ever preempted for a newer one and a request alone always
fits, so the oldest running request makes progress in every step, whatever the others do; by
induction every request ends. Under the priority policy "older" means a rank of its own, in which a
level of priority is a head start of so many steps: it never changes and only finitely many requests
can come before another, so the same holds.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kilter.serve.radix import Match, RadixTree
from kilter.serve.request import Request, Status

Policy = Literal["fcfs", "prefix", "priority"]

_SCAN = 64  # waiting requests looked at in one step
_PREFIX_QUEUE = 128  # with more waiting, longest-prefix-first costs too much and is first-come
_PATIENCE = 256  # steps that a level of priority is worth; also steps after which a request that
# was passed over goes before those with a longer cached prefix
_HISTORY = 256  # finished answers that the guess of an answer's length is taken from
_NOTHING = Match(0, [], None)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_running: requests that run together.
        prefill_tokens: tokens of a step in which nobody decodes.
        mixed_tokens: tokens of a step in which somebody does: the longer a step, the longer
            those who decode wait for their next token.
        policy: ``fcfs``: first come, first served. ``prefix``: longest cached prefix first (first
            come when the queue is long). ``priority``: by `Request.priority`, of which each level
            is worth a head start of 256 steps, so that nobody waits for ever.

    Raises:
        ValueError: listing every limit that is out of range.
    """

    max_running: int = 256
    prefill_tokens: int = 1024
    mixed_tokens: int = 256
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        problems = [f"{name} is {getattr(self, name)} but must be at least 1"
                    for name in ("max_running", "prefill_tokens", "mixed_tokens")
                    if getattr(self, name) < 1]
        if self.policy not in ("fcfs", "prefix", "priority"):
            problems.append(f"policy is {self.policy!r} but must be fcfs, prefix or priority")
        if problems:
            raise ValueError(f"The scheduler cannot run so: {'; '.join(problems)}.")


class Scheduler:
    """Requests, their pages and the prefix cache.

    The loop is ``work = step()``, compute it, ``settle(work)``, then for each request either
    `Request.append` its new token or `finish` it.
    """

    def __init__(self, tree: RadixTree, config: SchedulerConfig | None = None) -> None:
        self.tree = tree
        self.pages = tree.pages
        self.config = config or SchedulerConfig()
        self.waiting: list[Request] = []  # by (rank, age)
        self.running: list[Request] = []  # by (rank, age): the last is the one that gives way
        self.steps = 0
        self.preemptions = 0
        self.prompt_tokens = 0  # of requests that have begun
        self.cached_prompt_tokens = 0  # of these found in the prefix cache
        self._answers: deque[int] = deque(maxlen=_HISTORY)
        self._expected: int | None = None  # tokens of an answer, from `_answers`
        self._departures = 0  # requests that stopped running
        self._refused: tuple[Request, int, int] | None = None  # see `_admit`
        self._matches: dict[Request, Match] = {}  # of waiting requests, at `_matched_version`
        self._matched_version = -1

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: if it could not run even alone.
        """
        # The last token of an answer is only given out, never computed on.
        need = self.pages.pages_for(max(request.max_length - 1, request.length))
        if need > self.pages.num_pages:
            raise ValueError(
                f"A request of {request.prompt_length} prompt tokens and up to "
                f"{request.max_length - request.prompt_length} new ones needs {need} pages of "
                f"{self.pages.page_size} tokens, but the cache has {self.pages.num_pages} in all. "
                f"Shorten it, ask for fewer tokens or give the cache more memory.")
        request.status = Status.WAITING
        request.since = self.steps
        insort(self.waiting, request, key=self._rank)

    def step(self) -> dict[Request, int]:
        """The next step's work: a positive number of tokens for each request in it; the pages
        for them are allocated. Empty only if nobody waits or runs."""
        self.steps += 1
        work: dict[Request, int] = {}
        before = self.preemptions
        prefills = []
        size = self.pages.page_size
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # it gave way to an older one just now
            if len(request.tokens) - request.computed > 1:
                prefills.append(request)
            elif request.computed < len(request.pages) * size or self._make_room(request, 1, work):
                work[request] = 1
        limit = self.config.mixed_tokens if work else self.config.prefill_tokens
        budget = max(limit - len(work), limit // 4, 1)  # many decodes do not starve a prefill
        for request in prefills:
            if budget <= 0:
                break
            if request.status is Status.RUNNING:
                count = self._make_room(
                    request, min(request.length - request.computed, budget), work)
                if count:
                    work[request] = count
                    budget -= count
        if self.preemptions == before:
            self._admit(work, budget)
        return work

    def settle(self, work: dict[Request, int]) -> None:
        """Says that a step's work is done; what of it ends a page may be shared from now on."""
        for request, count in work.items():
            prefill = request.computed + 1 < len(request.tokens)
            request.computed += count
            if prefill and request.share:
                self.tree.insert(request.key(request.computed), request.pages, request.namespace)

    def finish(self, request: Request, keep: bool = True) -> None:
        """Ends a request, wherever it is (also an abort). ``keep`` leaves what it computed in the
        prefix cache."""
        if request.status is Status.RUNNING:
            self._leave(request, keep)
            if request.generated:
                self._answers.append(request.generated)
                self._expected = None
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def restart(self, request: Request) -> None:
        """Makes a running request wait and compute everything again, in its present namespace."""
        if request.status is Status.RUNNING:
            self._leave(request, keep=False)
            self._wait_again(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages, tree and requests agree."""
        self.tree.check_integrity()
        held = {page for request in self.running for page in request.pages}
        assert len(held) == self.pages.num_held, "pages are held by no running request"
        for request in self.waiting:
            assert not request.pages and request.computed == 0, "a waiting request holds pages"
        for request in self.running:
            assert request.cached <= request.computed <= request.length
            assert len(request.pages) >= self.pages.pages_for(request.computed)

    # Order

    def _rank(self, request: Request) -> tuple[int, int]:
        if self.config.policy == "priority":
            return (request.since - _PATIENCE * request.priority, request.id)
        return (0, request.id)

    def _candidates(self) -> list[Request]:
        """The waiting requests to look at now, in order."""
        if self.config.policy != "prefix" or len(self.waiting) > _PREFIX_QUEUE:
            return self.waiting[:_SCAN]
        late = self.steps - _PATIENCE
        return sorted(self.waiting, key=lambda r: (
            r.since > late, 0 if r.since <= late else -self._match(r).length, r.id))[:_SCAN]

    def _match(self, request: Request) -> Match:
        """What the cache holds of a waiting request; looked up again when the cache changes."""
        if not request.reuse:
            return _NOTHING
        if self._matched_version != self.tree.version:
            self._matches.clear()
            self._matched_version = self.tree.version
        match = self._matches.get(request)
        if match is None:
            match = self.tree.match(request.key(), request.namespace)
            self._matches[request] = match
        return match

    # Pages

    def _make_room(self, request: Request, count: int, work: dict[Request, int]) -> int:
        """Allocates pages for the request's next ``count`` tokens, newer requests giving way;
        returns for how many there is room."""
        size = self.pages.page_size
        end = request.computed + count
        if end <= len(request.pages) * size:
            return count
        while self.pages.pages_for(end) - len(request.pages) > self.pages.num_available:
            victim = self.running[-1]
            if victim is request:  # nobody newer: take what there is
                end = min(end, (len(request.pages) + self.pages.num_available) * size)
                break
            work.pop(victim, None)
            self._preempt(victim)
        if end <= request.computed:
            return 0
        self.pages.grow(request.pages, request.computed, end)
        return end - request.computed

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        request.preemptions += 1
        self._leave(request, keep=True)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.computed = request.cached = 0
        request.status = Status.WAITING
        insort(self.waiting, request, key=self._rank)

    def _leave(self, request: Request, keep: bool) -> None:
        """Takes a request out of those that run; its pages go back."""
        self.running.remove(request)
        self._departures += 1
        if keep and request.share:
            pages = request.pages[:self.pages.pages_for(request.computed)]
            spare = request.pages[len(pages):]
            self.tree.finish(request.key(request.computed), pages, request.namespace)
            self.pages.release(spare)
        else:
            self.pages.release(request.pages)
        request.pages = []

    # Admission

    def _admit(self, work: dict[Request, int], budget: int) -> None:
        if budget <= 0 or len(self.running) >= self.config.max_running or (
                self.pages.num_available == 0):
            return
        prefilling = [r for r in self.running if len(r.tokens) - r.computed > 1 and r.share]
        rows_R5: np.ndarray | None = None
        for request in self._candidates():
            match = self._match(request)
            if request.reuse and self._will_be_computed(request, match.length, prefilling):
                continue  # wait for that
            if self.running:
                # As long as nobody leaves, who was refused would be refused again.
                asked = (request, match.length, self._departures)
                if asked == self._refused:
                    return
                if rows_R5 is None:
                    rows_R5 = np.array([_row(r) for r in self.running])
                if not self._fits(rows_R5, request, match):
                    self._refused = asked
                    return
            count = self._start(request, budget, work)
            budget -= count
            if budget <= 0 or len(self.running) >= self.config.max_running:
                return
            if len(request.tokens) - request.computed > 1 and request.share:
                prefilling.append(request)
            if rows_R5 is not None:
                rows_R5 = np.vstack((rows_R5, _row(request)))

    def _start(self, request: Request, budget: int, work: dict[Request, int]) -> int:
        """Makes a waiting request run; returns how many tokens it computes in this step."""
        if request.reuse:
            request.pages, request.computed = self.tree.acquire(request.key(), request.namespace)
        request.cached = request.computed
        if request.found is None:
            request.found = request.cached
            self.prompt_tokens += request.prompt_length
            self.cached_prompt_tokens += min(request.cached, request.prompt_length)
        request.status = Status.RUNNING
        self.waiting.remove(request)
        insort(self.running, request, key=self._rank)
        room = (len(request.pages) + self.pages.num_available) * self.pages.page_size
        count = min(request.length, request.computed + budget, room) - request.computed
        if count > 0:
            self.pages.grow(request.pages, request.computed, request.computed + count)
            work[request] = count
        return max(count, 0)

    def _will_be_computed(self, request: Request, match: int, prefilling: list[Request]) -> bool:
        """Whether a running request is about to compute at least a page more of this one's
        prefix than is cached now."""
        size = self.pages.page_size
        for other in prefilling:
            end = (max(match, other.computed) // size + 1) * size
            if (end < request.length and end <= other.length
                    and other.namespace == request.namespace
                    and request.key(end) == other.key(end)):
                return True
        return False

    def _fits(self, rows_R5: np.ndarray, request: Request, match: Match) -> bool:
        """Whether the running requests and this one would fit to the end of each, if answers
        get as long as recent ones did (arXiv 2507.10150 plans so).

        rows_R5: `_row` of each running request.
        """
        size = self.pages.page_size
        length, generated, longest, found, pages = np.vstack((rows_R5, (
            request.length, request.generated, request.max_length, match.length,
            match.length // size))).T
        left = most = longest - length
        if (expected := self._expected_tokens()) is not None:
            left = np.where(generated < expected, np.minimum(expected - generated, most), most)
        # Held beside what each computes itself: prefixes, each counted once.
        common = self.pages.num_held - int((pages - found // size).sum())
        common = max(common, 0) + sum(not self.pages.is_held(page) for page in match.pages)
        return common + peak_pages(length, left, found // size, size) <= self.pages.num_pages

    def _expected_tokens(self) -> int | None:
        """Guess of an answer's tokens: the longest tenth of recent ones; None while there are none.
        Once an answer is past it, room is kept for all that it may generate, so each running
        request is wrong about once and causes few preemptions."""
        if self._expected is None and self._answers:
            self._expected = int(np.quantile(np.array(self._answers), 0.9, method="higher"))
        return self._expected


def peak_pages(length_R: np.ndarray, left_R: np.ndarray, shared_R: np.ndarray, size: int) -> int:
    """The most pages that these requests hold at any moment, if each generates one token per step.

    Args:
        length_R: tokens now.
        left_R: tokens each still generates; then its pages are free. The last is never computed on.
        shared_R: pages of each that are not counted.
        size: tokens per page.
    """
    order = np.argsort(-left_R, kind="stable")  # who stays longest first
    # When the i-th in this order ends, the first i + 1 are there, each grown by left[i]: it is the
    # sum over j <= i of ceil((length[j] - 1 + left[i]) / size). Quotients and remainders are summed
    # apart, so that no matrix of all pairs is needed.
    count_R = np.arange(1, len(order) + 1)
    whole_R, rest_R = np.divmod(length_R[order] - 1, size)
    grown_R, more_R = np.divmod(left_R[order], size)
    above_RT = np.cumsum(rest_R[:, None] > np.arange(size + 1), axis=0)  # rest[j] > t, j <= i
    begun_R = np.where(more_R > 0, count_R, above_RT[:, 0])  # rest + more > 0
    full_R = above_RT[count_R - 1, size - more_R]  # rest + more > size
    held_R = np.cumsum(whole_R - shared_R[order]) + count_R * grown_R + begun_R + full_R
    return int(held_R.max())


def _row(request: Request) -> tuple[int, int, int, int, int]:
    """What `Scheduler._fits` looks at."""
    length = len(request.tokens)
    return (length, length - request.prompt_length, request.max_length, request.cached,
            len(request.pages))
