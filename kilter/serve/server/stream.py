"""Answers that take a while: streamed as server-sent events or given whole, and given up as soon as
the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_STALLED = 60.0  # seconds that a client may take no byte before it counts as gone


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


class EventStream(Response):
    """Server-sent events. Each item is one or more whole events and is written in one go.

    A client that reads slowly holds up its own generator alone; when it disconnects, or stops
    reading, the generator is closed where it is.

    on_close: called when nothing more will be written.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], object]
                 ) -> None:
        self._events = events
        self._on_close = on_close
        self.status_code = 200
        self.background = None
        # nginx would otherwise keep events back until a buffer is full.
        self.init_headers({"content-type": "text/event-stream; charset=utf-8",
                           "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._write(send))
        except (ClientGone, TimeoutError):
            pass  # the connection is closed by whoever called us, as the response is not complete
        finally:
            self._on_close()

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code,
                        "headers": self.raw_headers})
            async for data in events:
                async with asyncio.timeout(_STALLED):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects.

    Raises:
        ClientGone: if it did; else whatever ``work`` raises.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        gone.cancel()
        if working.cancel():
            await asyncio.wait((working,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
