"""Hundreds of broken requests: each is a 4xx in OpenAI's error shape, and nothing else notices.

Bodies are written as raw JSON text, so that what no JSON library would write (NaN, 1e999, cut
bodies, broken UTF-8) is sent as it is.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.server.conftest import PATIENCE, Running, StartServer

HUGE = "1" * 400
HEALTHY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/embeddings": {"input": "ab"},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [3, 4]},
}

# ---- wrong values, field by field: raw JSON ----

COUNT = ['"3"', "-1", "1.5", "[1]", "{}", "1e999", "NaN", HUGE, "true"]
NUMBER = ['"1"', "[0.5]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400,
          "true"]
FLAG = ['"yes"', "2", "[]", "{}"]
SAMPLING: dict[str, list[str]] = {
    "model": ["7", "[]", "{}", '""', '"some-other-model"', '"\\u0000"'],
    "max_tokens": COUNT,
    "temperature": [*NUMBER, "-0.5"],
    "top_p": [*NUMBER, "-0.1", "1.5"],
    "top_k": ['"3"', "1.5", "[]", "1e999"],
    "min_p": [*NUMBER, "-0.1", "1.5"],
    "n": ['"3"', "0", "-1", "1.5", "129", "1000000", HUGE, "[]", "{}"],
    "seed": ['"x"', "1.5", "[]", "{}", "1e999", HUGE],
    "stop": ["7", "{}", "[7]", "[null]", '[["a"]]', '""', '["a", ""]', "true"],
    "stop_token_ids": ["7", '"a"', '["a"]', "[-1]", "[1000000]", "[1.5]", f"[{HUGE}]"],
    "min_tokens": COUNT,
    "ignore_eos": FLAG,
    "presence_penalty": [*NUMBER, "2.5", "-2.5"],
    "frequency_penalty": [*NUMBER, "2.5", "-2.5"],
    "repetition_penalty": [*NUMBER, "0", "-1"],
    "logit_bias": ["7", "[]", '"a"', '{"a": 1}', '{"-1": 1}', '{"1000000": 1}', '{"3": "x"}',
                   '{"3": null}', '{"3": NaN}', '{"3": 1e999}', '{"1.5": 1}', f'{{"{HUGE}": 1}}'],
    "stream": ['"yes"', "2", "[]", "{}"],
    "stream_options": ["7", "[]", '"a"', '{"include_usage": 7}', '{"include_usage": true}'],
    "user": ["7", "[]", "{}"],
    "no_such_field": ["1", "[]", '"x"'],
    "ＭＯＤＥＬ": ['"x"'],
}
FIELDS: dict[str, dict[str, list[str]]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": [
            "null", "7", '"hi"', "{}", "[]", "[7]", "[null]", "[[]]", "[{}]", '[{"role": "user"}]',
            '[{"content": "x"}]', '[{"role": 7, "content": "x"}]', '[{"role": "", "content": "x"}]',
            '[{"role": "king", "content": "x"}]', '[{"role": "user", "content": 7}]',
            '[{"role": "user", "content": {}}]', '[{"role": "user", "content": [7]}]',
            '[{"role": "user", "content": [{"type": "text"}]}]',
            '[{"role": "user", "content": [{"type": "text", "text": 7}]}]',
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
            '[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]',
            '[{"role": "user", "content": "\\ud800"}]',
            '[{"role": "user", "content": "a\\udc00b"}]',
            '[{"role": "assistant", "content": null, "tool_calls": 7}]',
            '[{"role": "assistant", "content": null, "tool_calls": [7]}]',
            '[{"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]}]',
            '[{"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function",'
            ' "function": {"name": "f", "arguments": "{"}}]}]',
            '[{"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function",'
            ' "function": {"name": 7, "arguments": "{}"}}]}]',
            "[" * 300 + "]" * 300,
        ],
        "max_completion_tokens": COUNT,
        "logprobs": ["7", '"a"', "[]", "{}"],
        "top_logprobs": ["3", '"3"', "-1", "1.5", "[]"],
        "tools": ["7", "{}", '"a"', "[7]", "[{}]", '[{"type": "function"}]',
                  '[{"type": "retrieval"}]', '[{"type": "function", "function": {}}]',
                  '[{"type": "function", "function": {"name": 7}}]',
                  '[{"type": "function", "function": {"name": "a b"}}]',
                  '[{"type": "function", "function": {"name": "f", "parameters": 7}}]'],
        "tool_choice": ["7", "[]", '"perhaps"', '"required"', "{}",
                        '{"type": "function", "function": {"name": "f"}}'],
        "response_format": [
            "7", "[]", '"json"', "{}", '{"type": 7}', '{"type": "xml"}', '{"type": "json_schema"}',
            '{"type": "json_schema", "json_schema": {}}',
            '{"type": "json_schema", "json_schema": {"name": "a", "schema": 7}}',
            '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}',
            '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/x"}}}',
            '{"type": "json_schema", "json_schema": {"name": "a", "schema": '
            + '{"not": ' * 500 + "{}" + "}" * 500 + "}}"],
        "functions": ['[{"name": "f"}]'],
        "audio": ['{"voice": "alloy"}'],
    },
    "/v1/completions": {
        **SAMPLING,
        "prompt": ["7", "{}", "true", '""', "[]", '[""]', "[[]]", "[null]", "[1.5]", "[-1]",
                   "[1000000]", f"[{HUGE}]", '["a", 7]', "[[3], 4]", "[[[3]]]", '[["a"]]', "[true]",
                   '"\\ud800"', '["ok", "\\udfff"]', json.dumps("a" * 20_000)],
        "suffix": ['"x"'],
        "echo": FLAG,
        "best_of": ['"3"', "0", "-1", "1.5", "129", HUGE, "[]"],
        "logprobs": ['"3"', "-1", "1.5", "[]", "1000000", HUGE],
    },
    "/v1/embeddings": {
        "model": SAMPLING["model"],
        "input": ["null", "7", "{}", "true", '""', "[]", '[""]', "[[]]", "[null]", "[1.5]", "[-1]",
                  "[1000000]", f"[{HUGE}]", '["a", 7]', "[[3], 4]", '"\\ud800"',
                  json.dumps("a" * 20_000)],
        "encoding_format": ["7", '"hex"', "[]"],
        "dimensions": ['"3"', "0", "-1", "1.5", "1000000", "[]"],
        "no_such_field": ["1"],
    },
    "/tokenize": {
        "prompt": ["7", "[]", "{}", "null", '"\\ud800"'],
        "no_such_field": ["1"],
    },
    "/detokenize": {
        "tokens": ["null", "7", '"a"', "{}", '["a"]', "[-1]", "[1000000]", "[1.5]", f"[{HUGE}]",
                   "[[3]]", "[null]"],
        "no_such_field": ["1"],
    },
}

# Together with another field only: what is wrong is that they do not go together.
TOGETHER = [
    ("/v1/completions", '{"prompt": "ab", "n": 3, "best_of": 2}'),
    ("/v1/completions", '{"prompt": "ab", "max_tokens": 2, "min_tokens": 5}'),
    ("/v1/completions", '{"prompt": "ab", "stream": true, "best_of": 2}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2, '
                             '"logprobs": false}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, '
                             '"max_completion_tokens": 3}'),
]

# ---- bodies that are no request at all ----

WHOLE: dict[str, bytes] = {
    "empty": b"",
    "blanks": b"  \n ",
    "null": b"null",
    "a number": b"7",
    "a text": b'"prompt"',
    "a list": b"[]",
    "a list of requests": b'[{"prompt": "a"}]',
    "an empty object": b"{}",
    "no JSON": b"prompt=ab&max_tokens=2",
    "NUL bytes": b"\0" * 20,
    "a NUL in JSON": b'{"model": "\0"}',
    "bad UTF-8": b'{"model": "\xff\xfe"}',
    "overlong UTF-8": b'{"model": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"model": "\xed\xa0\x80"}',
    "cut UTF-8": b'{"model": "\xe2\x82',
    "UTF-16": '{"model": "x"}'.encode("utf-16"),
    "single quotes": b"{'model': 'x'}",
    "a trailing comma": b'{"model": "x",}',
    "two objects": b'{"model": "x"}{"model": "x"}',
    "a comment": b'{"model": "x" /* the model */}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "closed deep lists": b"[" * 100_000 + b"]" * 100_000,
    "a long number": b"9" * 100_000,
    "a bare NaN": b"NaN",
    "a lone bracket": b"{",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
}


def raw_body(path: str, field: str, value: str, model: str) -> bytes:
    """The endpoint's healthy body with one field replaced by raw JSON."""
    fields = {"model": model, **HEALTHY[path]}
    if path in ("/tokenize", "/detokenize"):
        del fields["model"]
    parts = {name: json.dumps(content) for name, content in fields.items()}
    parts[field] = value
    return ("{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {text}"
                            for name, text in parts.items()) + "}").encode()


