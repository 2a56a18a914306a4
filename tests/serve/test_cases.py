"""The engine's half of the cases that users of other engines reported; numbers as in that list."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.serve.engine import Engine
from kilter.serve.exactness import random_model
from kilter.serve.llm import LLM
from kilter.serve.params import GrammarSpec, SamplingParams
from kilter.serve.request import Status
from kilter.serve.sampler import Choice
from tests.models import tiny
from tests.serve.tiny_engine import (
    CONTEXT,
    EOS,
    EOT,
    PIECES,
    VOCAB,
    Result,
    check_result,
    drain,
    make_engine,
    serve,
    spec,
    tokenizer,
    weights,
)
from tests.serve.tiny_tokenizer import save_byte_tokenizer

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 5, 17]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)


def forced(engine: Engine, tokens: list[int], monkeypatch: pytest.MonkeyPatch,
           params: SamplingParams) -> Result:
    """An answer of just these tokens."""
    def choose(logits_SV: Any, states: Any, ops: Any) -> list[Choice]:
        return [Choice(tokens[state.generated]) for state in states]

    with monkeypatch.context() as patch:
        patch.setattr("kilter.serve.engine.choose", choose)
        return serve(engine, [17], replace(params, max_tokens=len(tokens)))


# "…-cabbab": every way to spell it with the pieces we have
_SPELL = {"a": 3, "b": 4, "c": 5, "ab": 7, "ba": 8, "cab": 9, "bb": 11, "-": 20, "x": 17}


def spellings(text: str) -> list[list[int]]:
    if not text:
        return [[]]
    return [[token, *rest] for piece, token in _SPELL.items() if text.startswith(piece)
            for rest in spellings(text[len(piece):])]


@pytest.mark.parametrize("include_stop", [False, True])
def test_1_a_stop_string_never_leaks(monkeypatch: pytest.MonkeyPatch, include_stop: bool) -> None:
    """However the tokens cut it, also where a false start comes first."""
    engine = make_engine()
    for before, stop in (("xc", "cabba"), ("x", "ab"), ("cab", "abb"), ("xcabc", "cabb")):
        expected = (before + stop) if include_stop else before
        assert (before + stop).find(stop) == len(before)
        for tokens in spellings(before + stop + "x-"):
            result = forced(engine, tokens, monkeypatch,
                            SamplingParams(stop=(stop,), include_stop=include_stop))
            # A token may hold characters before the stop as well as its last ones.
            assert result.text == expected and result.finish_reason == "stop"
            assert len(result.tokens) < len(tokens)


def test_2_only_what_may_become_a_stop_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    tokens = [_SPELL[c] for c in "x-xcabxcab"]
    result = forced(engine, tokens, monkeypatch, SamplingParams(stop=("cabb" + "-" * 50,)))
    assert result.pieces == ["x", "-", "x", "", "", "", "cabx", "", "", "cab"]
    assert result.finish_reason == "length"


def test_4_prompt_logprobs_do_not_care_about_the_cache(tmp_path: Path) -> None:
    oracle = tiny.make("llama-plain", tmp_path)
    save_byte_tokenizer(tmp_path, 131)
    prompts = [list(range(5, 45)), list(range(5, 35)) + [100] * 5]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    seen = []
    for order in (prompts, prompts[::-1], [*prompts, *prompts]):
        llm = LLM(tmp_path, context=64)
        for prompt in order:
            answer = llm.generate(prompt, params)[0]
            assert answer.prompt_choices is not None and answer.cached_tokens == 0
            got = [c.logprob for c in answer.prompt_choices]
            with torch.inference_mode():
                rows = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
            assert got == pytest.approx(
                [float(rows[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-4)
            assert [c.token_id for c in answer.prompt_choices] == prompt[1:]
            seen.append((prompt, answer.prompt_choices))
    for prompt in prompts:
        assert len({repr(choices) for p, choices in seen if p == prompt}) == 1


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_5_the_same_bits_cold_cached_chunked_and_in_company(page_size: int) -> None:
    """Greedy tokens, their log-probabilities and those of the likeliest others."""
    cold = serve(make_engine(512, page_size), PROMPT, GREEDY)
    check_result(cold, PROMPT, GREEDY)
    for chunk in (1, 5, 64):
        engine = make_engine(512, page_size, prefill_tokens=chunk, mixed_tokens=chunk)
        company = [engine.submit([i] * (i % 20 + 1), replace(GREEDY, max_tokens=i))
                   for i in range(3, 20)]
        number = engine.submit(PROMPT, GREEDY)
        results = drain(engine)
        assert results[number, 0].choices == cold.choices and len(company) == 17
        cached = serve(engine, PROMPT, GREEDY)
        assert cached.choices == cold.choices and cached.cached == len(PROMPT) - 1


def test_6_no_tokens_but_the_prompts_logprobs() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    for _ in range(2):
        result = serve(engine, PROMPT, params)
        check_result(result, PROMPT, params)
        assert result.finish_reason == "length" and not result.tokens
        assert result.prompt is not None and len(result.prompt) == len(PROMPT) - 1
        check_result(serve(engine, PROMPT, GREEDY), PROMPT, GREEDY)
    full = [3] * CONTEXT  # nothing is generated, so the prompt may fill the context
    check_result(serve(engine, full, params), full, params)
    for size, tokens in ((1, CONTEXT), (16, CONTEXT), (1, CONTEXT - 1)):
        tight = make_engine(tokens, size)  # and the cache
        check_result(serve(tight, full[:tokens], params), full[:tokens], params)


def test_7_an_empty_prompt_is_an_error_and_the_engine_lives() -> None:
    engine = make_engine()
    for prompt in ([], tokenizer().encode("")):
        with pytest.raises(ValueError, match="The prompt is empty"):
            engine.submit(prompt, GREEDY)
    check_result(serve(engine, [3], GREEDY), [3], GREEDY)


@pytest.mark.parametrize("page_size", [1, 16])
def test_8_9_prompts_about_as_long_as_the_context(page_size: int) -> None:
    """An answer or an error at once, and never a wait."""
    engine = make_engine(2 * CONTEXT, page_size)
    for length in (CONTEXT - 2, CONTEXT - 1):
        prompt = [3] * length
        result = serve(engine, prompt, GREEDY)
        assert len(result.tokens) == CONTEXT - length and result.finish_reason == "length"
        check_result(result, prompt, GREEDY)
    for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT, 100_000):
        with pytest.raises(ValueError, match=rf"prompt has {length} tokens and the context 48"):
            engine.submit([3] * length, GREEDY)
        assert not engine.busy


def test_8_a_cache_smaller_than_the_context_is_the_context() -> None:
    engine = make_engine(8, 1)
    assert engine.max_context == 8
    with pytest.raises(ValueError, match="prompt has 8 tokens and the context 8"):
        engine.submit([3] * 8, GREEDY)
    result = serve(engine, [3] * 5, GREEDY)
    assert len(result.tokens) == 3 and result.finish_reason == "length"


def test_10_many_requests_on_a_pool_for_one() -> None:
    """All end, and right; the oldest running request gets a token or a chunk in every step."""
    engine = make_engine(CONTEXT, 3, prefill_tokens=7, mixed_tokens=7)
    engine.scheduler._fits = lambda *_: True  # type: ignore[method-assign]  # admit too many
    prompts = [[3 + i % 15] * (i % 9 + 1) for i in range(20)]
    params = replace(GREEDY, max_tokens=100)
    numbers = [engine.submit(prompt, params) for prompt in prompts]
    results = {number: Result() for number in numbers}
    for _ in range(4000):
        if not engine.busy:
            break
        oldest = engine.scheduler.running[0] if engine.scheduler.running else None
        before = (oldest.computed, oldest.preemptions) if oldest else None
        for delta in engine.step():
            results[delta.request].take(delta)
        if oldest is not None and oldest.status is not Status.FINISHED:
            assert (oldest.computed, -oldest.preemptions) > (before[0], -before[1])  # type: ignore[index]
    assert engine.scheduler.preemptions > 20
    for number, prompt in zip(numbers, prompts, strict=True):
        check_result(results[number], prompt, params)


def test_11_identical_prompts_at_the_same_time() -> None:
    """On a tiny pool: as if alone, and every page that is read is owned."""
    alone = serve(make_engine(), PROMPT, GREEDY)
    for page_size in (1, 4):
        for salt in (None, "own"):  # with a salt each they really are computed side by side
            engine = make_engine(60, page_size)
            numbers = [engine.submit(PROMPT, GREEDY, salt=salt and i) for i in range(4)]
            results: dict[int, Result] = {number: Result() for number in numbers}
            while engine.busy:
                for delta in engine.step():
                    results[delta.request].take(delta)
                for request in engine.scheduler.running:
                    assert all(engine.tree.pages.is_held(page) for page in request.pages)
                    assert len(set(request.pages)) == len(request.pages)
            assert all(r.choices == alone.choices for r in results.values())


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_12_a_fully_cached_prompt(page_size: int) -> None:
    """Its last token is computed once more, and what follows reads one copy of the rest."""
    engine = make_engine(128, page_size)
    cold = serve(engine, PROMPT, GREEDY)
    number = engine.submit(PROMPT, GREEDY)
    tables: list[list[int]] = []
    result = Result()
    while engine.busy:
        for delta in engine.step():
            result.take(delta)
        tables += [list(request.pages) for request in engine.scheduler.running]
    assert result.cached == len(PROMPT) - 1 and result.choices == cold.choices
    assert all(later[:len(table)] == table
               for table, later in pairwise(tables)) and number == 1
    whole = PROMPT + cold.tokens  # and a prompt that ends where a cached answer did
    check_result(serve(engine, whole, GREEDY), whole, GREEDY)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 60), st.booleans())
def test_14_abort_at_any_step(steps: int, keep_others: bool) -> None:
    """Waiting, in a chunk, decoding, preempted, about to finish: nothing after it, no page lost."""
    engine = make_engine(CONTEXT, 1, prefill_tokens=5, mixed_tokens=5)
    engine.scheduler._fits = lambda *_: True  # type: ignore[method-assign]
    numbers = [engine.submit([3 + i, *PROMPT], replace(GREEDY, n=1 + i % 2)) for i in range(4)]
    results: dict[tuple[int, int], Result] = {}

    def step() -> None:
        for delta in engine.step():
            results.setdefault((delta.request, delta.index), Result()).take(delta)

    for _ in range(steps):
        if engine.busy:
            step()
    gone = numbers[1:2] if keep_others else numbers
    before = {key: len(result.tokens) for key, result in results.items()}
    for number in gone:
        engine.abort(number)
    engine.check_integrity()
    if not keep_others:
        assert engine.tree.pages.num_held == 0
    while engine.busy:
        step()
    for (number, index), result in results.items():
        if number in gone and result.finish_reason == "abort":
            assert len(result.tokens) == before.get((number, index), 0)
        else:
            check_result(result, [3 + numbers.index(number), *PROMPT],
                         replace(GREEDY, n=1 + numbers.index(number) % 2), index)
    assert len(results) == 6
    pages = engine.tree.pages
    assert pages.num_free + pages.num_cached == pages.num_pages


def test_16_a_seed_is_a_requests_own() -> None:
    """Alone, beside requests with no seed or another, after preemption, and n = 4 of it."""
    params = SamplingParams(max_tokens=10, seed=5, temperature=1.5, n=4, ignore_eos=True)
    engine = make_engine(512)
    number = engine.submit(PROMPT, params)
    alone = [r.tokens for _, r in sorted(drain(engine).items())]
    assert len({tuple(tokens) for tokens in alone}) == 4 and number == 0
    small = make_engine(CONTEXT, 1)
    small.scheduler._fits = lambda *_: True  # type: ignore[method-assign]
    for crowd in (engine, small):
        for other in (None, 5, 6):
            crowd.submit([4, *PROMPT], replace(params, seed=other, n=2))
            number = crowd.submit(PROMPT, params)
            crowd.submit(PROMPT[1:], replace(params, seed=other, n=1))
            results = drain(crowd)
            assert [results[number, i].tokens for i in range(4)] == alone
    assert small.scheduler.preemptions > 0
    unseeded = {tuple(serve(engine, PROMPT, replace(params, seed=None, n=1)).tokens)
                for _ in range(5)}
    assert len(unseeded) == 5


def test_17_logit_bias() -> None:
    engine = make_engine()
    for token in (-1, VOCAB, VOCAB + 10**6):
        with pytest.raises(ValueError, match=rf"logit_bias .* {token}"):
            engine.submit(PROMPT, replace(GREEDY, logit_bias={token: 1.0}))
    for size in (100.0, 1e9):
        for token in (3, VOCAB - 1):
            want = replace(GREEDY, logit_bias={token: size})
            result = serve(engine, PROMPT, want)
            assert result.tokens == [token] * 12
            check_result(result, PROMPT, want)
            ban = replace(GREEDY, logit_bias={token: -size, 4: size}, temperature=5.0, seed=1)
            banned = serve(engine, PROMPT, ban)
            assert token not in banned.tokens
            assert all(np.isfinite(c.logprob) for c in banned.choices)


BROKEN: list[Any] = [
    "{", "", "[]", "3", "null", '"x"', "{'type': 'object'}", '{"type": "strng"}', '{"type": 3}',
    '{"type": ["object", "nope"]}', '{"$ref": "#/nowhere"}', '{"$ref": "http://example.org/x"}',
    '{"properties": []}', '{"properties": {"a": 3}}', '{"required": "a"}', '{"items": 3}',
    '{"enum": []}', '{"enum": 3}', '{"anyOf": []}', '{"anyOf": 3}', '{"allOf": {}}',
    '{"type": "string", "pattern": "("}', '{"type": "string", "pattern": "(?=a)a"}',
    '{"type": "string", "minLength": -1}', '{"type": "string", "minLength": 5, "maxLength": 2}',
    '{"type": "integer", "minimum": 5, "maximum": 2}', '{"type": "array", "minItems": "x"}',
    '{"type": "number", "multipleOf": 0}', '{"additionalProperties": 5}', '{"const": }',
    "[" * 100_000, '{"not": {}}',
]


def test_18_broken_schemas_fail_alone() -> None:
    engine = make_engine()
    healthy = engine.submit(PROMPT, GREEDY)
    engine.step()
    refused = 0
    for schema in BROKEN:
        try:
            number = engine.submit(PROMPT, replace(GREEDY, grammar=GrammarSpec("json_schema",
                                                                               schema)))
        except ValueError as error:
            assert str(error)
            refused += 1
        else:
            engine.abort(number)
    assert refused >= 30
    result = drain(engine)[healthy, 0]
    assert result.finish_reason == "length" and len(result.tokens) == 11  # one came before
    check_result(serve(engine, PROMPT, GREEDY), PROMPT, GREEDY)


@pytest.mark.parametrize("end", [EOS, EOT])
def test_21_end_tokens(end: int) -> None:
    """The tokenizer's own and the extra one of generation_config alike."""
    engine = make_engine()
    likely = {end: 100.0, 5: 50.0, 6: 40.0}

    def tokens(**changes: Any) -> tuple[list[int], str | None]:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "logit_bias": likely,
                                   **changes})
        result = serve(engine, PROMPT, params)
        check_result(result, PROMPT, params)
        return result.tokens, result.finish_reason

    assert tokens() == ([end], "stop")
    assert tokens(ignore_eos=True) == ([end] * 6, "length")
    assert tokens(min_tokens=3) == ([5, 5, 5, end], "stop")
    assert tokens(min_tokens=6) == ([5] * 6, "length")
    assert tokens(ignore_eos=True, stop_token_ids=[end]) == ([end], "stop")
    assert tokens(stop_token_ids=[5], min_tokens=2) == ([6, 6, end], "stop")
    assert tokens(stop_token_ids=[5], logit_bias={5: 100.0}) == ([5], "stop")


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-4])
def test_22_cold_temperatures_are_greedy(temperature: float) -> None:
    engine = make_engine(512)
    # Logits as far apart as a trained model's, so that 1e-4 leaves nothing to chance.
    engine.update_weights({"head.weight": weights(0)["head.weight"] * 100}, storage="fp32")
    expected = serve(engine, PROMPT, GREEDY)
    numbers = []
    for changes in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.9}, {"top_p": 1e-9},
                    {"top_k": 2, "top_p": 0.3, "min_p": 0.1, "seed": 3}):
        numbers.append(engine.submit(PROMPT, replace(GREEDY, temperature=temperature, **changes)))
        engine.submit(PROMPT, replace(GREEDY, temperature=5.0, seed=len(numbers)))
    results = drain(engine)
    assert all(r.finish_reason == "length" and len(r.tokens) == 12 for r in results.values())
    for number in numbers:
        assert results[number, 0].choices == expected.choices


