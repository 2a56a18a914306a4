"""POST /v1/chat/completions."""

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
from kilter.serve.server.logprobs import chat_logprobs, prompt_logprobs
from kilter.serve.server.messages import ChatRequest
from kilter.serve.server.openapi import body_of, streamed
from kilter.serve.server.prepare import check_common, encode_text, make_job, render_chat
from kilter.serve.server.responses import ChatChunk, ChatResponse, Chunks, fingerprint, usage
from kilter.serve.server.tools import chat_grammar, tools_of
from kilter.serve.tool_parsers import (
    CallArguments,
    CallStart,
    Text,
    ToolEvent,
    ToolFormat,
    ToolParser,
    parse_tool_calls,
)


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", summary="The next message of a chat",
                 response_model=None, openapi_extra=body_of(ChatRequest),
                 responses={200: streamed(ChatResponse, ChatChunk),
                            **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)})
    async def chat_completions(request: Request) -> Response:
        return await exchange.respond(context, request, prepare)

    return router


async def complete(context: Context, body: dict[str, Any]) -> dict[str, Any]:
    """The response to a request that does not stream. Raises ApiError."""
    return await exchange.answer(context, body, prepare)


def prepare(context: Context, body: dict[str, Any]) -> ChatExchange:
    """Raises ApiError for a request that cannot be served."""
    request = validate(ChatRequest, body)
    check_common(context, request)
    tools = tools_of(request, context.tool_format)
    grammar = chat_grammar(request, tools, context.tool_format)
    text = render_chat(context, request.messages, tools, request.add_generation_prompt is not False,
                       request.chat_template_kwargs)
    ids = encode_text(context, text, "messages", add_special_tokens=False)
    limit = request.max_tokens if request.max_completion_tokens is None else (
        request.max_completion_tokens)
    job = make_job(context, request, ids, "messages", max_tokens=limit, grammar=grammar,
                   grammar_from="tools" if tools else "structured_outputs"
                   if request.structured_outputs else "response_format",
                   logprobs=(request.top_logprobs or 0) if request.logprobs else None)
    names = {tool["function"]["name"] for tool in tools}
    return ChatExchange(context, request, job, context.tool_format if tools else None, names)


class ChatExchange:
    """A chat's prompt, and how its answers are written."""

    endpoint = "chat"

    def __init__(self, context: Context, request: ChatRequest, job: Job, format: ToolFormat | None,
                 names: set[str]) -> None:
        self.jobs: Sequence[Job] = (job,)
        self.stream = bool(request.stream)
        self._context = context
        self._request = request
        self._format, self._names = format, names
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()),
                        "model": context.config.served_name}
        self._chunks = Chunks({**self._common, "object": "chat.completion.chunk"},
                              request.stream_options, self._count)
        self._shows_tokens = bool(request.logprobs or request.return_token_ids)
        self._answers = [_Answer(None if format is None else ToolParser(format, names))
                         for _ in range(job.params.n)]
        self._cached = 0

    # ---- whole ----

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        result = results[0]
        prompt = self.jobs[0].prompt
        body: dict[str, Any] = {
            **self._common, "object": "chat.completion",
            "system_fingerprint": fingerprint(result.weights_version),
            "choices": [self._choice(i, completion.text, completion.choices,
                                     completion.finish_reason)
                        for i, completion in enumerate(result.completions)],
            "usage": usage(len(prompt), result.computed, result.cached_tokens)}
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._context.tokenizer, result.prompt or ())
        if self._request.return_token_ids:
            body["prompt_token_ids"] = prompt
        return body

    def _choice(self, index: int, text: str, tokens: list[Choice], reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._format is not None:
            content, calls = parse_tool_calls(text, self._format, self._names)
            if calls:
                message["content"] = content or None
                message["tool_calls"] = [
                    {"id": _call_id(), "type": "function",
                     "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls]
                reason = "tool_calls" if reason == "stop" else reason
        choice = {"index": index, "message": message, "logprobs": self._logprobs(tokens),
                  "finish_reason": reason}
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

    # ---- streamed ----

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        more = {"prompt_token_ids": self.jobs[0].prompt} if self._request.return_token_ids else {}
        version = self._context.engine.stats.weights_version
        return b"".join(self._chunks.event([self._piece(i, first, [])], version, **more)
                        for i in range(len(self._answers)))

    def chunk(self, job: int, delta: Delta) -> bytes:
        answer = self._answers[delta.index]
        pieces = []
        if answer.held and answer.version != delta.weights_version and self._shows_tokens:
            # They are not the new weights'.
            pieces.append(self._chunks.event([self._piece(delta.index, {}, answer.take())],
                                             answer.version))
        answer.version = version = delta.weights_version
        answer.held += delta.choices
        answer.tokens += len(delta.choices)
        if delta.index == 0:
            self._cached = delta.cached_tokens
        for said in answer.read(delta):
            pieces.append(self._chunks.event([self._piece(delta.index, said, answer.take())],
                                             version))
        if delta.finish_reason is not None:
            reason: str = delta.finish_reason
            if reason == "stop" and answer.called:
                reason = "tool_calls"
            pieces.append(self._chunks.event(
                [self._piece(delta.index, {}, answer.take(), reason)], version))
        return b"".join(pieces)

    def end(self) -> bytes:
        return self._chunks.usage()

    def _count(self) -> tuple[int, int, int]:
        return len(self.jobs[0].prompt), sum(a.tokens for a in self._answers), self._cached

    def _piece(self, index: int, delta: dict[str, Any], tokens: list[Choice],
               reason: str | None = None) -> dict[str, Any]:
        piece = {"index": index, "delta": delta,
                 "logprobs": self._logprobs(tokens) if tokens else None, "finish_reason": reason}
        if self._request.return_token_ids:
            piece["token_ids"] = [token.token_id for token in tokens]
        return piece

    def _logprobs(self, tokens: list[Choice]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return {"content": chat_logprobs(self._context.tokenizer, tokens), "refusal": None}


class _Answer:
    """One answer as it is streamed.

    held: tokens that are not given out, since none of their text is yet; version: of the weights
        that chose them.
    """

    def __init__(self, parser: ToolParser | None) -> None:
        self.held: list[Choice] = []
        self.version = 0
        self.tokens = 0
        self.called = False
        self._parser = parser

    def take(self) -> list[Choice]:
        held, self.held = self.held, []
        return held

    def read(self, delta: Delta) -> list[dict[str, Any]]:
        """What the client is told of a delta: texts and pieces of calls."""
        if self._parser is None:
            return [{"content": delta.text}] if delta.text else []
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        return [piece for event in events if (piece := self._told(event)) is not None]

    def _told(self, event: ToolEvent) -> dict[str, Any] | None:
        match event:
            case Text(text=text):
                return {"content": text}
            case CallStart(index=index, name=name):
                self.called = True
                return {"tool_calls": [{"index": index, "id": _call_id(), "type": "function",
                                        "function": {"name": name, "arguments": ""}}]}
            case CallArguments(index=index, text=text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
