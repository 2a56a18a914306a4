"""What a request may hold, as pydantic models: strict types, and nothing that is not listed.

A field is honoured or refused. What OpenAI's API has and this server does not is listed too, with
the one value that asks for nothing (`Absent`), so that clients that always send it are served and
the others are told which parameter it was.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

Absent = Annotated[None, Field(default=None, description="Not supported: null, or left out.")]

_MAX_STOPS = 64  # stop strings of a request: each token's text is looked through for all of them


class Strict(BaseModel):
    """A part of a request: no field but those listed, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _no(value: Any) -> Literal[False]:
    if value is not False:  # 0 == False, but it is no boolean
        raise ValueError("this server takes false only")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("it must be a string or a list of strings")
    if "" in stops:
        raise ValueError("a stop string is empty")
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"it has {len(stops)} strings but may have {_MAX_STOPS} at most")
    return tuple(stops)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("it must be an object that maps token ids to numbers")
    bias = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise ValueError(f"its key {key!r:.40} is not a token id")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"its value for token {key} is not a number")
        bias[int(key)] = number
    return bias


No = Annotated[Literal[False], PlainValidator(_no), WithJsonSchema({"const": False})]
Stop = Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema({"anyOf": [
    {"type": "string", "minLength": 1},
    {"type": "array", "maxItems": _MAX_STOPS, "items": {"type": "string", "minLength": 1}},
    {"type": "null"}]})]
Bias = Annotated[dict[int, float], PlainValidator(_bias), WithJsonSchema({"anyOf": [
    {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,11}$"},
     "additionalProperties": {"type": "number"}},
    {"type": "null"}]})]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1024, fail_fast=True)]


class StreamOptions(Strict):
    """include_usage: end the stream with a chunk that has no choices but the usage;
    continuous_usage_stats: with it, every chunk has the usage so far."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: No | None = None

    @model_validator(mode="after")
    def _agree(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats may be true only with include_usage: true")
        return self


class StructuredOutputs(Strict):
    """The answer as a member of a language; exactly one of these.

    json_schema: a JSON schema; regex: the whole answer matches; choice: one of these texts;
    grammar: GBNF, or Lark as llguidance extends it.
    """

    json_schema: dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]],
                      Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name in ("json_schema", "regex", "choice", "grammar")
                 if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of json, regex, choice and grammar must be given, but "
                             f"there are {len(given)}")
        return self


class GenerationRequest(Strict):
    """What chats and completions have in common."""

    model: str | None = Field(None, description="Default the model that is served.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    logit_bias: Bias = Field({}, description="Token id to what is added to its logit.")
    seed: Annotated[int, Field(ge=-2**63, lt=2**64)] | None = None
    stop: Stop = ()
    user: str | None = Field(None, description="Whose request it is; the answer does not depend "
                                               "on it.")
    # beyond OpenAI's API
    top_k: Annotated[int, Field(ge=-1)] | None = Field(0, description="0 and -1: all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = 1.0
    min_tokens: Annotated[int, Field(ge=0)] | None = 0
    ignore_eos: bool | None = False
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = False
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = 0
    cache_salt: str | None = Field(None, description="Cached prefixes are shared only between "
                                                     "requests of the same salt.")
    # OpenAI's, and not here
    metadata: Absent
    store: No | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Absent
    prompt_cache_key: Absent
    use_beam_search: No | None = None

    @model_validator(mode="after")
    def _agree(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is given with whole answers only; leave stream out")
        return self


def _prompt(value: Any) -> list[str] | list[list[int]]:
    """One or several texts, or one or several lists of token ids, as a list."""
    prompts: Any = value
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        prompts = [value]
    if not isinstance(prompts, list):
        raise ValueError("it must be a string, a list of strings, a list of token ids or a list of "
                         "lists of token ids")
    if not prompts:
        raise ValueError("it is empty; give at least one token")
    kind = str if isinstance(prompts[0], str) else list
    for i, prompt in enumerate(prompts):
        if type(prompt) is not kind or (kind is list and not all(map(_is_id, prompt))):
            raise ValueError(f"prompt {i} is not a {'string' if kind is str else 'list of token '}"
                             f"{'' if kind is str else 'ids, integers from 0'}")
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give at least one token")
    return prompts


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
Prompt = Annotated[Any, PlainValidator(_prompt), WithJsonSchema({"anyOf": [
    _TEXT, {"type": "array", "minItems": 1, "items": _TEXT}, _IDS,
    {"type": "array", "minItems": 1, "items": _IDS}]})]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = Field(True, description="Begin a text as the tokenizer does.")

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of is {self.best_of} but cannot be less than n, {self.n or 1}")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise ValueError("best_of cannot be streamed: the best are known at the end")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs and echo with logprobs ask for the same; give one")
        return self
