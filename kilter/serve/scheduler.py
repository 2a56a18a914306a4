"""The scheduler: which request computes how many tokens in the next step.

It is pure: no model, no tensors, no clock. It sees requests, the pages and the radix tree, and
answers with ``{request: tokens}``; a simulator can drive it as the engine does.

    step():   1. running requests with one token left to compute (decodes), oldest first
              2. running requests with more (prefill chunks), oldest first
              3. waiting requests, in the order of the policy, while tokens and pages last

**Who gives way.** When a running request needs a page and none is left, the newest running request
is preempted: its pages go back (what they hold stays in the prefix cache while there is room) and
it waits, to be computed again. Nobody is ever preempted for a newer one and a request alone always
fits, so the oldest request makes progress in every step, whatever the others do; by induction
every request ends.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kilter.serve.radix import RadixTree, common_prefix
from kilter.serve.request import Request, Status

Policy = Literal["fcfs", "prefix", "priority"]

_SCAN = 64  # waiting requests looked at in one step
_PREFIX_QUEUE = 128  # with more waiting, longest-prefix-first costs too much and is first-come
_PATIENCE = 256  # steps after which a passed-over request goes before the policy's favourites
_HISTORY = 256  # finished answers that the guess of an answer's length is taken from


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_running: requests that run together.
        prefill_tokens: tokens of a step in which nobody decodes.
        mixed_tokens: tokens of a step in which somebody does: the longer a step, the longer
            those who decode wait for their next token.
        policy: ``fcfs``: first come, first served. ``prefix``: longest cached prefix first (first
            come when the queue is long). ``priority``: by `Request.priority`.

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
        self._answers: deque[int] = deque(maxlen=_HISTORY)
        self._expected: int | None = None  # tokens of an answer, from `_answers`

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: if it could not run even alone.
        """
        # The last token is only given out, never computed on.
        need = self.pages.pages_for(request.max_length - 1)
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
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # it gave way to an older one just now
            if request.length - request.computed > 1:
                prefills.append(request)
            elif self._make_room(request, 1, work):
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
            prefill = request.computed + 1 < request.length
            request.computed += count
            if prefill and request.share:
                self.tree.insert(request.key(request.computed), request.pages, request.namespace)

    def finish(self, request: Request, keep: bool = True) -> None:
        """Ends a request, wherever it is (also an abort). ``keep`` leaves what it computed in the
        prefix cache."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._give_back(request, keep)
            if request.generated:
                self._answers.append(request.generated)
                self._expected = None
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def restart(self, request: Request) -> None:
        """Makes a running request wait and compute everything again, in its present namespace."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._give_back(request, keep=False)
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
        return (-request.priority if self.config.policy == "priority" else 0, request.id)

    def _candidates(self) -> list[Request]:
        """The waiting requests to look at now, in order."""
        late = self.steps - _PATIENCE
        if self.config.policy == "fcfs":
            return self.waiting[:_SCAN]
        if self.config.policy == "priority":
            order = sorted(self.waiting, key=lambda r: (r.since > late, *self._rank(r)))
        elif len(self.waiting) > _PREFIX_QUEUE:
            order = self.waiting
        else:
            order = sorted(self.waiting, key=lambda r: (
                r.since > late, 0 if r.since <= late else -self._match(r), r.id))
        return order[:_SCAN]

    def _match(self, request: Request) -> int:
        if not request.reuse:
            return 0
        return self.tree.match(request.key(), request.namespace).length

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
        self.running.remove(request)
        self._give_back(request, keep=True)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.computed = request.cached = 0
        request.status = Status.WAITING
        request.since = self.steps
        insort(self.waiting, request, key=self._rank)

    def _give_back(self, request: Request, keep: bool) -> None:
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
        for request in self._candidates() if budget > 0 else ():
            if budget <= 0 or len(self.running) >= self.config.max_running:
                return
            match = self._match(request)
            if self._will_be_computed(request, match):
                continue  # somebody is computing its prefix right now: wait for that
            if self.running and not self._fits(request, match):
                return
            if request.reuse:
                request.pages, request.computed = self.tree.acquire(
                    request.key(), request.namespace)
            request.cached = request.computed
            request.status = Status.RUNNING
            self.waiting.remove(request)
            insort(self.running, request, key=self._rank)
            room = (len(request.pages) + self.pages.num_available) * self.pages.page_size
            end = min(request.length, request.computed + budget, room)
            if end > request.computed:
                self.pages.grow(request.pages, request.computed, end)
                work[request] = end - request.computed
                budget -= end - request.computed

    def _will_be_computed(self, request: Request, match: int) -> bool:
        """Whether a running request is about to compute at least a page more of this one's
        prefix than is cached now."""
        if not request.reuse:
            return False
        size = self.pages.page_size
        key: bytes | None = None
        for other in self.running:
            if other.length - other.computed <= 1 or other.namespace != request.namespace:
                continue
            key = request.key(request.length - 1) if key is None else key
            shared = min(common_prefix(key, other.key()), other.length)
            if shared // size > match // size and shared // size * size > other.computed:
                return True
        return False

    def _fits(self, request: Request, match: int) -> bool:
        """Whether the running requests and this one would fit to the end of each, if answers
        get as long as recent ones did: the most pages that are held at any moment, with the
        requests that end before it gone (arXiv 2507.10150 plans so)."""
        everyone = [*self.running, request]
        size = self.pages.page_size
        lengths = np.array([r.length for r in everyone])
        shared = np.array([r.cached for r in self.running] + [match]) // size
        left = np.array([self._left(r) for r in everyone])
        order = np.argsort(-left, kind="stable")  # who stays longest first
        left, lengths, shared = left[order], lengths[order], shared[order]
        # When the i-th in this order ends, the first i + 1 are there, each grown by left[i]; the
        # last token of an answer is never computed on.
        grown = -(-(lengths[None, :] + left[:, None] - 1) // size) - shared[None, :]
        there = np.tril(np.ones((len(everyone), len(everyone)), dtype=bool))
        peak = int(np.where(there, grown, 0).sum(axis=1).max())
        common = self.pages.num_held - sum(len(r.pages) - r.cached // size for r in self.running)
        return peak + max(common, 0) <= self.pages.num_pages

    def _left(self, request: Request) -> int:
        """Guess of the tokens a request still generates: the longest tenth of recent answers, and
        all it may generate while there are none or once it is past that."""
        most = request.max_length - request.length
        if not self._answers:
            return most
        if self._expected is None:
            self._expected = int(np.quantile(np.array(self._answers), 0.9, method="higher"))
        left = self._expected - request.generated
        return min(left, most) if left > 0 else most
