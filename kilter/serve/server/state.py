"""The page at / and the picture of the engine that it shows.

However many people look, the engine is asked for one picture at a time and at most five a second;
where it does not answer within a second (a long step, say), the last picture is given out as stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request, Response

from kilter import __version__
from kilter.serve.async_engine import AsyncEngine, EngineStopped
from kilter.serve.engine import Engine
from kilter.serve.server.errors import error_responses, to_json
from kilter.serve.snapshot import Snapshot
from kilter.serve.stats import EngineStats

if TYPE_CHECKING:
    from kilter.serve.server.context import Context

_FRESH = 0.2  # seconds for which a picture is given out
_PATIENCE = 1.0  # seconds that the engine has to make one
_LIMIT = 512  # requests and nodes of the prefix tree in a picture
_NOTHING = Snapshot(requests=[], requests_total=0, pages="", page_size=0, nodes=[], tree_pages=0,
                    tree_tokens=0, batch=[])

_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FILES = ("app.js", "access.js", "chart.js", "chat.js", "maps.js", "style.css", "icon.svg")
# What the page may do: load from this server and talk to it, and nothing else.
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for anew each time: the answer is mostly a 304
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

#: Paths that need no API key: the page is the same for everybody and asks for the key itself.
PUBLIC_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})


@dataclass(frozen=True)
class Picture:
    """An engine at one moment (``taken``: `time.monotonic` seconds)."""

    taken: float
    stats: EngineStats
    snapshot: Snapshot

    @classmethod
    def of(cls, engine: Engine) -> Picture:
        """To be called in the engine's thread."""
        return cls(time.monotonic(), engine.stats(), engine.snapshot(limit=_LIMIT))


class Pictures:
    """The latest picture of an engine, made when somebody asks. For one event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._last: Picture | None = None
        self._making: asyncio.Task[None] | None = None

    async def latest(self) -> tuple[Picture | None, bool]:
        """The picture (None if there never was one), and whether it is stale."""
        begin = time.monotonic()
        if self._last is None or begin - self._last.taken >= _FRESH:
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make())
            making = self._making  # not cancelled with a viewer who leaves: others wait for it
            await asyncio.wait({making}, timeout=_PATIENCE)
            if making.done():
                making.result()
        return self._last, self._last is None or self._last.taken < begin - _FRESH

    async def _make(self) -> None:
        with contextlib.suppress(EngineStopped):
            self._last = await self._engine.call(Picture.of)


def routes(context: Context) -> APIRouter:
    """GET /, /page/… and /state."""
    router = APIRouter()
    folder = resources.files(__package__) / "page"
    _add_file(router, "/", "index.html", (folder / "index.html").read_bytes())
    for name in _FILES:
        _add_file(router, f"/page/{name}", name, (folder / name).read_bytes())

    pictures = Pictures(context.engine)
    started = time.monotonic()
    encoded: tuple[Picture, bytes] | None = None

    @router.get("/state", summary="What the engine is doing: requests, pages, prefix tree",
                responses=error_responses(401))
    async def state() -> Response:
        nonlocal encoded
        picture, stale = await pictures.latest()
        if stale or picture is None or encoded is None or encoded[0] is not picture:
            now = time.monotonic()
            body = to_json(_describe(context, picture, stale, now, now - started))
            if stale or picture is None:
                return _json(body)
            encoded = picture, body
        return _json(encoded[1])

    return router


def _describe(context: Context, picture: Picture | None, stale: bool, now: float, uptime: float
              ) -> dict[str, Any]:
    """A picture as the page reads it. Times in seconds; ``age`` is the picture's."""
    stats, snapshot = (context.engine.stats, _NOTHING) if picture is None else (
        picture.stats, picture.snapshot)
    return {
        "model": context.config.served_name, "version": __version__, "uptime": uptime,
        "age": 0.0 if picture is None else now - picture.taken, "stale": stale,
        "alive": context.engine.alive, "draining": context.draining,
        "stats": asdict(stats),
        "latency": {"ttft": quantiles(first for first, _ in context.metrics.recent),
                    "tpot": quantiles(mean for _, mean in context.metrics.recent)},
        **snapshot,
    }


def quantiles(seconds: Iterable[float | None]) -> tuple[float, float] | None:
    """Median and 95th percentile of those that are there, or None if none are."""
    known = [value for value in seconds if value is not None]
    if not known:
        return None
    median, most = np.quantile(known, (0.5, 0.95))
    return float(median), float(most)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


def _add_file(router: APIRouter, path: str, name: str, content: bytes) -> None:
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
    kind = _TYPES[name[name.rindex("."):]]

    @router.get(path, include_in_schema=False)
    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)
