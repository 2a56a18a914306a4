"""Generation: prompts in, tokens and text out as they are made.

`Generator` runs any number of requests: it prefills in chunks, decodes all running requests as
one batch, and starts waiting ones as pages come free. A request's tokens do not depend on what
runs beside it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kilter.models.decoder import Decoder
from kilter.serve.executor import Executor, Sequence
from kilter.serve.pages import PagePool
from kilter.serve.sampler import SamplingParams, sample
from kilter.tokens import Detokenizer, Tokenizer

_PREFILL_CHUNK = 512  # tokens computed at once; bounds the activations of a long prompt


@dataclass(frozen=True)
class Step:
    """One new token of one request, or its end."""

    index: int  # which prompt
    token_id: int | None  # None: the request ended without a new token
    logprob: float | None  # of the token under the model's own distribution, if asked for
    text: str  # text that became final with this token
    finish_reason: str | None  # "stop", "length", or None while it goes on


@dataclass
class Completion:
    """A finished request."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


@dataclass
class _Request:
    index: int
    params: SamplingParams
    seq: Sequence
    prompt_length: int
    detokenizer: Detokenizer
    seed: int
    reserved_pages: int

    @property
    def generated(self) -> int:
        return len(self.seq.tokens) - self.prompt_length


class Generator:
    """A loaded model that answers.

    Args:
        kv_tokens: size of the KV cache in tokens (rounded up to pages).
        max_context: longest prompt plus answer, tokens; default what the cache and model allow.
        max_running: how many requests decode together.
        eos_token_ids: ids that end an answer besides the tokenizer's own.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, kv_tokens: int,
                 max_context: int | None = None, page_size: int = 16,
                 max_running: int = 16, eos_token_ids: SequenceOf[int] = ()) -> None:
        self.tokenizer = tokenizer
        pool = PagePool(model.spec, -(-kv_tokens // page_size), page_size, model.kv_dtype,
                        model.norm.weight.device)
        limit = min(model.max_positions, pool.num_pages * page_size)
        self.executor = Executor(model, pool, min(max_context or limit, limit))
        self.max_running = max_running
        self._eos = frozenset(tokenizer.eos_token_ids) | frozenset(eos_token_ids)

    @property
    def max_context(self) -> int:
        return self.executor.max_context

    def generate(self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams
                 ) -> list[Completion]:
        """Runs all prompts to their end. Raises as `stream` does."""
        done = [Completion(list(prompt)) for prompt in prompts]
        for step in self.stream(prompts, params):
            completion = done[step.index]
            completion.text += step.text
            if step.token_id is not None:
                completion.token_ids.append(step.token_id)
            if step.logprob is not None:
                completion.logprobs.append(step.logprob)
            if step.finish_reason is not None:
                completion.finish_reason = step.finish_reason
        return done

    def stream(self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams,
               session: Sequence | None = None) -> Iterator[Step]:
        """Yields every new token of every request as it is made.

        Args:
            prompts: token ids. An answer ends after ``params.max_tokens`` tokens or where the
                context is full ("length"), or at an end token or stop string ("stop").
            session: a sequence to run the (single) prompt in: the tokens it shares with the
                prompt from the start are not computed again, and it keeps its pages afterwards.

        Raises:
            ValueError: for an empty prompt, one that fills the context, or one with a token id
                outside the vocabulary; before anything is computed.
        """
        waiting = deque(self._admit(prompts, params, session))
        running: list[_Request] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.max_running and self._fits(
                        waiting[0], running):
                    request = waiting.popleft()
                    running.append(request)
                    if params.max_tokens == 0:
                        logits_SV = None
                    else:
                        logits_SV = self._prefill(request)
                    yield from self._advance([request], logits_SV, running, session)
                if running:
                    work = [(request.seq, 1) for request in running]
                    yield from self._advance(list(running), self.executor.run(work), running,
                                             session)
        finally:
            # The caller may stop listening at any step.
            for request in running:
                if request.seq is not session:
                    self.executor.release(request.seq)

    def _admit(self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams,
               session: Sequence | None) -> list[_Request]:
        if session is not None and len(prompts) != 1:
            raise ValueError(f"A session runs one prompt at a time; got {len(prompts)}.")
        vocab = self.executor.model.spec.vocab_size
        requests = []
        for i, prompt in enumerate(prompts):
            tokens = list(prompt)
            if not tokens:
                raise ValueError(f"Prompt {i} is empty; give at least one token.")
            if len(tokens) >= self.max_context:
                raise ValueError(f"Prompt {i} has {len(tokens)} tokens, which leaves no room for "
                                 f"an answer in a context of {self.max_context}; shorten it or "
                                 f"raise the context.")
            bad = next((t for t in tokens if not 0 <= t < vocab), None)
            if bad is not None:
                raise ValueError(f"Prompt {i} holds token id {bad}, outside the vocabulary of "
                                 f"{vocab} tokens.")
            seq = Sequence(tokens) if session is None else self._resume(session, tokens)
            end = min(len(tokens) + params.max_tokens, self.max_context)
            requests.append(_Request(
                i, params, seq, len(tokens),
                Detokenizer(self.tokenizer, params.stop, prompt_tail=tokens[-8:]),
                secrets.randbits(64) if params.seed is None else params.seed,
                self.executor.pool.pages_for(end)))
        return requests

    def _resume(self, session: Sequence, tokens: list[int]) -> Sequence:
        """Keeps the session's longest prefix of ``tokens``; the last token is always computed,
        since its logits are what the answer starts from."""
        shared = 0
        for old, new in zip(session.tokens[:session.computed], tokens[:-1], strict=False):
            if old != new:
                break
            shared += 1
        pool = self.executor.pool
        keep = pool.pages_for(shared)
        pool.release(session.pages[keep:])
        session.pages, session.tokens, session.computed = session.pages[:keep], tokens, shared
        return session

    def _fits(self, request: _Request, running: list[_Request]) -> bool:
        """Whether the pool holds this request and all running ones to their very end."""
        promised = sum(r.reserved_pages - len(r.seq.pages) for r in running)
        need = request.reserved_pages - len(request.seq.pages)
        return promised + need <= self.executor.pool.num_free

    def _prefill(self, request: _Request) -> Tensor:
        seq = request.seq
        while True:
            logits = self.executor.run(
                [(seq, min(_PREFILL_CHUNK, len(seq.tokens) - seq.computed))])
            if seq.computed == len(seq.tokens):
                return logits

    def _advance(self, requests: list[_Request], logits_SV: Tensor | None,
                 running: list[_Request], session: Sequence | None) -> Iterator[Step]:
        """Samples a token for each request, ends those that are finished."""
        chosen = [None] * len(requests) if logits_SV is None else self._choose(requests, logits_SV)
        steps = []
        for request, choice in zip(requests, chosen, strict=True):
            step = self._step(request, choice)
            if step.finish_reason is not None:
                running.remove(request)
                if request.seq is not session:
                    self.executor.release(request.seq)
            steps.append(step)
        yield from steps

    def _choose(self, requests: list[_Request], logits_SV: Tensor
                ) -> list[tuple[int, float | None]]:
        ops = self.executor.model.ops
        if all(request.params.greedy for request in requests):
            tokens_S = ops.argmax(logits_SV)
        else:
            rows: np.ndarray = logits_SV.float().cpu().numpy()
            tokens_S = torch.tensor([
                sample(rows[i], r.params, r.seed, r.generated) for i, r in enumerate(requests)])
        logprobs: list[float | None] = [None] * len(requests)
        if any(request.params.logprobs for request in requests):
            logprobs = ops.token_logprobs(logits_SV, tokens_S.to(logits_SV.device)).tolist()
        return list(zip(tokens_S.tolist(), logprobs, strict=True))

    def _step(self, request: _Request, choice: tuple[int, float | None] | None) -> Step:
        params = request.params
        if choice is None:  # max_tokens is 0: nothing was asked for
            return Step(request.index, None, None, "", "length")
        token, logprob = choice
        request.seq.tokens.append(token)
        logprob = logprob if params.logprobs else None
        ended = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
        text = "" if ended else request.detokenizer.push(token)
        reason = None
        if ended or request.detokenizer.stopped_by is not None:
            reason = "stop"
        elif (request.generated >= params.max_tokens
              or len(request.seq.tokens) >= self.max_context):
            reason = "length"
        if reason is not None:
            text += request.detokenizer.finish()
            if request.detokenizer.stopped_by is not None:
                reason = "stop"
        return Step(request.index, token, logprob, text, reason)
