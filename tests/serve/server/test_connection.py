"""Raw connections: what is no HTTP, headers that do not come or do not end, half bodies, HEAD."""

from __future__ import annotations

import json
import logging
import re
import socket
from typing import Any

import httpx
import pytest

from kilter.serve.server import connection
from tests.serve.server.conftest import Running
from tests.serve.server.test_limits import idle, paused, wait_for

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(server: Running) -> socket.socket:
    return socket.create_connection(server.listener.getsockname(), timeout=30)


def exchange(server: Running, *parts: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with connect(server) as client:
        for part in parts:
            client.sendall(part)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def error_in(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello there\r\n\r\n",
                                  b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                                  POST + b"Content-Length: -5\r\n\r\n",
                                  POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"])
def test_what_is_no_http_is_answered_like_any_error(server: Running, data: bytes) -> None:
    assert error_in(exchange(server, data), 400)["code"] == "not_http"


def test_headers_without_end_are_refused(server: Running) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        wait_for(lambda: waiting(server) > 0)  # else all may come at once
        client.sendall(b"x: " + b"a" * 70_000)
        wait_for(lambda: waiting(server) > 70_000)
        client.sendall(b"a")
        assert error_in(read_all(client), 431)["code"] == "headers_too_large"


def waiting(server: Running) -> int:
    """Bytes of the longest headers that are not whole."""
    return max((c._waiting for c in list(server.server.server_state.connections)
                if isinstance(c, connection.Connection)), default=0)


def test_a_connection_that_asks_nothing_is_closed(
        server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TIME", 0.02)
    assert exchange(server) == b""
    assert exchange(server, b"GET /hea") == b""
    # Not one whose answer takes longer than headers may.
    body = b'{"prompt": "x", "max_tokens": 300, "ignore_eos": true}'
    with connect(server) as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n%bGET /hea" % (len(body), body))
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_within_its_body_is_no_failure(
        server: Running, caplog: pytest.LogCaptureFixture) -> None:
    before = metric(server)
    with caplog.at_level(logging.INFO, "kilter.server"):
        for path in (b"/v1/completions", b"/v1/embeddings", b"/tokenize"):
            with connect(server) as client:
                client.sendall(POST.replace(b"/v1/completions", path)
                               + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # it is being waited for
                client.sendall(b'{"prompt"')
        wait_for(lambda: not server.server.server_state.tasks and idle(server))
    assert not caplog.records and metric(server) == before


def metric(server: Running) -> list[str]:
    return re.findall(r"(?m)^kilter_re(?:jected|quests)_total.*$",
                      httpx.get(server.base_url + "/metrics").text)


def test_head_is_get_without_the_body(server: Running) -> None:
    for path in ("/health", "/v1/models", "/"):
        whole = httpx.get(server.base_url + path)
        head = httpx.head(server.base_url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert httpx.head(server.base_url + "/v1/completions").status_code == 405


def test_a_compressed_body_is_refused(server: Running) -> None:
    answer = httpx.post(server.base_url + "/v1/completions", json={"prompt": "x"},
                        headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]


def test_all_answers_of_a_step_are_sent_at_once(server: Running) -> None:
    """Each write is an HTTP chunk: with n equal answers every one has the same of all of them."""
    body = json.dumps({"prompt": ["ab", "ab"], "n": 3, "temperature": 0, "max_tokens": 8,
                       "ignore_eos": True, "stream": True, "return_token_ids": True}).encode()
    with paused(server), connect(server) as client:  # until all of them can begin together
        client.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
                       % (len(body), body))
        wait_for(lambda: server.context.engine.stats.waiting == 6)
        server.context.engine.resume()
        answer = read_all(client).partition(b"\r\n\r\n")[2]
    writes = []
    while answer:
        size, _, answer = answer.partition(b"\r\n")
        writes.append(answer[:int(size, 16)])
        answer = answer[int(size, 16) + 2:]
    assert writes.pop() == b""
    seen = 0
    for write in writes:
        events = [json.loads(event) for event in re.findall(rb"(?m)^data: ({.*})$", write)]
        tokens: dict[int, list[int]] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert sorted(tokens) == list(range(6))
        assert len({tuple(ids) for ids in tokens.values()}) == 1
        seen += len(tokens[0])
    assert seen == 8
