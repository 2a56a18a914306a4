"""What the engine makes of requests: answers of tokens and text, and embeddings; and what it says
of them in each step, a `Delta`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from kilter.ops import Ops
from kilter.serve.executor import Chunk
from kilter.serve.grammar import GrammarState
from kilter.serve.params import SamplingParams
from kilter.serve.request import Request
from kilter.serve.sampler import Choice, SamplingError, SamplingState, score_tokens
from kilter.tokens import Detokenizer, StopChecker

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]
STEP_FAILED = "The step this request was in failed."  # a `Delta.error` that is no request's fault


@dataclass(frozen=True)
class Delta:
    """What a step brought one answer.

    Attributes:
        request: the number that `Engine.submit` gave.
        index: which of the request's answers.
        choices: new tokens, with log-probabilities where asked for.
        text: text that became final; a stop string is left out of it.
        finish_reason: set in the answer's last delta: "stop" (an end token or stop string; an
            embedding that is done), "length", "abort", or "error" (``error`` says what happened;
            others go on).
        prompt: log-probabilities of the prompt's tokens after the first, in the first delta of
            the first answer, where asked for.
        cached_tokens: prompt tokens that were found in the cache.
        weights_version: of the weights that chose these tokens (`Engine.update_weights`).
        time: when the step that made it ended, `time.monotonic` seconds.
        embedding: of an embedding's last delta, float32 [D].
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
    time: float = field(default=0.0, compare=False)
    embedding: np.ndarray | None = field(default=None, compare=False)


@dataclass(eq=False)
class Task:
    """A request to the scheduler, and which of whose it is.

    number, index: those of its deltas.
    salt: prompts share cached prefixes only with prompts of the same salt.
    """

    number: int
    index: int
    request: Request
    salt: Hashable

    def chunk(self, count: int) -> Chunk:
        """Its part in a step that computes ``count`` more tokens of it."""
        raise NotImplementedError

    def restart(self) -> None:
        """The weights have changed, and all that was computed of it was forgotten."""


@dataclass(eq=False)
class Answer(Task):
    """An answer in the making: what the scheduler knows, and what makes text of it."""

    params: SamplingParams
    state: SamplingState
    detokenizer: Detokenizer
    stops: StopChecker
    grammar: GrammarState | None
    prompt: list[Choice] | None  # log-probabilities of the prompt so far, if wanted

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still missing."""
        return self.prompt is not None and len(self.prompt) < self.request.prompt_length - 1

    def chunk(self, count: int) -> Chunk:
        request, end = self.request, self.request.computed + count
        if self.prompt is not None and len(self.prompt) < min(end, request.prompt_length - 1):
            return Chunk(request, count, count)
        return Chunk(request, count, int(end == request.length))

    def restart(self) -> None:
        if self.prompt is not None:
            self.prompt = []  # what was scored so far is the old weights'

    def score_prompt(self, logits_TV: Tensor, count: int, ops: Ops) -> None:
        """Takes log-probabilities of the prompt's tokens after the ``count`` just computed ones.

        logits_TV: rows of those tokens.
        """
        request = self.request
        assert self.prompt is not None and self.params.prompt_logprobs is not None
        first = request.computed - count
        targets = request.tokens[first + 1:min(request.computed + 1, request.prompt_length)]
        scored = score_tokens(logits_TV[:len(targets)], targets,
                              [self.params.prompt_logprobs] * len(targets), ops)
        self.prompt += scored[len(self.prompt) - first:]  # after a preemption some are known

    def advance(self, choice: Choice, end_ids: tuple[int, ...]
                ) -> tuple[str, FinishReason | None, str | None]:
        """Takes the next token: (text that became final, why the answer ends, the error)."""
        token, params, request = choice.token_id, self.params, self.request
        request.append(token)
        try:
            self.state.accept(token)
        except SamplingError as error:
            text, _ = self.flush()
            return text, "error", str(error)
        ended = token in params.stop_token_ids or (token in end_ids and not params.ignore_eos)
        text = "" if ended else self.detokenizer.push(token)
        text = self.stops.push(text, may_stop=request.generated > params.min_tokens)
        complete = self.grammar is not None and self.grammar.is_finished
        reason: FinishReason | None = None
        if ended or complete or self.stops.matched is not None:
            reason = "stop"
        elif request.length >= request.max_length:
            reason = "length"
        if reason is not None:
            rest, stopped = self.flush()
            return text + rest, "stop" if stopped else reason, None
        return text, None, None

    def flush(self) -> tuple[str, bool]:
        """The answer ends: the text that was held back, and whether a stop string ended it."""
        if self.stops.matched is not None or not self.request.generated:
            return "", self.stops.matched is not None
        text = self.stops.push(self.detokenizer.finish()) + self.stops.finish()
        return text, self.stops.matched is not None

    def take_prompt(self) -> tuple[Choice, ...] | None:
        """The log-probabilities of the prompt, once they are complete; then never again."""
        if self.prompt is None or self.scores_prompt:
            return None
        prompt, self.prompt = tuple(self.prompt), None
        return prompt


@dataclass(eq=False)
class Embedding(Task):
    """A prompt's vector in the making: its hidden states after the last norm, pooled.

    Rows of the exact path are the same bits in any batch and chunk, and they are added one after
    the other in float64, so the vector too depends on its prompt alone.
    """

    pooling: Pooling
    normalize: bool
    pooled: int = 0  # tokens whose rows are in the sum
    total_D: np.ndarray | None = None  # float64

    def chunk(self, count: int) -> Chunk:
        request = self.request
        wanted = self.pooling == "mean" or request.computed + count == request.length
        return Chunk(request, count, 0, self.add if wanted else None)

    def restart(self) -> None:
        self.pooled, self.total_D = 0, None

    def add(self, hidden_CD: Tensor) -> None:
        """Takes the rows of the tokens from ``request.computed`` on."""
        # After a preemption some were taken before.
        start = len(hidden_CD) - 1 if self.pooling == "last" else (
            self.pooled - self.request.computed)
        self.pooled = max(self.pooled, self.request.computed + len(hidden_CD))
        rows_CD = hidden_CD[start:].cpu().numpy().astype(np.float64)
        if self.pooling == "mean" and self.total_D is not None:
            rows_CD = np.concatenate((self.total_D[None], rows_CD))
        if len(rows_CD):
            # A running sum is one addition after the other; a sum may take them in any order.
            self.total_D = np.add.accumulate(rows_CD)[-1]

    def vector(self) -> np.ndarray:
        """The finished vector, float32 [D]."""
        assert self.total_D is not None and self.pooled == self.request.length
        vector_D = self.total_D
        if self.pooling == "mean":
            vector_D = vector_D / self.request.length
        if self.normalize and (norm := float(np.sqrt((vector_D ** 2).sum()))) > 0:
            vector_D = vector_D / norm
        return vector_D.astype(np.float32)
