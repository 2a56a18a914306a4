"""Listening, and stopping in order: uvicorn with a drain before its own shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from kilter.serve.server.app import create_app
from kilter.serve.server.config import ServerConfig
from kilter.serve.server.connection import Connection
from kilter.serve.server.context import Context

logger = logging.getLogger("kilter.server")

_KEEP_ALIVE = 75  # seconds an idle connection is kept, longer than a proxy's usual 60
_FLUSH = 5  # seconds for the last bytes to reach their readers when the server stops


def bind(config: ServerConfig) -> socket.socket:
    """A socket at the server's address, not yet listening: whether it is free is known before the
    model is loaded.

    Raises:
        OSError: with a sentence, if the address cannot be had.
    """
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"The server cannot listen on {where}: {error.strerror or error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"Another program listens on {where}; choose another port with --port "
                          f"(0 takes a free one).") from error
        raise OSError(f"The server cannot listen on {where}: {error.strerror}.") from error
    return listener


def listen(listener: socket.socket) -> None:
    """Begins to listen: until then another program that bound the same address could do so.

    Raises:
        OSError: with a sentence, if one did.
    """
    try:
        listener.listen()
    except OSError as error:
        raise OSError(f"Another program began to listen at {url_of(listener)} while the model was "
                      "loaded; choose another port with --port (0 takes a free one).") from error


def url_of(listener: socket.socket) -> str:
    """The address that a bound socket answers at, without a final slash."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves a context until it is told to stop.

    The first signal, or `stop`, begins the drain: new requests get a 503, running ones may take
    ``drain_timeout`` seconds, then they are aborted. The second signal aborts them at once.

    Where the engine loses a part of its model (`AsyncEngine.on_loss`) everybody has been told, and
    the server ends at once.

    on_ready: called when requests are being answered.
    failed: what ended the server by itself, a sentence, or None.
    """

    def __init__(self, context: Context, *, access_log: bool = False,
                 on_ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(uvicorn.Config(
            create_app(context), http=Connection, lifespan="on", ws="none", log_config=None,
            log_level="info" if access_log else "warning", access_log=access_log,
            server_header=False, timeout_keep_alive=_KEEP_ALIVE, timeout_graceful_shutdown=_FLUSH))
        self._context = context
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._impatient = asyncio.Event()
        self.failed: str | None = None
        context.engine.on_loss = self._fail

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        """Begins the drain; from any thread."""
        self._context.admission.draining = True
        self._soon(self._begin_drain)

    def _fail(self, sentence: str) -> None:
        logger.error(sentence)
        self.failed = sentence
        self._soon(self._end)

    def _end(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._context.draining:
            self._soon(self._impatient.set)
        else:
            self.stop()

    def _soon(self, function: Callable[[], object]) -> None:
        if self._loop is None:
            self.should_exit = True  # nothing has begun
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
            self._loop.call_soon_threadsafe(function)

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        admission = self._context.admission
        ends = [asyncio.create_task(admission.wait_idle()),
                asyncio.create_task(self._impatient.wait())]
        await asyncio.wait(ends, timeout=self._context.config.drain_timeout,
                           return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if admission.unfinished:
            await asyncio.to_thread(self._context.engine.stop)  # tells every listener
        self.should_exit = True
