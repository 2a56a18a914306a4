"""The application: every route, who may call it, and the errors."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kilter import __version__
from kilter.serve.server import (
    admin,
    chat,
    completions,
    embeddings,
    health,
    metrics,
    models,
    state,
    tokenize,
)
from kilter.serve.server.context import Context, build_context
from kilter.serve.server.errors import ApiError, add_error_handlers, internal_error
from kilter.serve.server.openapi import describe

__all__ = ["build_context", "create_app"]


def create_app(context: Context) -> FastAPI:
    """The server as an ASGI application; its lifespan starts and stops the engine's thread."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(context.close)

    # FastAPI's own documentation pages load scripts from elsewhere, so there are none.
    app = FastAPI(title="Kilter", version=__version__, docs_url=None, redoc_url=None,
                  redirect_slashes=False, lifespan=lifespan)
    for module in (chat, completions, embeddings, models, tokenize, health, metrics, state):
        app.include_router(module.routes(context))
    if context.config.admin:
        app.include_router(admin.routes(context))
    add_error_handlers(app, context.metrics)
    describe(app)
    app.add_middleware(CatchBugs)
    app.add_middleware(HeadAsGet)
    if context.config.api_key is not None:
        app.add_middleware(RequireKey, context=context)
    if context.config.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(context.config.cors_origins),
                           allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


class CatchBugs:
    """Answers a request that a bug of ours ended with a 500 and goes on. (FastAPI would answer and
    raise on, and the connection be cut.)"""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            response = internal_error(error, f"{scope['method']} {scope['path']}").response()
            await response(scope, receive, send)


class HeadAsGet:
    """Answers HEAD, which some health checks ask, as GET; the connection leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class RequireKey:
    """Lets nobody in without the API key, except to the health checks and to the page, which asks
    for it."""

    OPEN = state.PUBLIC_PATHS | {"/health", "/health/live"}

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._metrics = context.metrics
        self._expected = f"Bearer {context.config.api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            self._metrics.rejected("unauthorized")
            error = ApiError(
                401, "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                headers={"WWW-Authenticate": "Bearer"})
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in self.OPEN:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
