"""Embeddings: what they are (transformers' hidden states, pooled), and that nothing else matters:
not the chunks, not the neighbours, not a preemption, not the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kilter.models.batch import Batch
from kilter.serve.answer import Embedding
from kilter.serve.engine import Engine
from kilter.serve.llm import LLM
from kilter.serve.params import SamplingParams
from kilter.serve.request import Request
from tests.models import tiny
from tests.serve.tiny_engine import (
    CONTEXT,
    VOCAB,
    Result,
    check_result,
    frozen_model,
    make_engine,
    weights,
)
from tests.serve.tiny_tokenizer import save_byte_tokenizer

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 5, 17, 20, 21, 4, 4, 6]
POOLINGS = ("mean", "last")


def run(engine: Engine, steps: int = 2000) -> dict[int, np.ndarray]:
    """Runs to idle: vectors by request."""
    vectors = {}
    for _ in range(steps):
        if not engine.busy:
            break
        for delta in engine.step():
            if delta.embedding is not None:
                assert delta.finish_reason == "stop" and not delta.choices
                vectors[delta.request] = delta.embedding
    assert not engine.busy and engine.tree.pages.num_held == 0
    return vectors


def expected(prompt: list[int], pooling: str, *, normalize: bool = True, version: int = 0
             ) -> np.ndarray:
    """By definition, in one pass without a cache: rows added one by one in float64."""
    with torch.inference_mode():
        rows = frozen_model(version).hidden(Batch.of([prompt])).numpy().astype(np.float64)
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    vector = rows[-1] if pooling == "last" else total / len(rows)
    return (vector / np.sqrt((vector ** 2).sum()) if normalize else vector).astype(np.float32)


@pytest.mark.parametrize("name", ["llama-plain", "gemma3-plain"])
def test_vectors_are_transformers_hidden_states(name: str, tmp_path: Path) -> None:
    model = tiny.make(name, tmp_path)
    save_byte_tokenizer(tmp_path, 131)
    llm = LLM(tmp_path, context=64, kv_tokens=256, weights="fp32")
    prompts = [[5, 17, 99, 3, 42, 8, 8, 1], [7], list(range(20, 60))]
    for prompt, mean, last in zip(prompts, llm.embed(prompts, normalize=False),
                                  llm.embed(prompts, pooling="last", normalize=False),
                                  strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        assert np.abs(mean - hidden.mean(0).numpy()).max() < 1e-4
        assert np.abs(last - hidden[-1].numpy()).max() < 1e-4
    unit = llm.embed(prompts[0])[0]
    assert abs(np.linalg.norm(unit.astype(np.float64)) - 1) < 1e-6
    mean = llm.embed(prompts[0], normalize=False)[0]
    np.testing.assert_allclose(unit, mean / np.linalg.norm(mean), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_the_same_bits_in_any_chunk_and_company(chunk: int, pooling: Any) -> None:
    engine = make_engine(512, 4, prefill_tokens=chunk, mixed_tokens=chunk)
    answering = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    other = engine.submit(PROMPT[::-1], answering)
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:], PROMPT, [*PROMPT, 12]]
    numbers = [engine.submit_embedding(prompt, pooling=pooling, normalize=i % 2 == 0)
               for i, prompt in enumerate(prompts)]
    result = Result()
    vectors = {}
    while engine.busy:
        for delta in engine.step():
            if delta.request == other:
                result.take(delta)
            else:
                assert delta.embedding is not None
                vectors[delta.request] = delta.embedding
    check_result(result, PROMPT[::-1], answering)
    for i, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
        want = expected(prompt, pooling, normalize=i % 2 == 0)
        assert vectors[number].dtype == np.float32 and np.array_equal(vectors[number], want)


def test_only_the_last_tokens_vector_starts_from_the_cache() -> None:
    engine = make_engine(512, 4)
    engine.submit_embedding(PROMPT)
    run(engine)
    before = engine.stats()
    for pooling, cached in (("mean", 0), ("last", len(PROMPT) - 1)):
        number = engine.submit_embedding(PROMPT, pooling=pooling)  # type: ignore[arg-type]
        assert np.array_equal(run(engine)[number], expected(PROMPT, pooling))
        after = engine.stats()
        assert after.cached_prompt_tokens - before.cached_prompt_tokens == cached
        before = after


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted_embeddings_are_the_same_bits(pooling: Any) -> None:
    engine = make_engine(40, 1, prefill_tokens=3, mixed_tokens=3)
    engine.scheduler._fits = lambda *_: True  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    for first in (3, 4):
        engine.submit([first, *PROMPT[:3]], params)
    numbers = [engine.submit_embedding([20 + i, *PROMPT], pooling=pooling) for i in range(3)]
    vectors = run(engine)
    assert engine.scheduler.preemptions
    for i, number in enumerate(numbers):
        assert np.array_equal(vectors[number], expected([20 + i, *PROMPT], pooling))


@pytest.mark.parametrize("mode", ["restart", "continue", "abort"])
def test_a_vector_is_of_one_version_of_the_weights(mode: Any) -> None:
    engine = make_engine(256, 4, prefill_tokens=5)
    number = engine.submit_embedding(PROMPT)
    engine.step()
    engine.update_weights(weights(1), storage="fp32", in_flight=mode)
    vectors = run(engine)
    if mode == "abort":
        assert not vectors
    else:
        assert np.array_equal(vectors[number], expected(PROMPT, "mean", version=1))
        assert not np.array_equal(vectors[number], expected(PROMPT, "mean"))


def test_a_prompt_as_long_as_the_context_has_a_vector_and_nothing_bad_is_queued() -> None:
    engine = make_engine(64)
    prompt = [3 + i % 20 for i in range(CONTEXT)]
    number = engine.submit_embedding(prompt)
    assert np.array_equal(run(engine)[number], expected(prompt, "mean"))
    bad: list[tuple[Any, str, str]] = [
        ([], "mean", "empty"), ([VOCAB], "mean", "outside the vocabulary"),
        ([*prompt, 3], "mean", "shorten the prompt"), ([3], "max", "must be mean or last")]
    for prompt, pooling, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.submit_embedding(prompt, pooling=pooling)  # type: ignore[arg-type]
    assert not engine.busy


def test_an_aborted_or_failed_embedding_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(256, 4, prefill_tokens=5)
    number = engine.submit_embedding(PROMPT)
    engine.step()
    engine.abort(number)
    assert [d.finish_reason for d in engine.step()] == ["abort"]
    engine.submit_embedding(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(Embedding, "add", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert [(d.finish_reason, d.embedding) for d in engine.step()] == [("error", None)]
    assert engine.tree.pages.num_held == 0 and not engine.busy


def test_a_vector_of_zeros_is_not_divided_by_its_length() -> None:
    embedding = Embedding(0, 0, Request(0, [3], 1), None, "mean", True)
    embedding.add(torch.zeros(1, 4))
    assert embedding.vector().tolist() == [0.0] * 4


@pytest.mark.parametrize("sizes", [[5], [1, 4], [2, 3], [1, 2, 2], [3, 1, 1], [1] * 5])
def test_rows_are_added_one_by_one(sizes: list[int]) -> None:
    """Where the order shows: 1e20 swallows each 1 by itself, but not their sum in another order."""
    rows = torch.tensor([1e20, 1e4, 1e4, -1e20, 3.0])[:, None].repeat(1, 4)
    request = Request(0, [3] * 5, 5)
    embedding = Embedding(0, 0, request, None, "mean", False)
    for part in rows.split(sizes):
        embedding.add(part)
        request.computed += len(part)
    total = 0.0
    for row in rows[:, 0].tolist():
        total += row
    assert embedding.vector().tolist() == [np.float32(total / 5)] * 4
