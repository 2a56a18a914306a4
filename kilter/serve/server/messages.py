"""What a chat request may hold: messages, tools, the answer's format. See `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from kilter.serve.server.protocol import Absent, GenerationRequest, Strict

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _content(value: Any) -> str | list[dict[str, str]]:
    """A text, or text parts as they came: a template may want to see them one by one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string or a list of text parts")
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind != "text":
            raise ValueError(f"part {i} is of type {kind!r:.40}; this server takes text parts only")
        if kind is None or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {i} must be {{\"type\": \"text\", \"text\": \"…\"}}")
    return value


_PART = {"type": "object", "additionalProperties": False, "required": ["type", "text"],
         "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
Content = Annotated[Any, PlainValidator(_content), WithJsonSchema({"anyOf": [
    {"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}]})]
MaybeContent = Annotated[Any, PlainValidator(lambda value: value if value is None
                                             else _content(value)),
                         WithJsonSchema({"anyOf": [
                             {"type": "string"}, {"type": "null"},
                             {"type": "array", "minItems": 1, "items": _PART}]})]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCallMessage(Strict):
    """A call that the assistant made before."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: MaybeContent = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(fail_fast=True)] | None = None
    refusal: Absent
    audio: Absent
    function_call: Absent
    annotations: Annotated[list[None], Field(max_length=0, fail_fast=True)] | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage,
                    Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=32768, fail_fast=True)]


class Function(Strict):
    """strict: OpenAI promises arguments inside the schema only with it; here see `tools`."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """strict makes no difference: an answer is always inside its schema."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat,
                           Field(discriminator="type")]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    # beyond OpenAI's API
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables that the chat template reads, such as enable_thinking.")
    # OpenAI's, and not here
    audio: Absent
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    prediction: Absent
    reasoning_effort: Absent
    verbosity: Absent
    web_search_options: Absent
    functions: Absent
    function_call: Absent
    moderation: Absent
    prompt_cache_retention: Absent

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
                self.max_tokens != self.max_completion_tokens):
            raise ValueError(f"max_tokens is {self.max_tokens} and max_completion_tokens "
                             f"{self.max_completion_tokens}, but they mean the same; give one")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice asks for a tool call, but there are no tools")
        return self