def test_22_logits_that_are_broken_end_their_request_alone() -> None:
    """NaN or infinite for one token's row; a mixed batch of greedy and random neighbours."""
    model = random_model(spec(), "fp32")
    engine = make_engine(model=model)
    real = engine.executor.run

    def poisoned(work: Any) -> torch.Tensor:
        logits = real(work).clone()
        rows = np.cumsum([chunk.rows for chunk in work]) - 1
        for row, chunk in zip(rows, work, strict=True):
            if chunk.rows and chunk.request.tokens[0] == 4:
                logits[row] = float("nan")
            if chunk.rows and chunk.request.tokens[0] == 5:
                logits[row] = -float("inf")
        return logits

    engine.executor.run = poisoned  # type: ignore[method-assign]
    numbers = [engine.submit([first, *PROMPT], replace(GREEDY, temperature=t, seed=1))
               for first in (3, 4, 5) for t in (0.0, 1.0)]
    results = drain(engine)
    for number, first in zip(numbers, (3, 3, 4, 4, 5, 5), strict=True):
        result = results[number, 0]
        if first == 3:
            check_result(result, [first, *PROMPT],
                         replace(GREEDY, temperature=float(number % 2), seed=1))
        else:
            assert result.finish_reason == "error" and not result.tokens
            assert result.error is not None and "no finite maximum" in result.error


