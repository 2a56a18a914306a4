"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from kilter.serve.engine import Delta
from kilter.serve.sampler import Choice
from kilter.serve.server import exchange
from kilter.serve.server.body import validate
from kilter.serve.server.context import Context
from kilter.serve.server.errors import error_responses
from kilter.serve.server.generation import Job, Result
from kilter.serve.server.logprobs import CompletionLogprobs, prompt_logprobs
from kilter.serve.server.openapi import body_of, streamed
from kilter.serve.server.prepare import check_common, encode_text, make_job, structured_grammar
from kilter.serve.server.protocol import CompletionRequest
from kilter.serve.server.responses import Chunks, CompletionResponse, fingerprint, usage


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", summary="Continuations of one or more texts",
                 response_model=None, openapi_extra=body_of(CompletionRequest),
                 responses={200: streamed(CompletionResponse, CompletionResponse),
                            **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)})
    async def completions(request: Request) -> Response:
        return await exchange.respond(context, request, prepare)

    return router


async def complete(context: Context, body: dict[str, Any]) -> dict[str, Any]:
    """The response to a request that does not stream. Raises ApiError."""
    return await exchange.answer(context, body, prepare)


def prepare(context: Context, body: dict[str, Any]) -> CompletionExchange:
    """Raises ApiError for a request that cannot be served."""
    request = validate(CompletionRequest, body)
    check_common(context, request)
    grammar = structured_grammar(request.structured_outputs) if request.structured_outputs else None
    wanted: dict[str, Any] = {} if not request.echo or request.logprobs is None else {
        "prompt_logprobs": request.logprobs}
    jobs = []
    for prompt in request.prompt:
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            prompt = encode_text(context, text, "prompt",
                                 add_special_tokens=request.add_special_tokens is not False)
        jobs.append(make_job(
            context, request, prompt, "prompt", grammar=grammar, text=text,
            max_tokens=16 if request.max_tokens is None else request.max_tokens,
            best_of=request.best_of, logprobs=request.logprobs, **wanted))
    return CompletionExchange(context, request, jobs)


class CompletionExchange:
    """Prompts, and how what continues them is written."""

    endpoint = "completions"

    def __init__(self, context: Context, request: CompletionRequest, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.stream = bool(request.stream)
        self._tokenizer = context.tokenizer
        self._request = request
        self._common = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion",
                        "created": int(time.time()), "model": context.config.served_name}
        self._chunks = Chunks(self._common, request.stream_options, self._count)
        self._answers = [[_Answer() for _ in range(job.params.n)] for job in jobs]
        self._scores: list[tuple[Choice, ...] | None] = [None] * len(jobs)  # of echoed prompts
        self._waiting: list[list[Delta]] = [[] for _ in jobs]  # for these scores
        self._cached = [0] * len(jobs)

    # ---- whole ----

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for job, result in zip(self.jobs, results, strict=True):
            for completion in result.completions:
                answer = _Answer()
                choice = self._choice(job, answer, len(choices), completion.text,
                                      completion.choices, result.prompt, completion.finish_reason)
                if self._request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer,
                                                                result.prompt or ())
                choices.append(choice)
        version = max(result.weights_version for result in results)
        return {**self._common, "system_fingerprint": fingerprint(version), "choices": choices,
                "usage": usage(sum(len(job.prompt) for job in self.jobs),
                               sum(result.computed for result in results),
                               sum(result.cached_tokens for result in results))}

    # ---- streamed ----

    def begin(self) -> bytes:
        return b""

    def chunk(self, job: int, delta: Delta) -> bytes:
        if delta.index == 0:
            self._cached[job] = delta.cached_tokens
        self._answers[job][delta.index].tokens += len(delta.choices)
        if not (self._request.echo and self._request.logprobs is not None):
            return self._chunk(job, delta)
        # What the prompt's tokens are worth comes with the first answer's first delta, and every
        # answer begins with it.
        if delta.prompt is not None:
            self._scores[job] = delta.prompt
        self._waiting[job].append(delta)
        if self._scores[job] is None and delta.finish_reason is None:
            return b""
        waiting, self._waiting[job] = self._waiting[job], []
        return b"".join(self._chunk(job, delta) for delta in waiting)

    def _chunk(self, job: int, delta: Delta) -> bytes:
        request = self._request
        answer = self._answers[job][delta.index]
        events = b""
        if answer.held and answer.version != delta.weights_version and (
                request.return_token_ids or request.logprobs is not None):
            events = self._piece(job, delta.index, "", None)  # they are not the new weights'
        answer.version = delta.weights_version
        answer.held += delta.choices
        if delta.text or delta.finish_reason or (request.echo and not answer.begun):
            events += self._piece(job, delta.index, delta.text, delta.finish_reason)
        return events

    def _piece(self, job: int, index: int, text: str, reason: str | None) -> bytes:
        """The event of an answer's next text and of the tokens that are held."""
        answer = self._answers[job][index]
        tokens, answer.held = answer.held, []
        choice = self._choice(
            self.jobs[job], answer, sum(len(answers) for answers in self._answers[:job]) + index,
            text, tokens, self._scores[job], reason)
        return self._chunks.event([choice], answer.version)

    def end(self) -> bytes:
        return self._chunks.usage()

    def _count(self) -> tuple[int, int, int]:
        return (sum(len(job.prompt) for job in self.jobs),
                sum(answer.tokens for answers in self._answers for answer in answers),
                sum(self._cached))

    # ---- both ----

    def _choice(self, job: Job, answer: _Answer, index: int, text: str, tokens: list[Choice],
                scores: Sequence[Choice] | None, reason: str | None) -> dict[str, Any]:
        """The next piece of an answer, or all of it; the first one brings the echoed prompt."""
        request = self._request
        first = not answer.begun
        answer.begun = True
        echo = request.echo and first
        logprobs = None
        if request.logprobs is not None:
            if answer.writer is None:
                answer.writer = CompletionLogprobs(
                    self._tokenizer, job.params.skip_special_tokens,
                    () if request.echo else job.prompt[-8:])
            logprobs = {name: list(values) for name, values in (
                answer.writer.prompt(job.prompt, scores) if echo and scores is not None
                else {}).items()}
            for name, values in answer.writer.answer(tokens).items():
                logprobs.setdefault(name, []).extend(values)
        choice = {"index": index, "text": self._echoed(job) + text if echo else text,
                  "logprobs": logprobs, "finish_reason": reason}
        if request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
            if first:
                choice["prompt_token_ids"] = job.prompt
        return choice

    def _echoed(self, job: Job) -> str:
        if job.text is not None and job.params.skip_special_tokens:
            return job.text
        return self._tokenizer.decode(job.prompt, job.params.skip_special_tokens)


class _Answer:
    """One answer as it is written.

    begun: whether its first piece is out; held: tokens that are not, since none of their text is;
    version: of the weights that chose them.
    """

    def __init__(self) -> None:
        self.begun = False
        self.held: list[Choice] = []
        self.version = 0
        self.tokens = 0
        self.writer: CompletionLogprobs | None = None
