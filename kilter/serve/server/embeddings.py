"""/v1/embeddings: a prompt's hidden states after the last norm, pooled to one vector.

Any decoder has such vectors; how much they are good for depends on whether the model was trained
for it.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from kilter.serve.async_engine import EngineFailed, EngineStopped
from kilter.serve.engine import Pooling
from kilter.serve.server.body import check_depth, parse_object, prepared, read_body, validate
from kilter.serve.server.errors import ApiError, error_responses, to_json
from kilter.serve.server.openapi import body_of
from kilter.serve.server.prepare import check_prompt, encode_text
from kilter.serve.server.protocol import Prompt, Strict
from kilter.serve.server.stream import unless_gone

if TYPE_CHECKING:
    from kilter.serve.server.context import Context

_MAX_INPUTS = 2048  # of a request, as OpenAI has it


class EmbeddingRequest(Strict):
    """POST /v1/embeddings.

    dimensions: that of the model's vectors, or left out: they are not made to be cut.
    pooling: mean of all tokens' hidden states, or that of the last token.
    normalize: whether vectors are scaled to length 1.
    """

    model: str | None = Field(None, description="Default the model that is served.")
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = Field(None, description="Whose request it is; the answer does not depend "
                                               "on it.")
    # beyond OpenAI's API
    pooling: Pooling | None = "mean"
    normalize: bool | None = True
    add_special_tokens: bool | None = Field(True, description="Begin a text as the tokenizer does.")
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = 0
    cache_salt: str | None = Field(None, description="Cached prefixes are shared only between "
                                                     "requests of the same salt.")


class EmbeddingItem(BaseModel):
    """A vector; in base64 its float32 values, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True)
class Job:
    """A prepared request."""

    prompts: list[list[int]]
    pooling: Pooling
    normalize: bool
    base64: bool
    priority: int
    salt: str | None


def routes(context: Context) -> APIRouter:
    """POST /v1/embeddings."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/embeddings", summary="Vectors of one or more texts", response_model=None,
                 openapi_extra=body_of(EmbeddingRequest),
                 responses={200: {"model": EmbeddingResponse},
                            **error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)})
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, context.config.max_body_bytes)
        with context.admission.enter() as ticket:
            job = await unless_gone(request.receive, prepared(
                context, lambda: _prepare(context, parse_object(body))))
            ticket.grow(_places(context, job))
            vectors = await unless_gone(request.receive, _compute(context, job))
            written = await prepared(context, _write, context, job, vectors)
        return Response(written, media_type="application/json")

    return router


async def embed(context: Context, body: dict[str, Any]) -> dict[str, Any]:
    """The response's body to a request that did not come over HTTP.

    Raises:
        ApiError: for a request that cannot be served.
    """
    check_depth(body)
    with context.admission.enter() as ticket:
        job = await prepared(context, _prepare, context, body)
        ticket.grow(_places(context, job))
        vectors = await _compute(context, job)
    return {"object": "list", "data": [_item(job, i, v) for i, v in enumerate(vectors)],
            "model": context.config.served_name, "usage": _usage(job)}


def _prepare(context: Context, body: dict[str, Any]) -> Job:
    """In a prepare thread. Raises ApiError."""
    request = validate(EmbeddingRequest, body)
    context.check_model(request.model)
    size = context.engine.spec.hidden_size
    if request.dimensions not in (None, size):
        raise ApiError(400, f"This model's vectors have {size} dimensions and are not made to be "
                            f"cut to {request.dimensions} (it was not trained as a Matryoshka "
                            f"embedding); leave dimensions out.", param="dimensions")
    if request.priority and not context.priorities:
        raise ApiError(400, "This server does not order requests by priority; start it with "
                            "--policy priority, or leave it out.", param="priority")
    if len(request.input) > _MAX_INPUTS:
        raise ApiError(400, f"There are {len(request.input)} inputs, but a request may have "
                            f"{_MAX_INPUTS} at most; split it.", param="input")
    prompts = []
    for prompt in request.input:
        if isinstance(prompt, str):
            prompt = encode_text(context, prompt, "input",
                                 add_special_tokens=request.add_special_tokens is not False)
        check_prompt(context, prompt, 0, "input")
        prompts.append(prompt)
    return Job(prompts, request.pooling or "mean", request.normalize is not False,
               request.encoding_format == "base64", request.priority or 0, request.cache_salt)


def _places(context: Context, job: Job) -> int:
    """How many of its inputs are under way at a time."""
    return min(len(job.prompts), context.engine.stats.max_running)


async def _compute(context: Context, job: Job) -> list[np.ndarray]:
    """All inputs' vectors, float32 [D] each, in order.

    Raises:
        ApiError: if the engine fails or stops, or the time is over.
    """
    limit = context.config.request_timeout
    places = asyncio.Semaphore(_places(context, job))

    async def one(prompt: list[int]) -> np.ndarray:
        async with places:
            return await context.engine.embed(
                prompt, pooling=job.pooling, normalize=job.normalize, priority=job.priority,
                salt=job.salt)

    track = context.metrics.track("embeddings", sum(map(len, job.prompts)))
    outcome = "abort"
    try:
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in job.prompts]
        outcome = "stop"
        return [task.result() for task in tasks]
    except TimeoutError:
        outcome = "timeout"
        raise ApiError(408, f"The request was ended after the {limit:g} seconds that this server "
                            f"gives to one.") from None
    except ExceptionGroup as failures:
        outcome = "error"
        error = failures.exceptions[0]
        if isinstance(error, EngineStopped):
            raise ApiError(503, str(error), headers={"Retry-After": "5"}) from None
        if isinstance(error, ValueError):
            raise ApiError(400, str(error), param="input") from None
        if isinstance(error, EngineFailed):
            raise ApiError(500, str(error)) from None
        raise error from None
    finally:
        track.done(outcome)


def _item(job: Job, index: int, vector_D: np.ndarray) -> dict[str, Any]:
    values: Any = vector_D.tolist()
    if job.base64:
        values = base64.b64encode(vector_D.astype("<f4").tobytes()).decode("ascii")
    return {"object": "embedding", "index": index, "embedding": values}


def _usage(job: Job) -> dict[str, int]:
    tokens = sum(map(len, job.prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _write(context: Context, job: Job, vectors: list[np.ndarray]) -> bytes:
    """The response as JSON. One vector at a time: thousands in one go would keep every other thread
    from running until they are written."""
    data = b",".join(to_json(_item(job, i, vector)) for i, vector in enumerate(vectors))
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
        data, to_json(context.config.served_name), to_json(_usage(job)))
