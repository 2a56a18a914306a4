"""/state: what it says is what the engine is, one picture serves all viewers, and an engine that
does not answer is no reason to wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from kilter.serve.async_engine import AsyncEngine
from kilter.serve.params import SamplingParams
from kilter.serve.server import state
from kilter.serve.server.config import ServerConfig
from kilter.serve.server.state import Picture, Pictures, quantiles
from tests.serve.server.conftest import PATIENCE
from tests.serve.tiny_engine import make_engine

PROMPT = [3, 4, 5, 6, 7, 8] * 4


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, no picture is stale of itself."""
    monkeypatch.setattr(state, "_PATIENCE", PATIENCE)


class Counting:
    """An engine that counts what it is asked for, and answers when it is let."""

    def __init__(self, serving: AsyncEngine) -> None:
        self.serving = serving
        self.calls = 0
        self.open = asyncio.Event()
        self.open.set()

    async def call(self, function: Callable[..., Any]) -> Any:
        self.calls += 1
        await self.open.wait()
        return await self.serving.call(function)


def client(serving: AsyncEngine, recent: Any = ()) -> httpx.AsyncClient:
    """A client of an app that has these routes alone."""
    context = SimpleNamespace(engine=serving, config=ServerConfig("tiny"), draining=False,
                              metrics=SimpleNamespace(recent=recent))
    app = FastAPI()
    app.include_router(state.routes(context))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def test_state_is_what_the_engine_is() -> None:
    async def main() -> None:
        engine = make_engine(kv_tokens=512, page_size=4, eos=())
        async with AsyncEngine(engine) as serving, client(serving, [(0.1, 0.02), (0.3, None)]) as c:
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            for _ in range(2):
                async for _delta in serving.stream(PROMPT, params):
                    pass
            running = serving.stream(PROMPT[::-1], params)
            await anext(running)
            said = (await c.get("/state")).json()
            await running.aclose()
        stats = said["stats"]
        assert (said["model"], said["stale"], said["alive"]) == ("tiny", False, True)
        pages = said["pages"]
        assert len(pages) == stats["pages_total"] == 128
        assert pages.count("0") == stats["pages_free"]
        assert pages.count("c") == stats["pages_cached"] > 0
        assert sum(r["status"] == "running" for r in said["requests"]) == stats["running"]
        for r in said["requests"]:
            assert r["cached"] <= r["computed"] <= r["length"] <= r["max_length"]
        assert stats["cached_prompt_tokens"] > 0  # the second time found the first one's prompt
        assert sum(node["tokens"] for node in said["nodes"]) == said["tree_tokens"] > 0
        assert sum(part["tokens"] for part in said["batch"]) == stats["last_step_tokens"]
        assert said["latency"]["ttft"] == pytest.approx(np.quantile([0.1, 0.3], (0.5, 0.95)))
        assert said["latency"]["tpot"] == [0.02, 0.02]

    asyncio.run(main())


def test_many_viewers_cost_the_engine_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_FRESH", 3600.0)

    async def main() -> None:
        async with AsyncEngine(make_engine()) as serving:
            engine = Counting(serving)
            pictures = Pictures(engine)  # type: ignore[arg-type]
            seen = await asyncio.gather(*(pictures.latest() for _ in range(50)))
            seen.append(await pictures.latest())
            assert engine.calls == 1
            assert len({id(picture) for picture, _ in seen}) == 1
            assert not any(stale for _, stale in seen)
            monkeypatch.setattr(state, "_FRESH", 0.0)  # it has aged: the next look makes another
            await pictures.latest()
            assert engine.calls == 2

    asyncio.run(main())


def test_an_engine_that_does_not_answer_leaves_the_last_picture(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_PATIENCE", 0.02)
    monkeypatch.setattr(state, "_FRESH", 0.0)

    async def main() -> None:
        async with AsyncEngine(make_engine()) as serving:
            engine = Counting(serving)
            engine.open.clear()
            pictures = Pictures(engine)  # type: ignore[arg-type]
            assert await pictures.latest() == (None, True)
            assert await pictures.latest() == (None, True)
            assert engine.calls == 1  # one question waits, not one per look
            engine.open.set()
            monkeypatch.setattr(state, "_PATIENCE", PATIENCE)
            first, stale = await pictures.latest()
            assert isinstance(first, Picture) and not stale
            engine.open.clear()
            monkeypatch.setattr(state, "_PATIENCE", 0.02)
            assert await pictures.latest() == (first, True)

    asyncio.run(main())


def test_state_answers_before_the_first_picture_and_after_the_engine_has_stopped() -> None:
    async def main() -> None:
        serving = AsyncEngine(make_engine())
        serving.start()
        async with client(serving) as c:
            await asyncio.to_thread(serving.stop)
            said = (await c.get("/state")).json()
            assert said["stale"] and not said["alive"]
            assert said["requests"] == [] and said["stats"]["pages_total"] > 0

    asyncio.run(main())


def test_a_viewer_who_leaves_takes_nobody_elses_picture() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine()) as serving:
            engine = Counting(serving)
            engine.open.clear()
            pictures = Pictures(engine)  # type: ignore[arg-type]
            leaver = asyncio.create_task(pictures.latest())
            stayer = asyncio.create_task(pictures.latest())
            await asyncio.sleep(0)
            leaver.cancel()
            engine.open.set()
            picture, stale = await stayer
            assert picture is not None and not stale and engine.calls == 1

    asyncio.run(main())


def test_files_have_types_and_are_loaded_again_only_when_changed() -> None:
    async def main() -> None:
        async with client(AsyncEngine(make_engine())) as c:
            for path, kind in (("/", "text/html"), ("/page/app.js", "text/javascript"),
                               ("/page/style.css", "text/css")):
                answer = await c.get(path)
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith(kind)
                policy = answer.headers["content-security-policy"]
                assert policy.startswith("default-src 'self';") and "unsafe" not in policy
                again = await c.get(path, headers={"If-None-Match": answer.headers["etag"]})
                assert (again.status_code, again.content) == (304, b"")
                assert path in state.PUBLIC_PATHS
            assert "/state" not in state.PUBLIC_PATHS
            assert (await c.get("/page/../state.py")).status_code == 404

    asyncio.run(main())


def test_quantiles() -> None:
    assert quantiles([]) is None and quantiles([None]) is None
    assert quantiles([3.0, None, 1.0, 2.0]) == pytest.approx((2.0, 2.9))
    assert json.dumps(quantiles([1.0])) == "[1.0, 1.0]"
