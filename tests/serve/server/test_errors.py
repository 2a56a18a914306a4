"""Errors: every one in OpenAI's shape and with the parameter to blame, and nobody else hurt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kilter.serve.server import completions
from kilter.serve.server.errors import ApiError, to_json
from tests.serve.server.conftest import CONTEXT, Running, StartServer

HELLO = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(response: httpx.Response, status: int, kind: str = "invalid_request_error"
             ) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == kind and error["message"].endswith(".")
    return error


@pytest.mark.parametrize(("path", "body", "param"), [
    *[(CHAT, {name: value}, name) for name, value in [
        ("audio", {"voice": "x"}), ("store", True), ("store", 0), ("metadata", {"a": "b"}),
        ("modalities", ["text", "audio"]), ("service_tier", "flex"), ("prediction", {}),
        ("reasoning_effort", "low"), ("web_search_options", {}), ("functions", []),
        ("function_call", "auto"), ("verbosity", "low"), ("safety_identifier", "u"),
        ("prompt_cache_key", "k"), ("use_beam_search", True), ("priority", 1), ("best_of", 2),
        ("suffix", "x"), ("echo", True), ("no_such_thing", None),
        ("temperature", "hot"), ("temperature", True), ("n", 0), ("n", 1.5), ("top_p", 1.1),
        ("logit_bias", {"x": 1}), ("logit_bias", {"1": "x"}), ("logit_bias", []),
        ("stop", ["a", 1]), ("stop", [""]), ("stop", {}), ("top_logprobs", 21), ("seed", 1.0),
        ("max_tokens", -1), ("stream", "yes"), ("tools", {}), ("tool_choice", "maybe")]],
    (COMPLETIONS, {"suffix": "end"}, "suffix"), (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"response_format": {"type": "text"}}, "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
     "response_format.json_schema.name"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "nonsense"}}}}, "response_format"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "nonsense"}}}}}],
        "tool_choice": "required"}, "tools"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    (CHAT, {"stream": True, "stream_options": {"include_usages": True}},
     "stream_options.include_usages"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (COMPLETIONS, {"structured_outputs": {"regex": "(("}}, "structured_outputs"),
])
def test_what_is_not_supported_is_named(client: httpx.Client, path: str, body: dict[str, Any],
                                        param: str) -> None:
    base = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    error = error_of(client.post(path, json={**base, **body}), 400)
    # A second problem of the same field may come first in its place.
    assert error["param"] == param or (error["param"] or "").startswith(param + ".")


@pytest.mark.parametrize("body", [
    {"stream_options": {"include_usage": True}}, {"top_logprobs": 2},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"max_tokens": 1, "max_completion_tokens": 2}, {"tool_choice": "required"},
    {"stream": True, "prompt_logprobs": 1}, {"min_tokens": 5, "max_tokens": 4},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    {"structured_outputs": {}}, {"structured_outputs": {"regex": "a", "choice": ["a"]}},
])
def test_what_does_not_go_together_is_refused(client: httpx.Client, body: dict[str, Any]) -> None:
    error_of(client.post(CHAT, json={"messages": HELLO, **body}), 400)


def test_values_that_ask_for_nothing_are_taken(client: httpx.Client) -> None:
    nothing = {"audio": None, "store": False, "metadata": None, "modalities": ["text"],
               "service_tier": "auto", "prediction": None, "reasoning_effort": None,
               "functions": None, "parallel_tool_calls": True, "tools": None, "tool_choice": None,
               "logit_bias": None, "stop": None, "seed": None, "user": "somebody", "n": None,
               "temperature": None, "top_p": None, "stream": None, "stream_options": None,
               "response_format": None, "use_beam_search": False, "priority": 0}
    response = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **nothing})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), ("hello", "messages"), ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([*HELLO, {"role": "robot", "content": "x"}], "messages.1"),
    ([{"role": "user", "content": "x", "mood": "good"}], "messages.0.mood"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     "messages.0.content"),
    ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id"),
    ([*HELLO, {"role": "system", "content": "late"}], "messages"),  # the template's own objection
])
def test_bad_messages_are_refused_where_they_are(client: httpx.Client, messages: Any, param: str
                                                 ) -> None:
    assert error_of(client.post(CHAT, json={"messages": messages}), 400)["param"] == param


def test_a_templates_objection_is_passed_on(client: httpx.Client) -> None:
    late = [*HELLO, {"role": "system", "content": "late"}]
    error = error_of(client.post(CHAT, json={"messages": late}), 400)
    assert "the system message must come first" in error["message"]


@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"prompt": "a" * CONTEXT}), (COMPLETIONS, {"prompt": "a" * 10 * CONTEXT}),
    (COMPLETIONS, {"prompt": [3] * (CONTEXT + 1), "max_tokens": 0}),
    (CHAT, {"messages": [{"role": "user", "content": "a" * CONTEXT}]}),
    (COMPLETIONS, {"prompt": "a" * CONTEXT, "stream": True})])
def test_a_prompt_without_room_for_an_answer(client: httpx.Client, path: str, body: dict[str, Any]
                                             ) -> None:
    error = error_of(client.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded" and str(CONTEXT) in error["message"]


def test_megabytes_are_refused_by_their_beginning(
        server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = server.context.tokenizer.encode, []
    monkeypatch.setattr(server.context.tokenizer, "encode", lambda text, *args, **options: (
        seen.append(len(text)), real(text, *args, **options))[1])
    for path, body in ((COMPLETIONS, {"prompt": "a" * 1_000_000}),
                       (CHAT, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
                       ("/v1/embeddings", {"input": ["a", "a" * 1_000_000]})):
        error = error_of(client.post(path, json=body), 400)
        assert error["code"] == "context_length_exceeded" and "more than" in error["message"]
    assert 1000 < max(seen) <= 70_000
    tokens = client.post("/tokenize", json={"prompt": "a" * 100_000}).json()
    assert tokens["count"] == 100_000  # to count is no reason to refuse


def test_unknown_places_methods_and_models(client: httpx.Client) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(client.get(COMPLETIONS + "/"), 404)
    refused = client.get(COMPLETIONS)
    assert error_of(refused, 405)["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "POST"
    for response in (client.post(COMPLETIONS, json={"model": "other", "prompt": "x"}),
                     client.get("/v1/models/other"),
                     client.post("/tokenize", json={"model": "other", "prompt": "x"})):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert client.get("/v1/models/tiny").json()["max_model_len"] == CONTEXT
    assert client.get("/docs").status_code == 404  # would load scripts from elsewhere


def test_a_body_must_say_that_it_is_json(client: httpx.Client) -> None:
    """Else any web page could post here: a form needs no leave to."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        error_of(client.post(COMPLETIONS, content=b'{"prompt": "x"}',
                             headers={"content-type": kind}), 415)
    assert client.post(COMPLETIONS, content=b'{"prompt": "x", "max_tokens": 1}', headers={
        "content-type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_a_body_is_refused_before_it_is_read(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=2000)
    big = b'{"prompt": "' + b"x" * 3000 + b'"}'

    def pieces() -> Iterator[bytes]:
        yield from (big[i:i + 500] for i in range(0, len(big), 500))

    with server.client(headers={"content-type": "application/json"}) as client:
        for content in (big, pieces()):  # with a Content-Length, and in chunks
            response = client.post(COMPLETIONS, content=content)
            assert error_of(response, 413)["code"] == "request_too_large"
        exact = b'{"prompt": "x", "max_tokens": 1' + b" " * 1968 + b"}"
        assert len(exact) == 2000
        assert client.post(COMPLETIONS, content=exact).status_code == 200


def test_the_api_key(start_server: StartServer) -> None:
    server = start_server(api_key="secret", cors_origins=("https://page.example",))
    with server.client() as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"},
                        {"authorization": "Bearer secret "[:-2]}):
            for path in ("/v1/models", "/metrics", "/state", "/nothing"):
                response = client.get(path, headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200
        assert client.get("/").status_code == 200  # the page asks for the key itself
        right = {"authorization": "Bearer secret", "origin": "https://page.example"}
        response = client.get("/v1/models", headers=right)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        preflight = client.options(CHAT, headers={
            "origin": "https://page.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type"})
        assert preflight.status_code == 200
        elsewhere = client.options(CHAT, headers={
            "origin": "https://other.example", "access-control-request-method": "POST"})
        assert elsewhere.status_code == 400


def test_without_cors_no_origin_is_let_in(client: httpx.Client) -> None:
    response = client.get("/v1/models", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_a_bug_is_a_500_and_an_error_event(server: Running, client: httpx.Client,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("an inner secret")

    with monkeypatch.context() as patch:
        patch.setattr(completions.CompletionExchange, "whole", broken)
        error = error_of(client.post(COMPLETIONS, json={"prompt": "x"}), 500, "server_error")
        assert "secret" not in error["message"]
        patch.setattr(completions.CompletionExchange, "chunk", broken)
        response = client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
        assert response.status_code == 200 and "[DONE]" not in response.text
        said = json.loads(response.text.removeprefix("data: "))
        assert said["error"]["code"] == "internal_error" and "secret" not in response.text
    assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.context.admission.unfinished == 0


def test_a_step_that_fails_is_a_500_for_those_in_it(start_server: StartServer,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of memory, say")

    with server.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.executor, "run", broken)
            error_of(client.post(COMPLETIONS, json={"prompt": "x"}), 500, "server_error")
            events = client.post(COMPLETIONS, json={"prompt": "x", "stream": True}).text
            assert json.loads(events.removeprefix("data: "))["error"]["type"] == "server_error"
        assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_grammar_outweighs_any_bias(client: httpx.Client) -> None:
    """The two together always leave a token: no request can end an answer in the middle so."""
    body = {"prompt": "x", "structured_outputs": {"regex": "aaab"}, "max_tokens": 9,
            "logit_bias": {str(3 + ord("b")): -1e30}}
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "aaab"


def test_error_texts_may_hold_anything() -> None:
    """A lone surrogate came as an escape and goes as one."""
    body = to_json(ApiError(400, "It says '\ud800'.").body())
    assert json.loads(body)["error"]["message"] == "It says '\ud800'."
    body.decode("utf-8")