CASES = [(path, field, value) for path, fields in FIELDS.items() for field, values in fields.items()
         for value in values]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(client: httpx.Client, path: str, body: bytes, **headers: str) -> httpx.Response:
    return client.post(path, content=body, headers={"content-type": "application/json", **headers})


def assert_refused(response: httpx.Response) -> dict[str, Any]:
    """A 4xx whose body is OpenAI's error and says something; returns the error."""
    assert 400 <= response.status_code < 500, (response.status_code, response.text[:300])
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str) and len(error["message"]) > 10
    assert len(error["message"]) < 3000, "the whole body came back"
    assert isinstance(error["type"], str) and error["type"]
    assert error["param"] is None or isinstance(error["param"], str)
    return error


def assert_healthy(client: httpx.Client, server: Running) -> None:
    response = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 1


def test_there_are_enough() -> None:
    assert len(CASES) + len(TOGETHER) + len(WHOLE) * len(HEALTHY) >= 200
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize("path", HEALTHY)
def test_the_bodies_that_are_broken_below_are_healthy_as_they_are(
        client: httpx.Client, server: Running, path: str) -> None:
    body = raw_body(path, "model", json.dumps(server.config.served_name), server.config.served_name)
    if path in ("/tokenize", "/detokenize"):
        body = json.dumps(HEALTHY[path]).encode()
    assert post(client, path, body).status_code == 200


