"""Whether the server is well. The answer comes from numbers that lie ready: neither a long step nor
a full queue can hold it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from kilter.serve.server.errors import ApiError, error_responses

if TYPE_CHECKING:
    from kilter.serve.server.context import Context


class Health(BaseModel):
    """A server that is well. It is ``paused`` where somebody has told it to take no steps."""

    status: Literal["ok", "paused"]
    running: int
    waiting: int
    steps: int


def routes(context: Context) -> APIRouter:
    """GET /health and /health/live."""
    router = APIRouter(tags=["Operation"])

    @router.get("/health", summary="Whether new requests will be answered",
                responses=error_responses(503))
    async def health() -> Health:
        if context.draining:
            raise ApiError(503, "The server is about to stop and takes no new requests.",
                           code="draining")
        return check(context)

    @router.get("/health/live", summary="Whether the engine works, also while the server drains",
                responses=error_responses(503))
    async def live() -> Health:
        return check(context)

    return router


def check(context: Context) -> Health:
    """The engine's health.

    Raises:
        ApiError: 503 if its thread has ended, or is busy but gets nowhere.
    """
    engine = context.engine
    if not engine.alive:
        raise ApiError(503, "The engine has stopped; the server must be started again. Its log "
                            "tells why.", code="stopped")
    stalled, limit = engine.stalled_seconds, context.config.stall_timeout
    if stalled > limit:
        raise ApiError(503, f"The engine has work but has ended no step for {stalled:.0f} seconds "
                            f"(the limit is {limit:g}); a device may hang.", code="stalled")
    stats = engine.stats
    return Health(status="paused" if engine.paused else "ok", running=stats.running,
                  waiting=stats.waiting, steps=stats.steps)