def test_24_new_weights_never_meet_old_prefixes() -> None:
    engine = make_engine()
    old = serve(engine, PROMPT, GREEDY)
    assert engine.tree.num_pages > 0
    for version in (1, 2):
        engine.update_weights(weights(version), storage="fp32")
        assert engine.tree.num_pages == 0  # nothing could ever use them
        new = serve(engine, PROMPT, GREEDY)
        assert new.cached == 0 and set(new.versions) == {version}
        check_result(new, PROMPT, GREEDY)
        assert new.choices != old.choices
        again = serve(engine, PROMPT, GREEDY)
        assert again.cached == len(PROMPT) - 1 and again.choices == new.choices
    with pytest.raises(ValueError, match="nope"):
        engine.update_weights({"nope": torch.zeros(1)})
    with pytest.raises(ValueError, match="in_flight"):
        engine.update_weights({}, in_flight="later")  # type: ignore[arg-type]
    assert engine.weights_version == 2


def test_3_a_lone_byte_for_ever() -> None:
    """Text comes out all along, whole at the end, and a token costs the same late as early: each
    is pushed once, and nothing is decoded again."""
    positions = 2100
    engine = make_engine(4096, 64, context=positions,
                         model=random_model(spec(positions=positions), "fp32"))
    lone = PIECES.index("â")
    params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True,
                            logit_bias={lone: 1e9})
    result = serve(engine, [3], params)
    assert result.tokens == [lone] * 2000
    assert result.text == "\ufffd" * 2000 and max(map(len, result.pieces)) <= 2
