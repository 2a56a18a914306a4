"""The engine under asyncio: streams, leaving early, errors, and stopping."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kilter.serve.async_engine import AsyncEngine, EngineStopped
from kilter.serve.engine import Engine
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
        long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        stream = serving.stream([1, 2], long)
        await anext(stream)

        def stop_now(_: Engine) -> None:  # between two steps, so the request is still running
            serving._stopping = True

        await serving.call(stop_now)
        with pytest.raises(EngineStopped):
            async for _ in stream:
                pass
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
