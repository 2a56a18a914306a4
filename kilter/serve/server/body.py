"""Request bodies: read under a size limit and parsed strictly.

FastAPI would read and parse a body of any size on the event loop, and take NaN and numbers that no
double holds. Here a body is bounded before it is read, and large ones are parsed in a thread.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from kilter.serve.server.context import Context
from kilter.serve.server.errors import ApiError
from kilter.serve.server.stream import ClientGone

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

_JSON = re.compile(r"\s*application/json\s*(;\s*charset=\"?utf-?8\"?\s*)?;?\s*", re.IGNORECASE)
_MAX_DEPTH = 100  # of nested arrays and objects
_MAX_KEYS = 10_000  # of an object; pydantic would list every unknown one, and let nobody else run
_READ_TIMEOUT = 60.0  # seconds for a whole body to arrive


async def read_body(request: Request, limit: int) -> bytes:
    """The body, never more than ``limit`` bytes of it.

    Raises:
        ApiError: 413 for a larger one, 415 if it does not claim to be JSON (so that a web page
            cannot post here without asking) or is compressed, 408 if it does not arrive in time.
        ClientGone: if the client leaves before all of it is here.
    """
    kind = request.headers.get("content-type", "")
    if not _JSON.fullmatch(kind):
        raise ApiError(415, f"The Content-Type is {kind[:80]!r} but must be 'application/json' (in "
                            f"UTF-8).")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() not in ("", "identity"):
        raise ApiError(415, f"The Content-Encoding is {coding[:80]!r}, but this server takes "
                            f"bodies as they are; send it uncompressed.")
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or (length.isascii() and length.isdigit() and int(length) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_READ_TIMEOUT):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"The request's body did not arrive within {_READ_TIMEOUT:g} seconds.",
                       headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def parse_object(body: bytes, what: str = "The body") -> dict[str, Any]:
    """The JSON object in a body, or in ``what`` else the bytes are.

    Raises:
        ApiError: 400 for anything else: bad UTF-8, NaN, numbers that no double holds, a key that
            comes twice, nesting deeper than 100, and the like.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_int=_integer,
                           parse_float=_number, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{what} is not UTF-8 text: byte {error.start} is "
                            f"{body[error.start]:#04x}.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"{what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{what} must be a JSON object, but is {_KINDS[type(value)]}.")
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ApiError if arrays and objects are nested more than 100 deep (what walks through them
    later does so by recursion), or an object has too many keys."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        keys = max((len(part) for part in level if type(part) is dict), default=0)
        if keys > _MAX_KEYS:
            raise ApiError(400, f"The body has an object with {keys} keys; at most {_MAX_KEYS} are "
                                f"taken.")
        level = [inner for outer in level
                 for inner in (outer.values() if type(outer) is dict else outer)
                 if type(inner) is dict or type(inner) is list]
        if not level:
            return
    raise _too_deep()


def validate(model: type[Model], value: dict[str, Any]) -> Model:
    """The object as a request model.

    Raises:
        ApiError: 400 naming what is unknown, missing or wrong.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ApiError.of_validation(error) from None


async def prepared(context: Context, function: Callable[..., T], *args: Any) -> T:
    """``function(*args)`` in the threads for work that would hold up the event loop."""
    return await asyncio.get_running_loop().run_in_executor(context.prepare, function, *args)


async def read_request(context: Context, request: Request, model: type[Model]) -> Model:
    """A request's body as a request model.

    Raises:
        ApiError: as `read_body`, `parse_object` and `validate` do.
    """
    body = await read_body(request, context.config.max_body_bytes)
    return await prepared(context, lambda: validate(model, parse_object(body)))


_KINDS = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean",
          type(None): "null"}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.80} comes twice in one object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError(f"the number {digits[:20]}… is too large")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(413, f"The request's body has more than the {limit} bytes that this server "
                         f"takes.", headers={"Connection": "close"})


def _too_deep() -> ApiError:
    return ApiError(400, f"The body's arrays and objects are nested more than {_MAX_DEPTH} deep.")
