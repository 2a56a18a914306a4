"""Errors as OpenAI's API shapes them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from kilter.serve.server.stream import ClientGone

if TYPE_CHECKING:
    from kilter.serve.server.metrics import Metrics

logger = logging.getLogger("kilter.server")

_LISTED = 5  # problems that one message names
_LONGEST = 2000  # characters of a message: it may quote what was sent, but not all of it
# Type and code by status, where an error does not bring its own.
_KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "timeout"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
}
# Why a request never reached the engine, as the metrics count it.
_REASONS = {400: "invalid", 404: "unknown_model", 413: "too_large", 415: "invalid",
            429: "queue_full", 503: "unavailable"}


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a 2xx."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error.

    message: a full sentence: what is wrong, the value seen, what to change.
    param: dotted path of the request's field that is to blame.
    code: OpenAI's word for it; default what the status means.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]} …"
        super().__init__(message)
        self.type, default = _KINDS.get(status, _KINDS[400 if status < 500 else 500])
        self.status = status
        self.message = message
        self.param = param
        self.code = code or default
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param,
                          "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)

    @classmethod
    def of_validation(cls, error: ValidationError | RequestValidationError) -> ApiError:
        """A 400 that names the first problems; ``param`` is the first one's place."""
        problems = error.errors(include_url=False) if isinstance(error, ValidationError) else (
            error.errors())
        said = [_problem(problem) for problem in problems[:_LISTED]]
        more = f" {len(problems) - _LISTED} more problems." if len(problems) > _LISTED else ""
        return cls(400, " ".join(message for _, message in said) + more, param=said[0][0])


def to_json(value: Any) -> bytes:
    """Compact UTF-8 JSON; a lone surrogate, which UTF-8 cannot carry, stays an escape.

    Raises:
        ValueError: for NaN and infinities, which are not JSON.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None
                  ) -> Response:
    return Response(to_json(value), status, dict(headers or {}), "application/json")


def add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Every error of the app in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        if request.method == "POST" and error.status in _REASONS:
            metrics.rejected(_REASONS[error.status])
        return error.response()

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # for the access log; nobody reads it

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return ApiError.of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        message = {
            404: f"There is nothing at {request.url.path!r}; /openapi.json lists what there is.",
            405: f"{where} is not allowed; the methods allowed are "
                 f"{(error.headers or {}).get('Allow', 'listed in /openapi.json')}.",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()


def internal_error(error: BaseException, where: str) -> ApiError:
    """A 500 for a bug of ours; what happened goes to the log, not to the client."""
    logger.error("%s failed", where, exc_info=error)
    return ApiError(500, "The server failed on this request; its log tells why.")


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's ``responses``: that these statuses carry an `ErrorResponse`."""
    return {status: {"model": ErrorResponse, "description": _KINDS[status][1] or "invalid request"}
            for status in statuses}


def _problem(problem: Mapping[str, Any]) -> tuple[str | None, str]:
    """(param, sentence) of one of pydantic's errors."""
    path = _path(problem["loc"])
    name = repr(path or "the request body")
    if problem["type"] == "extra_forbidden":
        return path, f"The parameter {name} is not known to this server; leave it out."
    if problem["type"] == "missing":
        return path, f"The parameter {name} is missing."
    message = str(problem["msg"]).removeprefix("Value error, ").rstrip(".")
    if problem["type"] == "value_error":
        return path, (f"{name}: {message}." if path else f"{message[:1].upper()}{message[1:]}.")
    seen = reprlib.repr(problem.get("input"))
    if problem["type"] == "none_required":
        return path, f"The parameter {name} is not supported by this server; leave it out."
    message = message.replace("Input should", "it should", 1).replace(" after validation", "")
    return path, f"{name} is {seen}, but {message[:1].lower()}{message[1:]}."


def _path(place: Sequence[str | int]) -> str | None:
    """``messages.0.content``, as OpenAI writes where something is; without what pydantic adds to
    tell the members of a union apart."""
    return ".".join(str(part) for i, part in enumerate(place)
                    if (place[0], i) not in (("messages", 2), ("response_format", 1))
                    and part != "NamedTool" and not str(part).startswith(("literal[", "dict["))
                    ) or None
