"""The engine: requests in, tokens and text out. One loop: receive, schedule, launch, settle.

    engine = Engine(model, tokenizer, EngineConfig(kv_tokens=20_000))
    number = engine.submit(prompt_ids, SamplingParams(max_tokens=50))
    while engine.busy:
        for delta in engine.step():
            print(delta.text, end="")

A request for n answers is n answers of one prompt to the scheduler, which computes the prompt once.
An answer's tokens depend on its own prompt, settings and seed, and on nothing that runs beside it.
The engine is for one thread; `kilter.serve.async_engine` and `kilter.LLM` put it to use.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from kilter.models.decoder import Decoder
from kilter.serve.answer import STEP_FAILED, Answer, Delta, Embedding, FinishReason, Pooling, Task
from kilter.serve.engine_config import EngineConfig
from kilter.serve.executor import Chunk, Executor
from kilter.serve.grammar import Grammar, GrammarCompiler
from kilter.serve.params import SamplingParams
from kilter.serve.radix import RadixTree
from kilter.serve.request import Request, Status
from kilter.serve.sampler import Choice, SamplingError, SamplingState, choose
from kilter.serve.scheduler import Scheduler
from kilter.serve.snapshot import Snapshot, snapshot
from kilter.serve.stats import EngineStats, StepMeter
from kilter.tokens import Detokenizer, StopChecker, Tokenizer
from kilter.weights.bridge import ModelSource
from kilter.weights.load import Storage

__all__ = ["Delta", "Engine", "EngineConfig", "FinishReason", "InFlight", "Pooling"]

InFlight = Literal["restart", "continue", "abort"]


class Engine:
    """A model that answers many requests at once.

    Raises:
        ValueError: for sizes that do not go together.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, config: EngineConfig | None = None,
                 executor: Executor | None = None) -> None:
        """``executor``: another way to run the model, with its own pages; default one here."""
        self.config = config = config or EngineConfig()
        self.model = model
        self.tokenizer = tokenizer
        self.executor = executor or Executor.of(model, config)
        self.max_context = self.executor.max_context
        self.tree = RadixTree(self.executor.pool)
        self.scheduler = Scheduler(self.tree, config.scheduler)
        self.weights_version = 0
        self.eos_token_ids = (*dict.fromkeys([*tokenizer.eos_token_ids, *config.eos_token_ids]),)
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        self._answers: dict[Request, Task] = {}
        self._numbers: dict[int, list[Task]] = {}  # unfinished answers by request number
        self._pending: list[Delta] = []  # news that no step made
        self._next_number = 0
        self._next_id = 0
        self._meter = StepMeter()

    # ---- receive ----

    @property
    def busy(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._pending) or not self.scheduler.idle

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0,
               salt: Hashable = None, drawn: int = 0) -> int:
        """Queues a request and returns its number.

        Args:
            prompt: token ids.
            priority: higher goes first under the priority policy.
            salt: prompts share cached prefixes only with prompts of the same salt.
            drawn: of an answer that goes on with an earlier one, whose tokens are in the prompt:
                how many that one chose. With the same seed the tokens are then those that the
                earlier one would have had.

        Raises:
            ValueError: for an empty prompt, a token id outside the vocabulary, a prompt or
                settings the engine cannot serve, or a grammar it cannot use; nothing is queued.
        """
        prompt = self._prompt(prompt)
        room = self.max_context - len(prompt)
        if room < min(params.max_tokens, 1):
            raise ValueError(f"The prompt has {len(prompt)} tokens and the context "
                             f"{self.max_context}, which leaves no room for an answer; shorten "
                             f"the prompt or give the engine a longer context.")
        params.check(self.model.spec.vocab_size)
        if (params.best_of or params.n) > params.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # what best_of chooses by
        grammar = self.compile_grammar(params)
        count = params.best_of or params.n
        answers = [self._answer(prompt, params, i, grammar, priority, salt, room, drawn)
                   for i in range(count)]
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            self._pending += [self._delta(a, finish_reason="length") for a in answers]
            self._next_number += 1
            return self._next_number - 1
        return self._queue(answers)

    def submit_embedding(self, prompt: Sequence[int], *, pooling: Pooling = "mean",
                         normalize: bool = True, priority: int = 0, salt: Hashable = None) -> int:
        """Queues a prompt whose vector is wanted, and returns its number. Its one delta carries it.

        Args:
            pooling: ``mean`` of the hidden states (after the last norm) of all tokens, or that of
                the ``last``. Only the latter can start from a cached prefix.
            normalize: whether the vector is scaled to length 1.

        Raises:
            ValueError: as `submit` does, or for an unknown pooling; nothing is queued.
        """
        prompt = self._prompt(prompt)
        if pooling not in ("mean", "last"):
            raise ValueError(f"pooling is {pooling!r} but must be mean or last.")
        if len(prompt) > self.max_context:
            raise ValueError(f"The prompt has {len(prompt)} tokens but the context is "
                             f"{self.max_context}; shorten the prompt or give the engine a longer "
                             f"context.")
        request = self._request(prompt, 0, priority, salt, reuse=pooling == "last")
        return self._queue([Embedding(self._next_number, 0, request, salt, pooling, normalize)])

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of these settings, if they have one; `submit` then finds it in the cache.
        Alone of all methods this one may be called from any thread at any time.

        Raises:
            ValueError: as `GrammarCompiler.compile` does.
        """
        if params.grammar is None:
            return None
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.eos_token_ids)
        return self._grammars.compile(params.grammar)

    def abort(self, number: int) -> None:
        """Ends a request where it is: its pages are free at once, its answers end with "abort" in
        the next step, and it gives out nothing else. Unknown or finished numbers are ignored."""
        for answer in list(self._numbers.get(number, ())):
            self._end(answer)
            self._pending.append(self._delta(answer, finish_reason="abort"))

    def drop_news(self, numbers: Collection[int]) -> None:
        """Forgets what the next step would report of these requests."""
        self._pending = [delta for delta in self._pending if delta.request not in numbers]

    # ---- the loop ----

    def news(self) -> list[Delta]:
        """What there is to report without a step: answers that were ended between two."""
        deltas, self._pending = self._pending, []
        return deltas

    def step(self) -> list[Delta]:
        """One step for everybody: what is new, at most one delta per answer.

        If it fails, the requests that were in it end (the next step reports them with "error"),
        the others go on, and the exception is raised.
        """
        begin = time.perf_counter()
        work = self.scheduler.step()
        deltas = self.news()
        if not work:
            return deltas
        try:
            chunks = [self._answers[request].chunk(count) for request, count in work.items()]
            self._meter.begin([(a.number, a.index, count) for request, count in work.items()
                               if (a := self._answers[request])])
            logits_NV = self.executor.run(chunks)
            self.scheduler.settle(work)
            self._settle(chunks, logits_NV, deltas)
            if self.scheduler.idle:
                self.check_integrity()
        except BaseException:  # an interrupt too: no request may stay half way through a step
            self._pending = deltas
            self._fail(work)
            self._meter.failed_steps += 1
            raise
        finally:
            self._meter.end(time.perf_counter() - begin)
        return deltas

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free, cached or held by a running request."""
        self.scheduler.check_integrity()

    # ---- what it is doing ----

    def stats(self) -> EngineStats:
        """The engine's numbers now; takes some microseconds."""
        scheduler, pages, meter = self.scheduler, self.tree.pages, self._meter
        return EngineStats(
            running=len(scheduler.running), waiting=len(scheduler.waiting),
            max_running=scheduler.config.max_running, max_context=self.max_context,
            page_size=pages.page_size, pages_total=pages.num_pages, pages_free=pages.num_free,
            pages_cached=pages.num_cached, pages_held=pages.num_held,
            preemptions=scheduler.preemptions, steps=meter.steps, failed_steps=meter.failed_steps,
            step_seconds=meter.seconds, last_step_seconds=meter.last_seconds,
            last_step_tokens=meter.last_tokens, computed_tokens=meter.tokens,
            prompt_tokens=scheduler.prompt_tokens,
            cached_prompt_tokens=scheduler.cached_prompt_tokens,
            completion_tokens=meter.completion_tokens, weights_version=self.weights_version)

    def snapshot(self, limit: int = 256) -> Snapshot:
        """Requests, pages, prefix tree and the last step, for somebody to look at; takes a
        millisecond or two.

        Args:
            limit: of requests, and of the tree's nodes, that are listed.
        """
        return snapshot(self.scheduler, self._answers, self._meter.last_batch, limit)

    def close(self) -> None:
        """Ends the other ranks of an engine that has some; it can do nothing afterwards."""
        self.executor.close()

    # ---- weights and cache ----

    def flush_cache(self) -> None:
        """Forgets every cached prefix; running requests keep theirs."""
        self.tree.reset()

    def update_weights(self, weights: ModelSource | Mapping[str, Tensor], *,
                       storage: Storage = "auto", in_flight: InFlight = "restart") -> int:
        """Takes new weights for the same model; returns their version.

        Cached prefixes of the old weights are never used again.

        Args:
            weights: a source, or tensors by our parameter names (all or some of them).
            in_flight: what becomes of answers that have begun: ``restart`` computes keys and
                values of all their tokens anew and goes on with the new weights; ``continue`` goes
                on upon the old keys and values (every `Delta` says which version chose its tokens;
                of a preempted answer there are none, so it is as ``restart``, and so is an
                embedding, which is of one version); ``abort`` ends them.

        Raises:
            ValueError: for names or shapes that are not the model's, or a source of a model that
                computes differently; nothing was changed.
        """
        if in_flight not in ("restart", "continue", "abort"):
            raise ValueError(f"in_flight is {in_flight!r} but must be restart, continue or abort.")
        self.executor.take_weights(weights, storage)
        return self.weights_changed(self.weights_version + 1, in_flight)

    def weights_changed(self, version: int, in_flight: InFlight = "restart") -> int:
        """The second half of `update_weights`, for who has put weights into the model another way;
        returns the version."""
        self.weights_version = version
        self.tree.reset()
        for answer in list(self._answers.values()):
            request = answer.request
            running = request.status is Status.RUNNING
            if in_flight == "abort" and (running or request.generated):
                self._end(answer, keep=False)
                self._pending.append(self._delta(answer, finish_reason="abort"))
            elif in_flight == "continue" and running and isinstance(answer, Answer):
                # Its keys and values are of two versions: nothing for others.
                request.reuse = request.share = False
            else:
                self.scheduler.restart(request)
                request.namespace = (self.weights_version, answer.salt)
                answer.restart()
        return self.weights_version

    # ---- parts of receiving ----

    def _prompt(self, prompt: Sequence[int]) -> list[int]:
        try:
            prompt = list(map(operator.index, prompt))
        except TypeError as error:
            raise ValueError(f"The prompt must be a list of token ids: {error}.") from error
        vocab = self.model.spec.vocab_size
        if not prompt:
            raise ValueError("The prompt is empty; give at least one token.")
        bad = next((t for t in prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise ValueError(f"The prompt holds token id {bad}, outside the vocabulary of {vocab} "
                             f"tokens.")
        return prompt

    def _request(self, prompt: list[int], max_tokens: int, priority: int, salt: Hashable,
                 reuse: bool) -> Request:
        self._next_id += 1
        return Request(self._next_id - 1, list(prompt), len(prompt) + max_tokens,
                       (self.weights_version, salt), priority, reuse=reuse)

    def _answer(self, prompt: list[int], params: SamplingParams, index: int,
                grammar: Grammar | None, priority: int, salt: Hashable, room: int,
                drawn: int) -> Answer:
        request = self._request(prompt, min(params.max_tokens, room), priority, salt,
                                reuse=params.prompt_logprobs is None or index > 0)
        follow = None if grammar is None else grammar.start()
        state = SamplingState(params, prompt, end_ids=self.eos_token_ids, index=index,
                              grammar=follow, drawn=drawn)
        wanted = params.prompt_logprobs is not None and index == 0
        return Answer(
            self._next_number, index, request, salt, params, state,
            Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens,
                        prompt_tail=prompt[-8:]),
            StopChecker(params.stop, params.include_stop), follow, [] if wanted else None)

    def _queue(self, answers: Sequence[Task]) -> int:
        """All answers of a request, of which each fits or none does."""
        for answer in answers:
            self.scheduler.add(answer.request)  # the first raises before anything is queued
        for answer in answers:
            self._answers[answer.request] = answer
        self._numbers[self._next_number] = list(answers)
        self._next_number += 1
        return self._next_number - 1

    # ---- parts of a step ----

    def _settle(self, chunks: list[Chunk], logits_NV: Tensor, deltas: list[Delta]) -> None:
        """From logits to tokens, text and ends, which join ``deltas`` one by one; ``computed`` has
        moved on already."""
        answers: list[Answer] = []
        rows: list[int] = []
        start = 0
        for request, count, wanted, _ in chunks:
            answer = self._answers[request]
            complete = request.computed == request.length
            if isinstance(answer, Embedding):
                if complete:
                    self._end(answer)
                    deltas.append(replace(self._delta(answer, finish_reason="stop"),
                                          embedding=answer.vector()))
                continue
            assert isinstance(answer, Answer)
            if wanted and answer.scores_prompt:
                answer.score_prompt(logits_NV[start:start + wanted], count, self.model.ops)
            start += wanted
            if wanted and complete:
                if answer.params.max_tokens == 0:
                    self._end(answer)
                    deltas.append(self._delta(answer, finish_reason="length"))
                else:
                    answers.append(answer)
                    rows.append(start - 1)
        if answers:
            logits_SV = logits_NV if rows == list(range(logits_NV.shape[0])) else logits_NV[rows]
            choices = choose(logits_SV, [answer.state for answer in answers], self.model.ops)
            for answer, choice in zip(answers, choices, strict=True):
                deltas.append(self._advance(answer, choice))

    def _advance(self, answer: Answer, choice: Choice | SamplingError) -> Delta:
        """The answer goes on with a token, or ends."""
        if isinstance(choice, SamplingError):
            text, _ = answer.flush()
            self._end(answer)
            return self._delta(answer, (), text, "error", str(choice))
        self._meter.completion_tokens += 1
        text, reason, error = answer.advance(choice, self.eos_token_ids)
        if reason is not None:
            self._end(answer)
        return self._delta(answer, (choice,), text, reason, error)

    def _end(self, answer: Task, keep: bool = True) -> None:
        request = answer.request
        self.scheduler.finish(request, keep)
        del self._answers[request]
        siblings = self._numbers[answer.number]
        siblings.remove(answer)
        if not siblings:
            del self._numbers[answer.number]

    def _fail(self, requests: Iterable[Request]) -> None:
        """Ends those of a failed step's requests that have not ended in it."""
        for request in requests:
            if (answer := self._answers.get(request)) is not None:
                self._end(answer, keep=False)
                self._pending.append(self._delta(answer, finish_reason="error",
                                                 error=STEP_FAILED))

    def _delta(self, answer: Task, choices: tuple[Choice, ...] = (), text: str = "",
               finish_reason: FinishReason | None = None, error: str | None = None) -> Delta:
        request = answer.request
        return Delta(answer.number, answer.index, choices, text, finish_reason, error,
                     answer.take_prompt() if isinstance(answer, Answer) else None,
                     min(request.found or 0, request.prompt_length), self.weights_version,
                     time.monotonic())
