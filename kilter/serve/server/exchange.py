"""A request and its answer, for chats and completions alike: prepare, then stream or give whole.

An endpoint gives a function from a body to an `Exchange`, which knows the jobs and how to write
what comes of them; this module gives it the queue's bound, the threads, the engine, the client that
may leave, and the errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from fastapi import Request, Response

from kilter.serve.engine import Delta
from kilter.serve.server.body import check_depth, parse_object, prepared, read_body
from kilter.serve.server.context import Context
from kilter.serve.server.errors import ApiError, internal_error, json_response, to_json
from kilter.serve.server.generation import Job, Result, collect, follow_all
from kilter.serve.server.stream import EventStream, event, unless_gone


class Exchange(Protocol):
    """A prepared request.

    endpoint: its short name in the metrics; jobs: its prompts.
    """

    endpoint: str
    jobs: Sequence[Job]
    stream: bool

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The response's body."""
        ...

    def begin(self) -> bytes:
        """Events before the first delta, or nothing."""
        ...

    def chunk(self, job: int, delta: Delta) -> bytes:
        """The events of a delta, or nothing."""
        ...

    def end(self) -> bytes:
        """Events after the last delta."""
        ...


# Runs in a prepare thread. Raises ApiError.
Prepare = Callable[[Context, dict[str, Any]], Exchange]


async def respond(context: Context, request: Request, prepare: Prepare) -> Response:
    """The response to an HTTP request.

    Raises:
        ApiError: for a request that cannot be served.
        ClientGone: if the client leaves before its answer begins.
    """
    body = await read_body(request, context.config.max_body_bytes)
    with contextlib.ExitStack() as places:
        ticket = places.enter_context(context.admission.enter())
        exchange = await unless_gone(request.receive, prepared(
            context, lambda: prepare(context, parse_object(body))))
        ticket.grow(_answers(exchange))
        if not exchange.stream:
            results = await unless_gone(
                request.receive, collect(context, exchange.endpoint, exchange.jobs))
            return json_response(exchange.whole(results))
        return EventStream(_events(context, exchange), places.pop_all().close)


async def answer(context: Context, body: dict[str, Any], prepare: Prepare) -> dict[str, Any]:
    """The response's body to a request that did not come over HTTP and does not stream.

    Raises:
        ApiError: for a request that cannot be served.
    """
    check_depth(body)
    with context.admission.enter() as ticket:
        exchange = await prepared(context, prepare, context, body)
        if exchange.stream:
            raise ApiError(400, "stream is true, but there is nobody to stream to; leave it out.",
                           param="stream")
        ticket.grow(_answers(exchange))
        return exchange.whole(await collect(context, exchange.endpoint, exchange.jobs))


def _answers(exchange: Exchange) -> int:
    return sum(job.params.best_of or job.params.n for job in exchange.jobs)


async def _events(context: Context, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    unfinished = _answers(exchange)
    try:
        if first := exchange.begin():
            yield first
        async with contextlib.aclosing(
                follow_all(context, exchange.endpoint, exchange.jobs)) as steps:
            async for news in steps:
                data = b"".join(exchange.chunk(job, delta) for job, delta in news)
                unfinished -= sum(delta.finish_reason is not None for _, delta in news)
                if not unfinished:
                    data += exchange.end() + event(b"[DONE]")
                if data:
                    yield data
    except ApiError as error:
        yield event(to_json(error.body()))
    except Exception as error:
        yield event(to_json(internal_error(error, exchange.endpoint).body()))
