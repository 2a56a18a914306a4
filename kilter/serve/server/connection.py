"""A client's connection: uvicorn's, with bounds on what comes before a request is known."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kilter.serve.server.errors import ApiError, to_json

_TIME = 60.0  # seconds for a request's headers to arrive
_BYTES = 64 * 1024  # of a request's line and headers; what comes at once with them does not count


class Connection(HttpToolsProtocol):
    """Closes when headers do not come or do not end, and answers what is not HTTP as an error is
    answered; uvicorn alone waits for ever, and keeps headers of any length."""

    _deadline: asyncio.TimerHandle | None = None  # None: no headers are awaited
    _waiting = 0  # bytes of headers that are not whole

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None and self._waiting > _BYTES:
            self._refuse(ApiError(431, f"The request's headers have more than {_BYTES} bytes.",
                                  code="headers_too_large"))
            return
        super().data_received(data)
        self._waiting += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._expect_nothing()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "What was received is not an HTTP/1.1 request.",
                              code="not_http"))

    def _expect_headers(self) -> None:
        self._expect_nothing()
        self._waiting = 0
        self._deadline = self.loop.call_later(_TIME, self._late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_headers()  # the answer before is still on its way
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers without the app, and closes."""
        if self.transport.is_closing():
            return
        body = to_json(error.body())
        self.transport.write(b"HTTP/1.1 %d Refused\r\nContent-Type: application/json\r\n"
                             b"Content-Length: %d\r\nConnection: close\r\n\r\n%b"
                             % (error.status, len(body), body))
        self.transport.close()
