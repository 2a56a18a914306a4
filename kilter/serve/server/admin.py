"""For whoever runs the server (a trainer, say): new weights, the cache, and a pause. Only where the
server was started with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from kilter.serve.async_engine import EngineStopped
from kilter.serve.engine import Engine, InFlight
from kilter.serve.server.body import prepared, read_request
from kilter.serve.server.errors import ApiError, error_responses, json_response
from kilter.serve.server.openapi import body_of
from kilter.serve.server.protocol import Strict
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.load import Storage

if TYPE_CHECKING:
    from kilter.serve.server.context import Context

T = TypeVar("T")


class UpdateWeights(Strict):
    """POST /admin/update_weights.

    path: a model folder or a .gguf file on the server's disk.
    in_flight: what becomes of answers that have begun: restart, continue or abort.
    storage: how large matrices are held; auto: as the file has them.
    """

    path: Annotated[str, Field(min_length=1)]
    in_flight: InFlight = "restart"
    storage: Storage = "auto"


class Nothing(Strict):
    """An empty object. A web page cannot send one here unasked, as it could send nothing at all."""


def routes(context: Context) -> APIRouter:
    """POST /admin/update_weights, flush_cache, pause, resume; GET /admin/stats."""
    router = APIRouter(prefix="/admin", tags=["Administration"],
                       responses=error_responses(400, 401, 413, 415, 503))

    @router.post("/update_weights", summary="Take new weights for the same model",
                 openapi_extra=body_of(UpdateWeights))
    async def update_weights(request: Request) -> Response:
        update = await read_request(context, request, UpdateWeights)
        try:
            source = await prepared(context, _open, update.path)
            version = await _call(context, lambda engine: engine.update_weights(
                source, storage=update.storage, in_flight=update.in_flight))
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), param="path") from None
        return json_response({"weights_version": version})

    @router.post("/flush_cache", summary="Forget every cached prefix",
                 openapi_extra=body_of(Nothing))
    async def flush_cache(request: Request) -> Response:
        await read_request(context, request, Nothing)
        await _call(context, lambda engine: engine.flush_cache())
        return json_response({"flushed": True})

    @router.post("/pause", summary="Take no steps; requests stay, and new ones wait",
                 openapi_extra=body_of(Nothing))
    async def pause(request: Request) -> Response:
        await read_request(context, request, Nothing)
        context.engine.pause()
        await _call(context, lambda engine: None)  # the step that it was in has ended
        return json_response({"paused": True})

    @router.post("/resume", summary="Go on after a pause", openapi_extra=body_of(Nothing))
    async def resume(request: Request) -> Response:
        await read_request(context, request, Nothing)
        context.engine.resume()
        return json_response({"paused": False})

    @router.get("/stats", summary="The engine's numbers")
    async def stats() -> Response:
        numbers: dict[str, Any] = asdict(context.engine.stats)
        return json_response({**numbers, "paused": context.engine.paused})

    return router


def _open(path: str) -> ModelSource:
    if "\0" in path:
        raise ValueError("The path holds a null character.")
    return open_model(Path(path))


async def _call(context: Context, function: Callable[[Engine], T]) -> T:
    try:
        return await context.engine.call(function)
    except EngineStopped as error:
        raise ApiError(503, str(error), headers={"Retry-After": "5"}) from None