@pytest.mark.parametrize(("path", "field", "value"), CASES,
                         ids=[f"{p}-{f}-{v[:30]}" for p, f, v in CASES])
def test_a_wrong_value_is_refused(client: httpx.Client, server: Running, path: str, field: str,
                                  value: str) -> None:
    assert_refused(post(client, path, raw_body(path, field, value, server.config.served_name)))
    assert_healthy(client, server)


@pytest.mark.parametrize(("path", "body"), TOGETHER)
def test_values_that_do_not_go_together_are_refused(client: httpx.Client, server: Running,
                                                    path: str, body: str) -> None:
    whole = json.dumps({**json.loads(body), "model": server.config.served_name}).encode()
    assert_refused(post(client, path, whole))
    assert_healthy(client, server)


@pytest.mark.parametrize("path", HEALTHY)
@pytest.mark.parametrize("what", WHOLE)
def test_a_body_that_is_no_request_is_refused(client: httpx.Client, server: Running, path: str,
                                              what: str) -> None:
    assert_refused(post(client, path, WHOLE[what]))
    assert_healthy(client, server)


@pytest.mark.parametrize("path", HEALTHY)
def test_a_body_cut_anywhere_is_refused(client: httpx.Client, server: Running, path: str) -> None:
    body = raw_body(path, "user", '"é"', server.config.served_name)
    for end in range(0, len(body) - 1, 3):
        assert_refused(post(client, path, body[:end]))
    assert_healthy(client, server)


