"""A request without HTTP: what `kilter batch` asks, answered by the same code as the server's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kilter.serve.server import chat, completions, embeddings
from kilter.serve.server.context import Context
from kilter.serve.server.errors import ApiError, internal_error

_ENDPOINTS: dict[str, Callable[[Context, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "/v1/chat/completions": chat.complete,
    "/v1/completions": completions.complete,
    "/v1/embeddings": embeddings.embed,
}


async def answer(context: Context, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(HTTP status, response body) of a request that does not stream; errors in OpenAI's shape."""
    try:
        if url not in _ENDPOINTS:
            raise ApiError(404, f"There is no endpoint {url!r}; there are: "
                                f"{', '.join(_ENDPOINTS)}.", param="url")
        return 200, await _ENDPOINTS[url](context, body)
    except ApiError as error:
        return error.status, error.body()
    except Exception as error:
        return 500, internal_error(error, url).body()
