"""/health: well, paused, stuck, stopped, draining."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.server.conftest import PATIENCE, Running, StartServer, make_engine, wait_for

URL, BODY = "/v1/completions", {"prompt": "a", "max_tokens": 3}


def health(server: Running, path: str = "/health") -> tuple[int, str]:
    answer = server.get(path)
    body = answer.json()
    return answer.status_code, body["error"]["code"] if answer.is_error else body["status"]


def test_it_says_what_is_under_way_and_needs_no_key(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    answer = server.get("/health")
    assert answer.json() == {"status": "ok", "running": 0, "waiting": 0, "steps": 0}


def test_a_step_that_does_not_end_is_told_and_forgotten_when_it_does(
        start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    inside, gate = threading.Event(), threading.Event()
    real = engine.executor.run

    def stuck(work: Any) -> Any:
        inside.set()
        assert gate.wait(PATIENCE)
        return real(work)

    monkeypatch.setattr(engine.executor, "run", stuck)
    server = start_server(engine, stall_timeout=0.2)
    assert health(server) == (200, "ok")
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(server.post, URL, BODY)
            assert inside.wait(PATIENCE)
            while (seen := health(server)) == (200, "ok"):
                pass
            assert seen == (503, "stalled") == health(server, "/health/live")
        finally:
            gate.set()
        assert asked.result().status_code == 200
    wait_for(lambda: health(server) == (200, "ok"))  # once the engine's thread is at rest


def test_idling_and_pausing_are_not_being_stuck(start_server: StartServer) -> None:
    server = start_server(stall_timeout=0.02)
    engine = server.context.engine
    time.sleep(0.05)
    assert health(server) == (200, "ok")
    engine.pause()
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(server.post, URL, BODY)
            wait_for(lambda: engine.stats.waiting == 1 and engine.stalled_seconds == 0)
            time.sleep(0.05)
            assert health(server) == (200, "paused")
        finally:
            engine.resume()
        assert asked.result().status_code == 200


def test_a_dead_engine_and_a_drain_are_told_apart(start_server: StartServer) -> None:
    server = start_server(drain_timeout=5.0)
    server.context.admission.draining = True
    assert health(server) == (503, "draining")
    assert health(server, "/health/live") == (200, "ok")
    server.context.admission.draining = False
    server.context.engine.stop()
    assert health(server) == (503, "stopped") == health(server, "/health/live")
