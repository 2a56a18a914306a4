"""The engine under asyncio: streams, leaving early, errors, and stopping."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kilter.serve.async_engine import AsyncEngine, EngineFailed, EngineStopped
from kilter.serve.engine import Delta, Engine
from kilter.serve.llm import LLM
from kilter.serve.params import SamplingParams
from tests.models import tiny
from tests.serve.tiny_tokenizer import save_byte_tokenizer


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    tiny.make("llama-plain", tmp_path)
    save_byte_tokenizer(tmp_path, 131)
    return LLM(tmp_path, context=64, kv_tokens=512).engine


PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


async def collect(serving: AsyncEngine, prompt: list[int], params: SamplingParams = PARAMS
                  ) -> list[int]:
    return [choice.token_id async for delta in serving.stream(prompt, params)
            for choice in delta.choices]


def test_streams_side_by_side_equal_the_engine_alone(engine: Engine) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(1, 9)]

    async def run() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            return await asyncio.gather(*(collect(serving, prompt) for prompt in prompts))

    together = asyncio.run(run())
    for prompt, tokens in zip(prompts, together, strict=True):
        engine.submit(prompt, PARAMS)
        alone = []
        while engine.busy:
            alone += [c.token_id for delta in engine.step() for c in delta.choices]
        assert tokens == alone and len(tokens) == 12


def test_a_listener_that_leaves_aborts_its_request_alone(engine: Engine) -> None:
    long = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)

    async def run() -> list[int]:
        async with AsyncEngine(engine) as serving:
            other = asyncio.create_task(collect(serving, [5, 6], long))
            stream = serving.stream([1, 2], long)
            await anext(stream)
            await stream.aclose()
            cancelled = asyncio.create_task(collect(serving, [7, 8], long))
            await asyncio.sleep(0)
            cancelled.cancel()
            tokens = await other
            assert await serving.call(lambda e: e.scheduler.idle)
            await serving.call(lambda e: e.check_integrity())
            assert await serving.call(lambda e: e.tree.pages.num_held) == 0
            return tokens

    assert len(asyncio.run(run())) == 50


def test_bad_requests_fail_alone_and_stopping_fails_the_open_ones(engine: Engine) -> None:
    async def run() -> None:
        serving = AsyncEngine(engine)
        serving.start()
        with pytest.raises(ValueError, match="empty"):
            await collect(serving, [])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await collect(serving, [10**6])
        assert len(await collect(serving, [1])) == 12
        real = engine.step

        def last_step() -> list[Delta]:
            serving._stopping = True
            return real()

        engine.step = last_step  # type: ignore[method-assign]
        tokens: list[int] = []
        with pytest.raises(EngineStopped):
            async for delta in serving.stream([1, 2], PARAMS):
                tokens += [c.token_id for c in delta.choices]
        assert len(tokens) == 1
        await asyncio.to_thread(serving.stop)
        with pytest.raises(EngineStopped):
            await collect(serving, [1])
        assert not serving.alive

    asyncio.run(run())


def test_a_failing_step_ends_its_requests_and_not_the_engine(
        engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            real, calls = engine.executor.run, []

            def run_or_fail(work: list) -> object:
                calls.append(len(work))
                if len(calls) == 3:
                    raise RuntimeError("the device is gone")
                return real(work)

            monkeypatch.setattr(engine.executor, "run", run_or_fail)
            reasons = [d.finish_reason async for d in serving.stream([1, 2], PARAMS)]
            assert reasons[-1] == "error"
            assert len(await collect(serving, [1, 2])) == 12

    asyncio.run(run())


def test_one_wake_up_of_each_loop_per_step_however_many_listen(engine: Engine) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(1, 9)]
    wakes: dict[int, int] = {}

    async def run(number: int) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        real = loop.call_soon_threadsafe

        def count(callback: Any, *args: Any, **kwargs: Any) -> Any:
            if callback.__name__ == "_give":
                wakes[number] = wakes.get(number, 0) + 1
            return real(callback, *args, **kwargs)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        return await asyncio.gather(*(collect(serving, prompt) for prompt in prompts))

    serving = AsyncEngine(engine)
    serving.start()
    with ThreadPoolExecutor(2) as pool:  # each with an event loop of its own
        first, second = pool.map(lambda number: asyncio.run(run(number)), range(2))
    serving.stop()
    assert first == second and all(len(tokens) == 12 for tokens in first)
    assert len(wakes) == 2 and max(wakes.values()) <= serving.stats.steps


def test_coalesced_news_come_at_the_end_and_are_the_same(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1, seed=5, n=3, ignore_eos=True)

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            streamed = [d async for d in serving.stream([3, 4, 5], params)]
            loop, taken = asyncio.get_running_loop(), []
            real = loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda callback, *args: (  # type: ignore[method-assign]
                taken.append(callback.__name__), real(callback, *args))[1]
            whole = [d async for d in serving.stream([3, 4, 5], params, coalesce=True)]
            assert taken.count("_give") == 1
            for index in range(3):
                one, other = ([c for d in deltas if d.index == index for c in d.choices]
                              for deltas in (streamed, whole))
                assert one == other and len(one) == 12
            assert [d.time for d in whole] == sorted(d.time for d in whole)
            assert whole[-1].time > whole[0].time > 0

    asyncio.run(run())


def test_a_step_comes_as_one_list(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, n=3, ignore_eos=True)

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            steps = [deltas async for deltas in serving.stream_steps([3, 4, 5], params)]
            for deltas in steps:
                assert {d.index for d in deltas} == {0, 1, 2}
            one = [d async for d in serving.stream([3, 4, 5], params)]
            assert [(d.index, d.choices) for deltas in steps for d in deltas] == [
                (d.index, d.choices) for d in one]

    asyncio.run(run())


def test_a_pause_holds_every_request_and_ends_none(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            alone = await collect(serving, [1, 2])
            real, steps = engine.step, serving.stats.steps + 1

            def step() -> list[Delta]:
                deltas = real()
                if engine.stats().steps == steps:
                    serving.pause()
                return deltas

            engine.step = step  # type: ignore[method-assign]
            stream = serving.stream([1, 2], PARAMS)
            tokens = [c.token_id for c in (await anext(stream)).choices]
            waiting = asyncio.create_task(collect(serving, [1, 2]))
            gone = asyncio.create_task(collect(serving, [7, 8]))
            while serving.stats.waiting < 2:
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait([gone])
            await serving.call(lambda e: None)
            assert serving.stats.steps == steps and serving.stats.running == 1
            assert serving.stats.waiting == 1
            while serving.stalled_seconds:  # the engine's thread is about to rest
                await asyncio.sleep(0)
            serving.resume()
            tokens += [c.token_id async for d in stream for c in d.choices]
            assert tokens == alone == await waiting
            assert serving.stats.steps > steps

    asyncio.run(run())


def test_vectors_and_what_ends_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            vectors = await asyncio.gather(*(serving.embed([i, 4, 5]) for i in (1, 2, 1)))
            assert np.array_equal(vectors[0], vectors[2])
            assert not np.array_equal(vectors[0], vectors[1])
            with pytest.raises(ValueError, match="pooling"):
                await serving.embed([1], pooling="max")
            with monkeypatch.context() as patch:
                patch.setattr(engine.executor, "run", lambda work: 1 / 0)
                with pytest.raises(EngineFailed, match="step"):
                    await serving.embed([1])
            assert np.array_equal(await serving.embed([1, 4, 5]), vectors[0])
            assert serving.stats.failed_steps == 1

    asyncio.run(run())


def test_an_engine_that_cannot_go_on_leaves_nobody_waiting(
        engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that no request can be ended for would come again for ever."""
    async def run() -> None:
        real = engine.scheduler.step
        monkeypatch.setattr(engine.scheduler, "step",
                            lambda: real() if engine.scheduler.steps < 5 else 1 / 0)
        serving = AsyncEngine(engine)
        serving.start()
        tokens: list[int] = []
        with pytest.raises(EngineStopped):
            async for delta in serving.stream([1, 2], PARAMS):
                tokens += [c.token_id for c in delta.choices]
        assert len(tokens) == 5  # what was chosen before is told before
        with pytest.raises(EngineStopped):
            await serving.call(lambda e: None)
        await asyncio.to_thread(serving.stop)
        assert not serving.alive and engine.tree.pages.num_held == 0

    asyncio.run(run())
