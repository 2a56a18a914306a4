"""What answers look like: models for the API's description (answers are built as plain objects,
which is faster), and the parts that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from kilter import __version__
from kilter.serve.server.errors import to_json
from kilter.serve.server.protocol import StreamOptions
from kilter.serve.server.stream import event


def fingerprint(weights_version: int) -> str:
    """``system_fingerprint``: what made an answer; new weights change it."""
    return f"kilter-{__version__}-weights-{weights_version}"


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Token counts; end tokens count as OpenAI counts them, as part of the completion."""
    return {"prompt_tokens": prompt, "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}}


class Chunks:
    """Writes a stream's events; their constant start is written once.

    common: what all of them say; options: whether they have a ``usage``, null or of all answers so
    far, until the end; count: (prompt tokens, completion tokens, cached tokens) so far.
    """

    def __init__(self, common: dict[str, Any], options: StreamOptions | None,
                 count: Callable[[], tuple[int, int, int]]) -> None:
        self._with_usage = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._count = count
        self._common = common
        self._version = -1
        self._start = b""

    def event(self, choices: list[dict[str, Any]], version: int, **more: Any) -> bytes:
        """version: of the weights that chose the tokens."""
        if version != self._version:
            self._version = version
            self._start = to_json({**self._common, "system_fingerprint": fingerprint(version)})[:-1]
        if self._with_usage and "usage" not in more:
            more["usage"] = usage(*self._count()) if self._always else None
        rest = b"," + to_json(more)[1:-1] if more else b""
        return event(self._start + b',"choices":' + to_json(choices) + rest + b"}")

    def usage(self) -> bytes:
        """The last event, where it was asked for."""
        return self.event([], self._version, usage=usage(*self._count())
                          ) if self._with_usage else b""


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt_token_ids: list[int] | None = None


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a stream; after the last one comes ``[DONE]``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobLists(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: Literal["stop", "length", "abort"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class CompletionResponse(BaseModel):
    """A whole answer, or one event of a stream, after the last of which comes ``[DONE]``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