@pytest.mark.parametrize("path", HEALTHY)
@pytest.mark.parametrize("content_type", [
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/xml", "image/png", "application/json; charset=utf-16"])
def test_another_content_type_is_refused(client: httpx.Client, server: Running, path: str,
                                         content_type: str) -> None:
    body = raw_body(path, "model", json.dumps(server.config.served_name), server.config.served_name)
    assert_refused(post(client, path, body, **{"content-type": content_type}))
    assert_healthy(client, server)


@pytest.mark.parametrize("path", HEALTHY)
def test_a_key_that_comes_twice_is_refused(client: httpx.Client, server: Running, path: str
                                           ) -> None:
    """Which of the two was meant cannot be known."""
    body = raw_body(path, "model", json.dumps(server.config.served_name), server.config.served_name)
    field = next(iter(HEALTHY[path]))
    twice = body[:-1] + f', "{field}": {json.dumps(HEALTHY[path][field])}}}'.encode()
    error = assert_refused(post(client, path, twice))
    assert field in error["message"]
    assert_healthy(client, server)


@pytest.mark.parametrize("path", HEALTHY)
def test_an_overlong_body_is_refused(client: httpx.Client, server: Running, path: str) -> None:
    response = post(client, path, b'{"prompt": "' + b"a" * server.config.max_body_bytes + b'"}')
    assert response.status_code == 413
    assert_refused(response)
    assert_healthy(client, server)


@pytest.mark.parametrize("path", ["update_weights", "flush_cache", "pause", "resume"])
def test_who_runs_the_server_is_told_too(start_server: StartServer, path: str) -> None:
    server = start_server(admin=True)
    wrong = [body for what, body in WHOLE.items()
             if path == "update_weights" or what != "an empty object"]
    wrong += [b'{"path": 7}', b'{"path": ""}', b'{"path": "/no/such/model"}',
              b'{"path": "\\u0000"}', b'{"path": "x", "in_flight": "perhaps"}',
              b'{"path": "x", "more": 1}', b'{"path": "\\ud800"}',
              b'{"path": "%s"}' % (b"a/" * 5000)]
    with server.client() as client:
        for body in wrong:
            assert_refused(post(client, f"/admin/{path}", body))
        assert client.get("/admin/stats").json()["paused"] is False
        assert_healthy(client, server)


# ---- below HTTP libraries ----

def address_of(server: Running) -> tuple[str, int]:
    url = httpx.URL(server.base_url)
    return url.host, url.port or 80


def exchange(server: Running, data: bytes, *, close: bool = False) -> bytes:
    """Sends bytes; returns all that comes back until the server closes or says no more."""
    with socket.create_connection(address_of(server), timeout=PATIENCE) as connection:
        connection.sendall(data)
        if close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json",
                        "Connection: close", *lines, "", ""]).encode()


@pytest.mark.parametrize("path", HEALTHY)
def test_an_overlong_body_in_chunks_is_refused_before_it_ends(
        client: httpx.Client, server: Running, path: str) -> None:
    """No length is announced and the body has no end: the server must not wait for one."""
    pieces, rest = divmod(server.config.max_body_bytes, 0x10000)
    assert rest == 0
    # One byte too many comes last, so that all of it is read: else the answer may be lost in a
    # reset.
    answer = exchange(server, head(path, "Transfer-Encoding: chunked")
                      + (b"10000\r\n" + b"a" * 0x10000 + b"\r\n") * pieces + b"1\r\na")
    assert answer.startswith(b"HTTP/1.1 413 ") and b'"error"' in answer
    assert_healthy(client, server)


@pytest.mark.parametrize("path", HEALTHY)
def test_a_length_that_is_too_large_is_refused_before_the_body(
        client: httpx.Client, server: Running, path: str) -> None:
    answer = exchange(server, head(path, "Content-Length: 99999999999"))
    assert answer.startswith(b"HTTP/1.1 413 ") and b'"error"' in answer
    assert_healthy(client, server)


@pytest.mark.parametrize("data", [
    head("/v1/completions", "Content-Length: 100") + b'{"prompt": "a',
    head("/v1/completions", "Transfer-Encoding: chunked") + b'5\r\n{"pro\r\n',
    head("/v1/completions", "Transfer-Encoding: chunked"),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    b"\r\n\r\n",
    b"\0" * 100,
    b"GET / HTTP/9.9\r\n\r\n",
    head("/v1/completions", "Content-Length: -5"),
    head("/v1/completions", "Content-Length: x"),
    head("/v1/completions", "Transfer-Encoding: chunked") + b"zz\r\n",
])
def test_who_leaves_in_the_middle_leaves_nothing(client: httpx.Client, server: Running,
                                                 data: bytes) -> None:
    answer = exchange(server, data, close=True)
    assert not answer or answer[9:10] == b"4"
    assert_healthy(client, server)


def test_a_body_that_never_ends_holds_up_nobody(client: httpx.Client, server: Running) -> None:
    with socket.create_connection(address_of(server)) as connection:
        connection.sendall(head("/v1/completions", "Transfer-Encoding: chunked"))
        for _ in range(5):
            connection.sendall(b'5\r\n{"pro\r\n')
            assert_healthy(client, server)
    assert_healthy(client, server)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", HEALTHY)
def test_another_method_is_refused(client: httpx.Client, path: str, method: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert_refused(response)


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1", "/v1/chat", "/v2/completions",
                                  "/v1/models/none", "/%00", "/..%2f..%2fetc/passwd", "/v1/files"])
def test_a_path_that_is_not_there_is_404(client: httpx.Client, path: str) -> None:
    response = client.post(path, json={}) if path != "/v1/models/none" else client.get(path)
    assert response.status_code == 404
    assert_refused(response)
