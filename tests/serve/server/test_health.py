"""/health: well, paused, stuck, stopped, draining."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.serve.server.conftest import Running, StartServer, make_engine


def health(server: Running, path: str = "/health") -> tuple[int, str]:
    answer = httpx.get(server.base_url + path, timeout=10)
    body = answer.json()
    return answer.status_code, body["error"]["code"] if answer.is_error else body["status"]


def test_it_says_what_is_under_way_and_needs_no_key(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    answer = httpx.get(server.base_url + "/health")
    assert answer.json() == {"status": "ok", "running": 0, "waiting": 0, "steps": 0}


def test_a_step_that_does_not_end_is_told_and_forgotten_when_it_does(
        start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    inside, gate = threading.Event(), threading.Event()
    real = engine.executor.run

    def stuck(work: Any) -> Any:
        inside.set()
        assert gate.wait(30)
        return real(work)

    monkeypatch.setattr(engine.executor, "run", stuck)
    server = start_server(engine, stall_timeout=0.2)
    assert health(server) == (200, "ok")
    asked = threading.Thread(target=httpx.post, args=(server.base_url + "/v1/completions",),
                             kwargs={"json": {"prompt": "a", "max_tokens": 3}, "timeout": 30})
    asked.start()
    assert inside.wait(10)
    while (seen := health(server)) == (200, "ok"):
        pass
    assert seen == (503, "stalled") == health(server, "/health/live")
    gate.set()
    asked.join(30)
    assert health(server) == (200, "ok")


def test_idling_and_pausing_are_not_being_stuck(start_server: StartServer) -> None:
    server = start_server(stall_timeout=0.05)
    threading.Event().wait(0.15)
    assert health(server) == (200, "ok")
    server.context.engine.pause()
    asked = threading.Thread(target=httpx.post, args=(server.base_url + "/v1/completions",),
                             kwargs={"json": {"prompt": "a", "max_tokens": 3}, "timeout": 30})
    asked.start()
    while httpx.get(server.base_url + "/health").json()["waiting"] == 0:
        pass
    threading.Event().wait(0.15)
    assert health(server) == (200, "paused")
    server.context.engine.resume()
    asked.join(30)


def test_a_dead_engine_and_a_drain_are_told_apart(start_server: StartServer) -> None:
    server = start_server(drain_timeout=5.0)
    server.context.admission.draining = True
    assert health(server) == (503, "draining")
    assert health(server, "/health/live") == (200, "ok")
    server.context.admission.draining = False
    server.context.engine.stop()
    assert health(server) == (503, "stopped") == health(server, "/health/live")
