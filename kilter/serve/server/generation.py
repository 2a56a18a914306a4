"""Between a prepared request and the engine: following its answers, delta by delta or whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from kilter.serve.answer import STEP_FAILED, Delta
from kilter.serve.async_engine import EngineStopped
from kilter.serve.params import SamplingParams
from kilter.serve.sampler import Choice, best_answers
from kilter.serve.server.context import Context
from kilter.serve.server.errors import ApiError


@dataclass(frozen=True)
class Job:
    """One prompt for the engine.

    text: the prompt as it was given, None for token ids.
    """

    prompt: list[int]
    params: SamplingParams
    text: str | None = None
    priority: int = 0
    salt: str | None = None


@dataclass
class Completion:
    """One whole answer. `choices` has the token that ended it, `text` does not."""

    text: str = ""
    choices: list[Choice] = field(default_factory=list)
    finish_reason: str = "stop"


@dataclass
class Result:
    """All answers to one job, the best first where ``best_of`` chose them.

    computed: tokens of all answers, those that were not chosen too.
    prompt: log-probabilities of the prompt's tokens after the first, where asked for.
    """

    completions: list[Completion]
    prompt: tuple[Choice, ...] | None = None
    cached_tokens: int = 0
    computed: int = 0
    weights_version: int = 0


async def follow(context: Context, endpoint: str, job: Job, *, whole: bool = False,
                 ) -> AsyncGenerator[list[Delta], None]:
    """A job's deltas, step by step, measured and bounded in time; leaving aborts it.

    whole: nobody looks before the last one is there.

    Raises:
        ApiError: if the engine refuses it, fails or stops, or the time is over.
    """
    track = context.metrics.track(endpoint, len(job.prompt))
    outcome = "abort"
    unfinished = job.params.best_of or job.params.n
    limit = context.config.request_timeout
    end = None if limit is None else asyncio.get_running_loop().time() + limit
    try:
        async with contextlib.aclosing(context.engine.stream_steps(
                job.prompt, job.params, coalesce=whole, priority=job.priority, salt=job.salt)
                ) as steps:
            while unfinished:
                async with asyncio.timeout_at(end):
                    news = await anext(steps)
                for i, delta in enumerate(news):
                    track.delta(delta)
                    if delta.finish_reason == "error":
                        yield news[:i]
                        raise _failure(delta)
                    if delta.finish_reason is not None:
                        unfinished -= 1
                        outcome = "abort" if unfinished else delta.finish_reason
                yield news
    except TimeoutError:
        outcome = "timeout"
        raise ApiError(408, f"The request was ended after the {limit:g} seconds that this server "
                            f"gives to one.") from None
    except EngineStopped as error:
        raise ApiError(503, str(error), headers={"Retry-After": "5"}) from None
    except ValueError as error:
        outcome = "error"
        raise ApiError(400, str(error)) from None
    except ApiError:
        outcome = "error"
        raise
    finally:
        track.done(outcome)


async def follow_all(context: Context, endpoint: str, jobs: Sequence[Job]
                     ) -> AsyncGenerator[list[tuple[int, Delta]], None]:
    """(job, delta) of several jobs side by side, all that has come at a time. Raises as `follow`
    does."""
    if len(jobs) == 1:
        async with contextlib.aclosing(follow(context, endpoint, jobs[0])) as steps:
            async for news in steps:
                yield [(0, delta) for delta in news]
        return
    # What waits here is the answers' own text, for a reader that is slower than the engine.
    arrived: list[tuple[int, Delta]] = []
    failures: list[Exception] = []
    something = asyncio.Event()

    async def pump(number: int, job: Job) -> None:
        try:
            async with contextlib.aclosing(follow(context, endpoint, job)) as steps:
                async for news in steps:
                    arrived.extend((number, delta) for delta in news)
                    something.set()
        except Exception as error:
            failures.append(error)
            something.set()

    unfinished = sum(job.params.best_of or job.params.n for job in jobs)
    pumps = [asyncio.create_task(pump(number, job)) for number, job in enumerate(jobs)]
    try:
        while unfinished:
            await something.wait()
            something.clear()
            all_news, arrived[:] = arrived[:], []
            unfinished -= sum(delta.finish_reason is not None for _, delta in all_news)
            yield all_news
            if failures:
                raise failures[0]
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


async def collect(context: Context, endpoint: str, jobs: Sequence[Job]) -> list[Result]:
    """All jobs' whole answers, side by side. Raises as `follow` does."""
    if len(jobs) == 1:
        return [await _collect(context, endpoint, jobs[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_collect(context, endpoint, job)) for job in jobs]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _collect(context: Context, endpoint: str, job: Job) -> Result:
    params = job.params
    result = Result([Completion() for _ in range(params.best_of or params.n)])
    async with contextlib.aclosing(follow(context, endpoint, job, whole=True)) as steps:
        for delta in [delta async for news in steps for delta in news]:
            completion = result.completions[delta.index]
            completion.text += delta.text
            completion.choices += delta.choices
            completion.finish_reason = delta.finish_reason or completion.finish_reason
            if delta.prompt is not None:
                result.prompt = delta.prompt
            result.weights_version = delta.weights_version
            if delta.index == 0:
                result.cached_tokens = delta.cached_tokens
    result.computed = sum(len(c.choices) for c in result.completions)
    if len(result.completions) > params.n:
        best = best_answers([sum(c.logprob or 0.0 for c in completion.choices)
                             for completion in result.completions],
                            [len(completion.choices) for completion in result.completions],
                            params.n)
        result.completions = [result.completions[i] for i in best]
    return result


def _failure(delta: Delta) -> ApiError:
    """An answer that could not go on: because of what was asked, or because of us."""
    message = delta.error or "The answer could not be finished."
    return ApiError(500 if message == STEP_FAILED else 400, message)
