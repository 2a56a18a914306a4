"""/v1/chat/completions: the prompt is the template's, the answer is the engine's, and whatever is
promised of its form holds."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kilter.serve.grammar import GrammarCompiler, GrammarError
from kilter.serve.params import GrammarSpec, SamplingParams
from kilter.serve.server.body import validate
from kilter.serve.server.errors import ApiError
from kilter.serve.server.messages import ChatRequest
from kilter.serve.server.tools import chat_grammar, tools_of
from kilter.serve.tool_parsers import ToolFormat
from tests.serve.server.conftest import CONTEXT, byte_tokenizer, ids_of
from tests.serve.server.test_completions import alone

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
          "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds",
                                           "parameters": NUMBER}},
         {"type": "function", "function": {"name": "now"}}]
CALL = {"hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "llama3": '{"name": "add", "parameters": {"a": 1}}'}
BETWEEN = {"hermes": "\n", "llama3": "; "}


def ask(client: httpx.Client, messages: Any = HELLO, **body: Any) -> dict[str, Any]:
    response = client.post(URL, json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client: httpx.Client, messages: Any = HELLO, **body: Any) -> list[dict[str, Any]]:
    response = client.post(URL, json={"messages": messages, "stream": True, **body})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def prompt_of(client: httpx.Client, messages: Any = HELLO, **body: Any) -> list[int]:
    return ask(client, messages, max_tokens=1, return_token_ids=True, **body)["prompt_token_ids"]


@pytest.mark.parametrize("body", [
    {"max_tokens": 6, "temperature": 0},
    {"max_completion_tokens": 6, "seed": 1, "n": 2},
    {"max_tokens": 6, "max_completion_tokens": 6, "seed": 1, "top_k": 5, "min_tokens": 6},
])
def test_an_answer_is_the_engines(client: httpx.Client, body: dict[str, Any]) -> None:
    got = ask(client, logprobs=True, top_logprobs=2, **body)
    params = {k: v for k, v in body.items() if not k.startswith("max")}
    expected = alone(byte_tokenizer().encode_chat(HELLO),
                     SamplingParams(max_tokens=6, logprobs=2, **params))
    for choice, result in zip(got["choices"], expected, strict=True):
        assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None}
        assert choice["finish_reason"] == result.finish_reason
        for entry, token in zip(choice["logprobs"]["content"], result.choices, strict=True):
            assert (bytes(entry["bytes"]), entry["logprob"]) == (
                byte_tokenizer().token_bytes(token.token_id), token.logprob)
            assert [(bytes(top["bytes"]), top["logprob"]) for top in entry["top_logprobs"]] == [
                (byte_tokenizer().token_bytes(t), value) for t, value in token.top]
    assert got["usage"]["completion_tokens"] == sum(len(r.tokens) for r in expected)


@pytest.mark.parametrize("body", [
    {"max_tokens": 20, "seed": 1, "n": 2},
    {"max_tokens": 20, "seed": 1, "logprobs": True, "top_logprobs": 1},
    {"max_tokens": 300, "seed": 2, "logprobs": True, "tools": TOOLS, "tool_choice": "required"},
    {"max_tokens": 40, "seed": 2, "tools": TOOLS, "tool_choice": "required", "n": 3},  # cut off
    {"max_tokens": 60, "seed": 3, "tools": TOOLS, "n": 2},
    {"max_tokens": 60, "seed": 4, "stop": ["CDC"], "logit_bias": {"70": 9, "71": 9}},
])
def test_a_stream_joined_is_the_whole_answer(client: httpx.Client, body: dict[str, Any]) -> None:
    body = {**body, "return_token_ids": True}
    whole = ask(client, **body)
    *news, last = chunks(client, **body, stream_options={"include_usage": True})
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in news)
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][key] == whole["usage"][key]
    assert news[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        parts = [c for chunk in news for c in chunk["choices"] if c["index"] == choice["index"]]
        first, *rest = parts
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert [p["finish_reason"] for p in parts] == [
            *[None] * (len(parts) - 1), choice["finish_reason"]]
        assert rest[-1]["delta"] == {}
        assert all(p["delta"].get("content") or p["delta"].get("tool_calls") for p in rest[:-1])
        content = "".join(p["delta"].get("content", "") for p in rest)
        calls: dict[int, dict[str, Any]] = {}
        for piece in (c for p in rest for c in p["delta"].get("tool_calls", ())):
            call = calls.setdefault(piece["index"], {"arguments": ""})
            if "id" in piece:
                assert piece["id"].startswith("call_") and piece["type"] == "function"
                call["name"] = piece["function"]["name"]
            call["arguments"] += piece["function"]["arguments"]
        said = [c["function"] for c in choice["message"].get("tool_calls", ())]
        if choice["finish_reason"] != "length":  # else the last call is half there
            assert list(calls.values()) == said
            assert content == (choice["message"]["content"] or "")
        assert [t for p in parts for t in p["token_ids"]] == choice["token_ids"]
        if choice["logprobs"] is not None:
            assert [entry for p in parts if p["logprobs"] for entry in p["logprobs"]["content"]
                    ] == choice["logprobs"]["content"]


def test_without_a_limit_an_answer_may_fill_the_context(client: httpx.Client) -> None:
    long = [{"role": "user", "content": "y" * (CONTEXT - 50)}]
    got = ask(client, long, ignore_eos=True, seed=1)
    assert got["usage"]["total_tokens"] == CONTEXT
    assert got["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("messages", "body", "same_as"), [
    ([{"role": "developer", "content": "be brief"}, *HELLO], {},
     [{"role": "system", "content": "be brief"}, *HELLO]),
    ([{"role": "user", "content": [{"type": "text", "text": "hel"},
                                   {"type": "text", "text": "lo"}]}], {}, HELLO),
    ([*HELLO, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
      {"role": "tool", "content": "2", "tool_call_id": "1"}], {},
     [*HELLO, {"role": "assistant", "content": "", "tool_calls": [
         {"function": {"name": "f", "arguments": {"a": 1}}, "id": "1", "type": "function"}]},
      {"role": "tool", "content": "2"}]),
    ([*HELLO, {"role": "assistant", "content": "hi", "refusal": None, "annotations": [],
               "audio": None, "function_call": None, "tool_calls": None}], {},
     [*HELLO, {"role": "assistant", "content": "hi"}]),
])
def test_messages_of_every_form_become_the_prompt(client: httpx.Client, messages: Any,
                                                  body: dict[str, Any], same_as: Any) -> None:
    assert prompt_of(client, messages, **body) == byte_tokenizer().encode_chat(same_as)


def test_the_template_gets_its_variables_and_tools(client: httpx.Client) -> None:
    plain = byte_tokenizer().encode_chat(HELLO)
    assert prompt_of(client, chat_template_kwargs={"shout": True}) == plain + ids_of("LOUD")
    assert prompt_of(client, add_generation_prompt=False) == byte_tokenizer().encode_chat(
        HELLO, add_generation_prompt=False)
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    with_tools = byte_tokenizer().encode_chat(HELLO, TOOLS)
    assert prompt_of(client, tools=TOOLS) == with_tools != plain
    assert prompt_of(client, tools=strict) == with_tools  # strict is for the server
    assert prompt_of(client, tools=TOOLS, tool_choice="none") == plain
    assert prompt_of(client, tools=[]) == plain
    tokens = client.post("/tokenize", json={"messages": HELLO, "tools": TOOLS}).json()
    assert tokens["tokens"] == with_tools and tokens["count"] == len(with_tools)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_asked_for_comes(client: httpx.Client, choice: Any) -> None:
    got = ask(client, tools=TOOLS, tool_choice=choice, seed=5, max_tokens=500,
              parallel_tool_calls=False)["choices"][0]
    assert got["finish_reason"] == "tool_calls" and got["message"]["content"] is None
    call, = got["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if choice != "required":
        assert call["function"]["name"] == "add"
    if call["function"]["name"] == "add":
        assert isinstance(arguments["a"], int)


@pytest.mark.parametrize(("format", "valid"), [
    ({"type": "json_object"}, lambda value: isinstance(value, dict)),
    ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": NUMBER}},
     lambda value: isinstance(value["a"], int)),
])
def test_an_answer_has_the_format_that_is_asked_for(client: httpx.Client, format: Any, valid: Any
                                                    ) -> None:
    bias = {str(ids_of(c)[0]): 4 for c in '{}"'}  # a random model would fill the context
    got = ask(client, response_format=format, seed=5, max_tokens=700, logit_bias=bias)["choices"][0]
    assert got["finish_reason"] == "stop"
    assert valid(json.loads(got["message"]["content"]))
    plain = ask(client, response_format={"type": "text"}, seed=5, max_tokens=5)
    assert plain["choices"] == ask(client, seed=5, max_tokens=5)["choices"]


def accepts(compiler: GrammarCompiler, spec: GrammarSpec, text: str) -> bool:
    try:
        return compiler.compile(spec).start(ids_of(text)).may_end
    except GrammarError:
        return False


def grammar_of(format: ToolFormat, **body: Any) -> GrammarSpec | None:
    request = validate(ChatRequest, {"messages": HELLO, "tools": TOOLS, **body})
    return chat_grammar(request, tools_of(request, format), format)


@pytest.mark.parametrize("format", ["hermes", "llama3"])
def test_what_may_be_text_or_calls_is_held_to_what_was_promised(format: ToolFormat) -> None:
    """Strict arguments, at most one call, and an answer of its own format."""
    compiler = GrammarCompiler(byte_tokenizer())
    call = CALL[format]
    two = call + BETWEEN[format] + call
    wrong = call.replace("1", '"one"')
    free = "1 < 2, <tool" if format == "hermes" else "say {"
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    assert grammar_of(format) is None  # nothing was promised
    held = grammar_of(format, tools=strict)
    assert held is not None
    for text, allowed in ((call, True), (two, True), (free, True), ("", True), (wrong, False)):
        assert accepts(compiler, held, text) == allowed, text
    single = grammar_of(format, parallel_tool_calls=False)
    assert single is not None
    for text, allowed in ((call, True), (two, False), (free, True), (wrong, False)):
        assert accepts(compiler, single, text) == allowed, text
    if format == "hermes":
        assert accepts(compiler, held, "so: " + call)
        assert not accepts(compiler, held, "so: " + wrong)
        both = grammar_of(format, response_format={"type": "json_object"})
        assert both is not None
        for text, allowed in (('{"b": 2}', True), (call, True), (free, False), (wrong, False)):
            assert accepts(compiler, both, text) == allowed, text
    else:
        with pytest.raises(ApiError, match="cannot be told from one"):
            grammar_of(format, response_format={"type": "json_object"})


def test_fingerprint_and_names(client: httpx.Client) -> None:
    got = ask(client, max_tokens=1, model="tiny")
    assert got["model"] == "tiny" and got["object"] == "chat.completion"
    assert got["system_fingerprint"].endswith("-weights-0")
    assert got["system_fingerprint"] == chunks(client, max_tokens=1)[0]["system_fingerprint"]
