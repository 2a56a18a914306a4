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
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from kilter.serve.engine import Delta, Engine
from kilter.serve.executor import RanksLost
from kilter.serve.params import SamplingParams
from kilter.serve.stats import EngineStats

T = TypeVar("T")
logger = logging.getLogger("kilter.engine")

_PATIENCE = 10.0  # seconds that a step gets to end when the engine is stopped


class EngineStopped(RuntimeError):
    """The engine's thread has ended, so the request cannot be served."""


class EngineFailed(RuntimeError):
    """The step that a request was in failed; the engine goes on."""


class AsyncEngine:
    """Runs an `Engine` in its own thread. The engine must not be touched from elsewhere while this
    one runs: `call` runs a function between two steps. `call`, `stream` and `embed` are for event
    loops; all else may be used from any thread.

    Attributes:
        spec: the facts of its model.
        stats: the engine's numbers after its last step or call.
        paused: whether it takes no steps for now.
        on_loss: called with a sentence, from a thread, when the engine has ended because a process
            with a part of its model is lost; everybody who listened has been told.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._listeners: dict[int, _Listener] = {}  # by request number; the thread's own
        self._thread = threading.Thread(target=self._run, name="kilter-engine", daemon=True)
        self._mail: SimpleQueue[_Mail | None] = SimpleQueue()
        self._courier = threading.Thread(target=self._deliver, name="kilter-courier", daemon=True)
        self._progress: float | None = None  # when a step last ended; None: there is none to do
        self._lost: RanksLost | None = None
        self.spec = engine.model.spec
        self.paused = False
        self.on_loss: Callable[[str], None] = lambda sentence: None
        self.stats: EngineStats = engine.stats()
        engine.executor.on_loss(self._lose)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stalled_seconds(self) -> float:
        """How long there has been work but no step of it ended; 0 when there is nothing to do."""
        progress = self._progress
        return 0.0 if progress is None else time.monotonic() - progress

    def start(self) -> None:
        self._courier.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in; open requests end with "abort". A step that
        waits for another process for too long is given up."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                self._engine.executor.give_up()
                self._thread.join()

    def pause(self) -> None:
        """No step after the one it is in, until `resume`: requests stay, and new ones may come."""
        self.paused = True

    def resume(self) -> None:
        with self._wake:
            self.paused = False
            self._wake.notify()

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

    async def stream(self, prompt: Sequence[int], params: SamplingParams, *,
                     coalesce: bool = False, **options: Any) -> AsyncGenerator[Delta, None]:
        """A request's deltas until the last answer has ended.

        Args:
            coalesce: give nothing before everything is there, and so cost the event loop nothing
                per token.
            options: as `Engine.submit`.

        Raises:
            ValueError: as `Engine.submit` does, before the first delta.
            EngineStopped: if the engine stops or has stopped.
        """
        async with contextlib.aclosing(
                self.stream_steps(prompt, params, coalesce=coalesce, **options)) as steps:
            async for deltas in steps:
                for delta in deltas:
                    yield delta

    def stream_steps(self, prompt: Sequence[int], params: SamplingParams, *,
                     coalesce: bool = False, **options: Any
                     ) -> AsyncGenerator[list[Delta], None]:
        """As `stream`, but all deltas that have come at a time: those of one step, or of several
        if the listener was slower."""
        return self._listen(lambda engine: engine.submit(prompt, params, **options),
                            params.best_of or params.n, coalesce)

    async def embed(self, prompt: Sequence[int], **options: Any) -> np.ndarray:
        """A prompt's vector, float32 [D]. Options as `Engine.submit_embedding`.

        Raises:
            ValueError: as `Engine.submit_embedding` does.
            EngineFailed: if the step that it was in failed, or new weights ended it.
            EngineStopped: if the engine stops or has stopped.
        """
        async with contextlib.aclosing(self._listen(
                lambda engine: engine.submit_embedding(prompt, **options))) as steps:
            [delta] = await anext(steps)
        if delta.embedding is None:
            raise EngineFailed(delta.error or "The embedding was ended before it was done.")
        return delta.embedding

    # ---- requests ----

    async def _listen(self, submit: Callable[[Engine], int], answers: int = 1,
                      coalesce: bool = False) -> AsyncGenerator[list[Delta], None]:
        """What the engine says of a request; leaving aborts it."""
        listener = _Listener(asyncio.get_running_loop(), answers, coalesce)

        def begin(engine: Engine) -> None:
            listener.number = submit(engine)
            self._listeners[listener.number] = listener

        posted = self._post(begin)
        try:
            await asyncio.wrap_future(posted)
            while listener.open:
                deltas = await listener.take()
                listener.open -= sum(delta.finish_reason is not None for delta in deltas)
                yield deltas
        finally:
            if listener.open:
                self._post(lambda engine: self._leave(engine, listener))

    def _post(self, function: Callable[[Engine], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(EngineStopped("The engine has stopped."))
            else:
                self._calls.append((function, future))
                self._wake.notify()
        return future

    # ---- the engine's thread ----

    def _leave(self, engine: Engine, listener: _Listener) -> None:
        if listener.number is not None:
            self._listeners.pop(listener.number, None)
            engine.abort(listener.number)

    def _lose(self, sentence: str) -> None:
        with self._wake:
            self._lost = RanksLost(sentence)
            self._wake.notify()

    def _run(self) -> None:
        engine = self._engine
        why = "The engine was stopped while this request was running."
        try:
            while self._wait(engine):
                self._make_calls(engine)
                deltas = engine.news() if self.paused else self._step(engine)
                self._progress = time.monotonic()
                self.stats = engine.stats()  # before anybody can know of the step
                self._publish(deltas)
        except RanksLost as error:
            why = str(error)
        except Exception:
            logger.exception("The engine's thread ends")
        finally:
            self._progress = None
            asked = self._stopping
            self._shut_down(engine, EngineStopped(why))
            if self._lost is not None and not asked:
                self.on_loss(str(self._lost))

    def _wait(self, engine: Engine) -> bool:
        """Until there is something to do; False to end."""
        with self._wake:
            while not (self._calls or self._stopping or self._lost
                       or (engine.busy and not self.paused)):
                self._progress = None
                self._wake.wait()
            if self._lost is not None and not self._stopping:
                raise self._lost
            if self._progress is None:
                self._progress = time.monotonic()
            return not self._stopping

    def _make_calls(self, engine: Engine) -> None:
        with self._wake:
            calls, self._calls = self._calls, deque()
        for function, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(engine)
            except Exception as error:
                future.set_exception(error)
            else:
                self.stats = engine.stats()  # before anybody can know that it was done
                future.set_result(result)

    def _step(self, engine: Engine) -> list[Delta]:
        try:
            return engine.step()
        except RanksLost:
            raise
        except Exception:
            if engine.stats().failed_steps == self.stats.failed_steps:
                raise  # no requests that the failure could be put down to: it would come again
            logger.exception("A step failed; the requests in it end")
            return []  # the engine tells them in the next step

    def _publish(self, deltas: list[Delta]) -> None:
        """Hands deltas to their listeners: one wake-up for each event loop, not for each listener.
        """
        fresh: _Mail = {}
        for delta in deltas:
            listener = self._listeners.get(delta.request)
            if listener is None:
                continue
            if delta.finish_reason is not None:
                listener.remaining -= 1
                if listener.remaining == 0:
                    del self._listeners[delta.request]
            if listener.coalesce:
                listener.kept.append(delta)
                if listener.remaining == 0:
                    fresh.setdefault(listener.loop, {})[listener] = listener.kept
            else:
                fresh.setdefault(listener.loop, {}).setdefault(listener, []).append(delta)
        if fresh:
            self._mail.put(fresh)

    def _deliver(self) -> None:
        """The second thread's: wakes the event loops. The engine's own would give the interpreter
        away each time, and have it back only when the loop is done with all that came; this one
        gets it while a step is computed."""
        while (fresh := self._mail.get()) is not None:
            for loop, news in fresh.items():
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                    loop.call_soon_threadsafe(_give, news)

    def _shut_down(self, engine: Engine, error: EngineStopped) -> None:
        with self._wake:
            self._stopping = True
            calls, self._calls = self._calls, deque()
        self._mail.put(None)
        self._courier.join()  # what was said before the end comes before it
        for listener in self._listeners.values():
            with contextlib.suppress(RuntimeError):
                listener.loop.call_soon_threadsafe(listener.fail, error)
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        for number in self._listeners:
            engine.abort(number)
        self._listeners.clear()


class _Listener:
    """The far end of a request: deltas that have come and were not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: int, coalesce: bool) -> None:
        self.loop = loop
        self.coalesce = coalesce
        self.number: int | None = None
        self.open = answers  # answers whose end the listener has not seen
        self.remaining = answers  # answers whose end the engine has not reported
        self.kept: list[Delta] = []  # the engine thread's, until everything is there
        self._news: list[Delta] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def give(self, news: list[Delta]) -> None:
        self._news += news
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def take(self) -> list[Delta]:
        """What has come since the last call; waits for something."""
        await self._arrived.wait()
        news, self._news = self._news, []
        if self._error is None:
            self._arrived.clear()
        elif not news:
            raise self._error
        return news


# What came for each listener of each event loop.
_Mail = dict[asyncio.AbstractEventLoop, dict[_Listener, list[Delta]]]


def _give(news: dict[_Listener, list[Delta]]) -> None:
    """Runs in an event loop: gives each listener what is its own."""
    for listener, deltas in news.items():
        listener.give(deltas)
