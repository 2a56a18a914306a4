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
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from kilter.models.decoder import Decoder
from kilter.serve.executor import Chunk, Executor
from kilter.serve.grammar import Grammar, GrammarCompiler, GrammarState
from kilter.serve.pages import PagePool
from kilter.serve.params import SamplingParams
from kilter.serve.radix import RadixTree
from kilter.serve.request import Request, Status
from kilter.serve.sampler import Choice, SamplingError, SamplingState, choose, score_tokens
from kilter.serve.scheduler import Scheduler, SchedulerConfig
from kilter.tokens import Detokenizer, StopChecker, Tokenizer
from kilter.weights.bridge import ModelSource
from kilter.weights.load import Storage, replace_weights

FinishReason = Literal["stop", "length", "abort", "error"]
InFlight = Literal["restart", "continue", "abort"]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        kv_tokens: tokens the KV cache holds, rounded up to pages.
        page_size: tokens per page, 1 to 64.
        max_context: longest prompt plus answer, tokens; default what the model was loaded for,
            at most what the cache holds.
        eos_token_ids: ids that end an answer besides the tokenizer's own.
    """

    kv_tokens: int = 16384
    page_size: int = 16
    max_context: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.page_size <= 64:
            problems.append(f"page_size is {self.page_size} tokens but must be from 1 to 64")
        for name in ("kv_tokens", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value} but must be at least 1")
        if problems:
            raise ValueError(f"An engine cannot have these sizes: {'; '.join(problems)}.")


@dataclass(frozen=True)
class Delta:
    """What a step brought one answer.

    Attributes:
        request: the number that `Engine.submit` gave.
        index: which of the request's answers.
        choices: new tokens, with log-probabilities where asked for.
        text: text that became final; a stop string is left out of it.
        finish_reason: set in the answer's last delta: "stop" (an end token or stop string),
            "length", "abort", or "error" (``error`` says what happened; others go on).
        prompt: log-probabilities of the prompt's tokens after the first, in the first delta of
            the first answer, where asked for.
        cached_tokens: prompt tokens that were found in the cache.
        weights_version: of the weights that chose these tokens (`Engine.update_weights`).
    """

    request: int
    index: int
    choices: tuple[Choice, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt: tuple[Choice, ...] | None = None
    cached_tokens: int = 0
    weights_version: int = 0


@dataclass(eq=False)
class _Answer:
    """One answer in the making: what the scheduler knows, and what makes text of it."""

    number: int
    index: int
    params: SamplingParams
    request: Request
    state: SamplingState
    detokenizer: Detokenizer
    stops: StopChecker
    grammar: GrammarState | None
    salt: Hashable
    prompt: list[Choice] | None  # log-probabilities of the prompt so far, if wanted


class Engine:
    """A model that answers many requests at once.

    Raises:
        ValueError: for sizes that do not go together.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, config: EngineConfig | None = None
                 ) -> None:
        self.config = config = config or EngineConfig()
        self.model = model
        self.tokenizer = tokenizer
        pool = PagePool(model.spec, -(-config.kv_tokens // config.page_size), config.page_size,
                        model.kv_dtype, model.norm.weight.device)
        capacity = min(model.max_positions, pool.num_pages * pool.page_size)
        self.max_context = min(config.max_context or capacity, capacity)
        self.executor = Executor(model, pool, self.max_context)
        self.tree = RadixTree(pool)
        self.scheduler = Scheduler(self.tree, config.scheduler)
        self.weights_version = 0
        self.eos_token_ids = (*dict.fromkeys([*tokenizer.eos_token_ids, *config.eos_token_ids]),)
        self._grammars: GrammarCompiler | None = None
        self._answers: dict[Request, _Answer] = {}
        self._numbers: dict[int, list[_Answer]] = {}  # unfinished answers by request number
        self._pending: list[Delta] = []  # news that no step made
        self._next_number = 0
        self._next_id = 0

    # ---- receive ----

    @property
    def busy(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._pending) or not self.scheduler.idle

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0,
               salt: Hashable = None) -> int:
        """Queues a request and returns its number.

        Args:
            prompt: token ids.
            priority: higher goes first under the priority policy.
            salt: prompts share cached prefixes only with prompts of the same salt.

        Raises:
            ValueError: for an empty prompt, a token id outside the vocabulary, a prompt or
                settings the engine cannot serve, or a grammar it cannot use; nothing is queued.
        """
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
        room = self.max_context - len(prompt)
        if room < min(params.max_tokens, 1):
            raise ValueError(f"The prompt has {len(prompt)} tokens and the context "
                             f"{self.max_context}, which leaves no room for an answer; shorten "
                             f"the prompt or give the engine a longer context.")
        params.check(vocab)
        if (params.best_of or params.n) > params.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # what best_of chooses by
        grammar = None if params.grammar is None else self._compile(params)
        count = params.best_of or params.n
        answers = [self._answer(prompt, params, i, grammar, priority, salt, room)
                   for i in range(count)]
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            self._pending += [Delta(self._next_number, a.index, finish_reason="length",
                                    weights_version=self.weights_version) for a in answers]
        else:
            self.scheduler.add(answers[0].request)  # raises before anything is queued
            for answer in answers[1:]:
                self.scheduler.add(answer.request)
            for answer in answers:
                self._answers[answer.request] = answer
            self._numbers[self._next_number] = answers
        self._next_number += 1
        return self._next_number - 1

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

    def step(self) -> list[Delta]:
        """One step for everybody: what is new, at most one delta per answer.

        If it fails, the requests that were in it end (the next step reports them with "error"),
        the others go on, and the exception is raised.
        """
        deltas, self._pending = self._pending, []
        work = self.scheduler.step()
        if work:
            try:
                chunks = [self._chunk(request, count) for request, count in work.items()]
                logits_NV = self.executor.run(chunks)
                self.scheduler.settle(work)
                self._settle(chunks, logits_NV, deltas)
            except BaseException:  # an interrupt too: no request may stay half way through a step
                self._pending = deltas
                self._fail(work)
                raise
        if self.scheduler.idle:
            self.check_integrity()
        return deltas

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free, cached or held by a running request."""
        self.scheduler.check_integrity()

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
                of a preempted answer there are none, so it is as ``restart``); ``abort`` ends them.

        Raises:
            ValueError: for names or shapes that are not the model's; nothing was changed.
        """
        if in_flight not in ("restart", "continue", "abort"):
            raise ValueError(f"in_flight is {in_flight!r} but must be restart, continue or abort.")
        replace_weights(self.model, weights, storage)
        self.executor.weights_changed()
        self.weights_version += 1
        self.tree.reset()
        for answer in list(self._answers.values()):
            request = answer.request
            running = request.status is Status.RUNNING
            if in_flight == "abort" and (running or request.generated):
                self._end(answer, keep=False)
                self._pending.append(self._delta(answer, finish_reason="abort"))
            elif in_flight == "continue" and running:
                # Its keys and values are of two versions: nothing for others.
                request.reuse = request.share = False
            else:
                self.scheduler.restart(request)
                request.namespace = (self.weights_version, answer.salt)
                if answer.prompt is not None:
                    answer.prompt = []  # what was scored so far is the old weights'
        return self.weights_version

    # ---- parts of a step ----

    def _answer(self, prompt: list[int], params: SamplingParams, index: int,
                grammar: Grammar | None, priority: int, salt: Hashable, room: int) -> _Answer:
        request = Request(self._next_id, list(prompt), len(prompt) + min(params.max_tokens, room),
                          (self.weights_version, salt), priority,
                          reuse=params.prompt_logprobs is None or index > 0)
        self._next_id += 1
        follow = None if grammar is None else grammar.start()
        state = SamplingState(params, prompt, end_ids=self.eos_token_ids, index=index,
                              grammar=follow)
        wanted = params.prompt_logprobs is not None and index == 0
        return _Answer(
            self._next_number, index, params, request, state,
            Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens,
                        prompt_tail=prompt[-8:]),
            StopChecker(params.stop, params.include_stop), follow, salt, [] if wanted else None)

    def _compile(self, params: SamplingParams) -> Grammar:
        assert params.grammar is not None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.eos_token_ids)
        return self._grammars.compile(params.grammar)

    def _chunk(self, request: Request, count: int) -> Chunk:
        answer = self._answers[request]
        end = request.computed + count
        if answer.prompt is not None and len(answer.prompt) < min(end, request.prompt_length - 1):
            return Chunk(request, count, count)
        return Chunk(request, count, int(end == request.length))

    def _settle(self, chunks: list[Chunk], logits_NV: Tensor, deltas: list[Delta]) -> None:
        """From logits to tokens, text and ends, which join ``deltas`` one by one; ``computed`` has
        moved on already."""
        answers: list[_Answer] = []
        rows: list[int] = []
        start = 0
        for request, count, wanted in chunks:
            answer = self._answers[request]
            if wanted and answer.prompt is not None and len(answer.prompt) < (
                    request.prompt_length - 1):
                self._score_prompt(answer, logits_NV[start:start + wanted], count)
            start += wanted
            if wanted and request.computed == request.length:
                if answer.params.max_tokens == 0:
                    deltas.append(self._finish(answer, (), "", "length"))
                else:
                    answers.append(answer)
                    rows.append(start - 1)
        if answers:
            logits_SV = logits_NV if rows == list(range(logits_NV.shape[0])) else logits_NV[rows]
            choices = choose(logits_SV, [answer.state for answer in answers], self.model.ops)
            for answer, choice in zip(answers, choices, strict=True):
                deltas.append(self._advance(answer, choice))

    def _score_prompt(self, answer: _Answer, logits_TV: Tensor, count: int) -> None:
        """Log-probabilities of the prompt tokens that follow the rows just computed."""
        request = answer.request
        assert answer.prompt is not None and answer.params.prompt_logprobs is not None
        first = request.computed - count
        targets = request.tokens[first + 1:min(request.computed + 1, request.prompt_length)]
        scored = score_tokens(logits_TV[:len(targets)], targets,
                              [answer.params.prompt_logprobs] * len(targets), self.model.ops)
        answer.prompt += scored[len(answer.prompt) - first:]  # after a preemption some are known

    def _advance(self, answer: _Answer, choice: Choice | SamplingError) -> Delta:
        """The answer goes on with a token, or ends."""
        if isinstance(choice, SamplingError):
            return self._finish(answer, (), "", "error", str(choice))
        token, params, request = choice.token_id, answer.params, answer.request
        request.append(token)
        try:
            answer.state.accept(token)
        except SamplingError as error:
            return self._finish(answer, (choice,), "", "error", str(error))
        ended = token in params.stop_token_ids or (
            token in self.eos_token_ids and not params.ignore_eos)
        text = "" if ended else answer.detokenizer.push(token)
        text = answer.stops.push(text, may_stop=request.generated > params.min_tokens)
        complete = answer.grammar is not None and answer.grammar.is_finished
        if ended or complete or answer.stops.matched is not None:
            return self._finish(answer, (choice,), text, "stop")
        if request.length >= request.max_length:
            return self._finish(answer, (choice,), text, "length")
        return self._delta(answer, (choice,), text)

    def _finish(self, answer: _Answer, choices: tuple[Choice, ...], text: str,
                reason: FinishReason, error: str | None = None) -> Delta:
        if answer.stops.matched is None and answer.request.generated:
            text += answer.stops.push(answer.detokenizer.finish()) + answer.stops.finish()
            if answer.stops.matched is not None and reason != "error":
                reason = "stop"
        self._end(answer)
        return self._delta(answer, choices, text, reason, error)

    def _end(self, answer: _Answer, keep: bool = True) -> None:
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
                                                 error="The step this request was in failed."))

    def _delta(self, answer: _Answer, choices: tuple[Choice, ...] = (), text: str = "",
               finish_reason: FinishReason | None = None, error: str | None = None) -> Delta:
        prompt = None
        if answer.prompt is not None and len(answer.prompt) == answer.request.prompt_length - 1:
            prompt, answer.prompt = tuple(answer.prompt), None
        return Delta(answer.number, answer.index, choices, text, finish_reason, error, prompt,
                     min(answer.request.found or 0, answer.request.prompt_length),
                     self.weights_version)
