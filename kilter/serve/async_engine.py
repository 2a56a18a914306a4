"""The engine for asyncio: one thread runs the loop, any number of coroutines listen.

    async with AsyncEngine(engine) as serving:
        async for delta in serving.stream(prompt_ids, SamplingParams()):
            print(delta.text)

A listener that leaves (cancelled, disconnected, or just breaks off) aborts its request; one that is
slow makes nobody wait: what it has not read yet is kept for it alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from kilter.serve.engine import Delta, Engine
from kilter.serve.params import SamplingParams

T = TypeVar("T")


class EngineStopped(RuntimeError):
    """The engine's thread has ended, so the request cannot be served."""


class AsyncEngine:
    """Runs an `Engine` in its own thread. The engine must not be touched from elsewhere while this
    one runs: `call` runs a function between two steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._listeners: dict[int, _Listener] = {}  # by request number; the thread's own
        self._thread = threading.Thread(target=self._run, name="kilter-engine", daemon=True)
        self.steps = 0
        self.last_progress = time.monotonic()  # when a step last ended, or the engine was idle

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in; open requests end with "abort"."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        await asyncio.to_thread(self.stop)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs ``function(engine)`` in the engine's thread between two steps.

        Raises:
            EngineStopped: if the thread has ended; else whatever the function raises.
        """
        return await asyncio.wrap_future(self._post(function))

    async def stream(self, prompt: Sequence[int], params: SamplingParams, **options: Any
                     ) -> AsyncIterator[Delta]:
        """A request's deltas until the last answer has ended. Arguments as `Engine.submit`.

        Raises:
            ValueError: as `Engine.submit` does, before the first delta.
            EngineStopped: if the engine stops or has stopped.
        """
        listener = _Listener(asyncio.get_running_loop(), params.best_of or params.n)

        def submit(engine: Engine) -> None:
            listener.number = engine.submit(prompt, params, **options)
            self._listeners[listener.number] = listener

        posted = self._post(submit)
        try:
            await asyncio.wrap_future(posted)
            while listener.open:
                for delta in await listener.take():
                    listener.open -= delta.finish_reason is not None
                    yield delta
        finally:
            if listener.open:
                self._post(lambda engine: self._leave(engine, listener))

    # ---- the engine's thread ----

    def _post(self, function: Callable[[Engine], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(EngineStopped("The engine has stopped."))
            else:
                self._calls.append((function, future))
                self._wake.notify()
        return future

    def _leave(self, engine: Engine, listener: _Listener) -> None:
        if listener.number is not None:
            self._listeners.pop(listener.number, None)
            engine.abort(listener.number)

    def _run(self) -> None:
        engine = self._engine
        while True:
            with self._wake:
                while not (self._calls or engine.busy or self._stopping):
                    self.last_progress = time.monotonic()
                    self._wake.wait(timeout=1.0)
                if self._stopping:
                    break
                calls, self._calls = self._calls, deque()
            for function, future in calls:
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(function(engine))
                except Exception as error:
                    future.set_exception(error)
            if engine.busy:
                self._publish(self._step(engine))
                self.steps += 1
            self.last_progress = time.monotonic()
        self._shut_down(engine)

    def _step(self, engine: Engine) -> list[Delta]:
        try:
            return engine.step()
        except Exception:
            return []  # the engine ends the requests of that step and tells them in the next

    def _publish(self, deltas: list[Delta]) -> None:
        fresh: dict[_Listener, list[Delta]] = {}
        for delta in deltas:
            if (listener := self._listeners.get(delta.request)) is not None:
                fresh.setdefault(listener, []).append(delta)
        for listener, news in fresh.items():
            listener.remaining -= sum(delta.finish_reason is not None for delta in news)
            if listener.remaining == 0 and listener.number is not None:
                del self._listeners[listener.number]
            listener.give(news)

    def _shut_down(self, engine: Engine) -> None:
        error = EngineStopped("The engine was stopped while this request was running.")
        for number, listener in list(self._listeners.items()):
            engine.abort(number)
            listener.fail(error)
        self._listeners.clear()
        for _, future in self._calls:
            future.set_exception(EngineStopped("The engine has stopped."))


class _Listener:
    """The far end of a request: deltas that have come and were not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: int) -> None:
        self.number: int | None = None
        self.open = answers  # answers whose end the listener has not seen
        self.remaining = answers  # answers whose end the engine has not reported
        self._loop = loop
        self._news: list[Delta] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def give(self, news: list[Delta]) -> None:
        def add() -> None:
            self._news.extend(news)
            self._arrived.set()

        self._call(add)

    def fail(self, error: Exception) -> None:
        def note() -> None:
            self._error = error
            self._arrived.set()

        self._call(note)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the listener's loop is closed: nobody listens
            self._loop.call_soon_threadsafe(function)

    async def take(self) -> list[Delta]:
        """What has come since the last call; waits for something."""
        await self._arrived.wait()
        news, self._news = self._news, []
        if self._error is None:
            self._arrived.clear()
        elif not news:
            raise self._error
        return news
