"""Raw connections: what is no HTTP, headers that do not come or do not end, half bodies, HEAD."""

from __future__ import annotations

import json
import logging
import re
import socket
from typing import Any

import pytest

from kilter.serve.server import connection
from tests.serve.server.conftest import PATIENCE, Running, wait_for
from tests.serve.server.test_limits import idle, paused

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(server: Running) -> socket.socket:
    return socket.create_connection(server.listener.getsockname(), timeout=PATIENCE)


def accepted(server: Running, client: socket.socket) -> connection.Connection:
    """The server's end of a new connection, once it waits for headers."""
    def found() -> list[connection.Connection]:
        return [c for c in list(server.server.server_state.connections)
                if isinstance(c, connection.Connection) and c.client == client.getsockname()
                and c._deadline is not None]

    wait_for(lambda: found() != [])
    return found()[0]


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
    begin = b"GET /health HTTP/1.1\r\nx: "
    most = connection._BYTES
    with connect(server) as client:
        theirs = accepted(server, client)
        client.sendall(begin + b"a" * (most - len(begin)))
        wait_for(lambda: theirs._waiting == most)
        client.sendall(b"a")  # goes beyond, byte by byte: nothing comes after what is refused
        wait_for(lambda: theirs._waiting == most + 1)
        client.sendall(b"a")
        assert error_in(read_all(client), 431)["code"] == "headers_too_large"


def test_a_connection_that_asks_nothing_is_closed(
        server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(server) as client:
        accepted(server, client)  # so it has the usual time for the first byte
        monkeypatch.setattr(connection, "_TIME", 0.02)
        client.sendall(b"GET /hea")
        assert read_all(client) == b""
    assert exchange(server) == b""


def test_a_connection_whose_answer_takes_longer_than_headers_may_is_kept(
        server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"prompt": "x", "max_tokens": 3, "ignore_eos": true}'
    real, late = connection.Connection._late, []

    def watched(self: connection.Connection) -> None:
        late.append(self)
        real(self)

    monkeypatch.setattr(connection.Connection, "_late", watched)
    with connect(server) as client, paused(server):
        theirs = accepted(server, client)
        monkeypatch.setattr(connection, "_TIME", 0.02)
        client.sendall(POST + b"Content-Length: %d\r\n\r\n%bGET /hea" % (len(body), body))
        wait_for(lambda: late.count(theirs) >= 3)
        server.context.engine.resume()
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
                      server.get("/metrics").text)


def test_head_is_get_without_the_body(server: Running) -> None:
    wait_for(lambda: idle(server))  # /health counts steps
    with server.client() as client:
        for path in ("/health", "/v1/models", "/"):
            whole, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == whole.headers["content-length"]
        assert client.head("/v1/completions").status_code == 405


def test_a_compressed_body_is_refused(server: Running) -> None:
    with server.client(headers={"Content-Encoding": "gzip"}) as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
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
