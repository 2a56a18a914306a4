"""Limits: the queue is bounded, time is, a client that leaves frees its place, and one that reads
slowly holds up nobody."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kilter.serve.server import limits, stream
from kilter.serve.server.errors import ApiError
from kilter.serve.server.limits import Admission
from tests.serve.server.conftest import PATIENCE, Running, StartServer, make_engine, wait_for
from tests.serve.server.test_server_cases import slow_steps

URL, CHAT = "/v1/completions", "/v1/chat/completions"


@contextmanager
def paused(server: Running) -> Iterator[None]:
    """The engine takes requests and does nothing with them."""
    server.context.engine.pause()
    try:
        yield
    finally:
        server.context.engine.resume()


@contextmanager
def raw_post(server: Running, body: dict[str, object], buffers: int | None = None
             ) -> Iterator[socket.socket]:
    """A connection that has sent a request and read nothing.

    buffers: bytes that the kernel keeps for it, and for each later connection of this server.
    """
    data = json.dumps(body).encode()
    path = URL if "prompt" in body else CHAT
    with socket.socket() as connection:
        if buffers is not None:
            server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
        connection.settimeout(PATIENCE)
        connection.connect(server.listener.getsockname())
        connection.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
        yield connection


def idle(server: Running) -> bool:
    stats = server.context.engine.stats
    return server.context.admission.unfinished == 0 and stats.running + stats.waiting == 0


def ended(server: Running, outcome: str) -> int:
    """How many requests have ended so."""
    found = re.search(rf'kilter_requests_total{{endpoint="completions",outcome="{outcome}"}} (\d+)',
                      server.get("/metrics").text)
    return 0 if found is None else int(found[1])


def test_admission_counts_answers() -> None:
    admission = Admission(running=2, waiting=3)
    with admission.enter() as one, admission.enter(2):
        one.grow(3)
        assert admission.unfinished == 5
        with pytest.raises(ApiError) as full:
            admission.enter()
        assert full.value.status == 429 and int(full.value.headers["Retry-After"]) >= 1
        with pytest.raises(ApiError) as impossible:  # however long it waited
            one.grow(6)
        assert impossible.value.status == 400
        assert admission.unfinished == 5
    assert admission.unfinished == 0
    admission.draining = True
    with pytest.raises(ApiError) as stopping:
        admission.enter()
    assert stopping.value.status == 503 and stopping.value.headers["Connection"] == "close"


def test_the_wait_is_guessed_by_how_fast_answers_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = Admission(running=1, waiting=9)
    now = 100.0
    # The module's clock alone: every event loop of this process goes by the real one.
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now))
    assert admission.retry_after(5) == 1  # nothing is known yet
    for _ in range(10):
        ticket = admission.enter()
        now += 2
        ticket.close()
        ticket.close()  # once more does nothing
    kept = admission.enter(10)
    assert admission.retry_after(3) == 6  # three have to end first, one ends in 2 s (18 s / 10)
    assert admission.retry_after(1000) == 60
    kept.close()


def test_waiting_for_the_last_answer() -> None:
    async def main() -> None:
        admission = Admission(1, 1)
        await admission.wait_idle()
        ticket = admission.enter()
        waiting = asyncio.create_task(admission.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        ticket.close()
        await waiting

    asyncio.run(main())


def test_a_full_queue_is_a_429_and_all_who_were_let_in_are_served(start_server: StartServer
                                                                  ) -> None:
    server = start_server(make_engine(max_running=2), max_queue=3)
    body = {"prompt": "x", "max_tokens": 2}
    with server.client() as client, ThreadPoolExecutor(5) as pool:
        with paused(server):
            sent = [pool.submit(client.post, URL, json=body) for _ in range(5)]
            wait_for(lambda: server.context.admission.unfinished == 5)
            refused = client.post(URL, json=body)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert client.get("/health").status_code == 200
        assert [response.result().status_code for response in sent] == [200] * 5
        assert client.post(URL, json={**body, "n": 5}).status_code == 200
        impossible = client.post(URL, json={**body, "n": 6})
        assert impossible.status_code == 400 and "at most 5" in impossible.text
        assert 'kilter_rejected_total{reason="queue_full"} 1.0' in client.get("/metrics").text
    assert idle(server)


def test_a_request_has_its_time(start_server: StartServer) -> None:
    server = start_server(request_timeout=0.3)
    with server.client() as client, paused(server):
        late = client.post(URL, json={"prompt": "x"})
        assert late.status_code == 408 and late.json()["error"]["type"] == "timeout_error"
        events = client.post(URL, json={"prompt": "x", "stream": True})
        assert events.status_code == 200 and events.text.count("data:") == 1
        assert json.loads(events.text.removeprefix("data: "))["error"]["code"] == "timeout"
    wait_for(lambda: idle(server))
    assert ended(server, "timeout") == 2
    server.configure(request_timeout=PATIENCE)
    assert server.post(URL, {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("body", [
    {"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": ["x", "y"], "n": 2},
    {"prompt": ["x", "y"], "n": 2, "stream": True},
    {"messages": [{"role": "user", "content": "x"}]}])
def test_a_client_that_leaves_frees_its_places(server: Running, body: dict[str, object]) -> None:
    with paused(server):
        with raw_post(server, {**body, "max_tokens": 500}):
            wait_for(lambda: server.context.admission.unfinished > 0)
        wait_for(lambda: server.context.admission.unfinished == 0)
    wait_for(lambda: idle(server))


def test_one_slow_reader_holds_up_nobody_and_loses_nothing(start_server: StartServer) -> None:
    server = start_server()
    asked = {"prompt": "x", "n": 8, "seed": 1, "max_tokens": 400, "ignore_eos": True}
    body = {**asked, "stream": True}
    with server.client() as client, raw_post(server, body, 4096) as slow:
        wait_for(lambda: server.context.admission.unfinished == 8)
        for _ in range(3):
            response = client.post(URL, json={"prompt": "y", "max_tokens": 20})
            assert response.status_code == 200
        whole = client.post(URL, json=asked).json()  # the engine has time for it: it is not blocked
        assert server.context.admission.unfinished == 8  # more than the buffers hold is unread
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = slow.recv(65536)
            assert part, "the stream was cut"
            data += part
    texts = [""] * 8
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert b"data: [DONE]" in data


def test_a_client_that_never_reads_is_given_up(start_server: StartServer,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_STALLED", 0.2)
    server = start_server()
    body = {"prompt": "x", "n": 8, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with raw_post(server, body, 4096):
        wait_for(lambda: ended(server, "abort") == 1)
        wait_for(lambda: idle(server))


def test_a_stream_that_is_left_in_the_middle(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    before, tokens = ended(server, "abort"), server.context.engine.stats.completion_tokens
    with slow_steps(server, after=8):  # however late it leaves, the answer is not done
        with server.client() as client, client.stream("POST", URL, json=body) as response:
            next(response.iter_lines())
        wait_for(lambda: server.context.admission.unfinished == 0)
    wait_for(lambda: idle(server))
    assert ended(server, "abort") == before + 1
    assert server.context.engine.stats.completion_tokens - tokens <= 8 + 1
