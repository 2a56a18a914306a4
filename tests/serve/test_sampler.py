"""Sampling: the distribution that is asked for, from a seed that nothing else touches."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kilter.ops import exact_ops
from kilter.serve.sampler import (
    Choice,
    GrammarSpec,
    SamplingError,
    SamplingParams,
    SamplingState,
    best_answers,
    choose,
    sample,
    sampling_distribution,
    score_tokens,
    stream_key,
    uniform,
)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([5, 40, 700, 3000]),
       temperature=st.sampled_from([0.3, 1.0, 2.5]), top_k=st.sampled_from([0, 1, 3, 50, 10**6]),
       top_p=st.sampled_from([1.0, 0.95, 0.4, 0.01]), min_p=st.sampled_from([0.0, 0.02, 0.5]))
def test_distribution_equals_transformers(seed: int, size: int, temperature: float, top_k: int,
                                          top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3
    scores = torch.from_numpy(logits.astype(np.float64))[None] / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        mass = scores.softmax(-1).sort(descending=True).values.cumsum(-1)
        assume((mass - top_p).abs().min() > 1e-6)  # else rounding decides which token is the last
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        probs = scores.softmax(-1)
        assume((probs / probs.max() - min_p).abs().min() > 1e-6)
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected = scores.softmax(-1)[0].numpy()
    ids, probs = sampling_distribution(logits, SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    got = np.zeros(size)
    got[ids] = probs
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
@pytest.mark.parametrize("other", [{}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.3}])
def test_tiny_temperatures_are_greedy(temperature: float, other: dict[str, float]) -> None:
    logits = np.array([0.1, 9.0, 9.0, -1e30, -np.inf], dtype=np.float32)
    assert sample(logits, SamplingParams(temperature=temperature, **other), seed=1, step=0) == 1


def test_a_small_temperature_never_overflows() -> None:
    logits = np.array([3e38, -3e38, 2.9e38, -np.inf], dtype=np.float32)
    ids, probs = sampling_distribution(logits, SamplingParams(temperature=1e-4))
    assert probs[list(ids).index(0)] == 1.0
    assert np.isfinite(probs).all()


def test_broken_logits_are_an_error() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="no finite maximum"):
            sample(np.array([0.0, bad], dtype=np.float32), SamplingParams(), 0, 0)
    with pytest.raises(ValueError, match="no finite maximum"):
        sample(np.full(3, -np.inf, dtype=np.float32), SamplingParams(), 0, 0)


@pytest.mark.parametrize("size", [3, 255, 256, 257, 1000, 1025])
@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_a_forbidden_token_is_never_drawn(monkeypatch: pytest.MonkeyPatch, size: int, number: float
                                          ) -> None:
    """Not even by the rounding of sums at either end of the random numbers."""
    monkeypatch.setattr("kilter.serve.sampler.uniform", lambda seed, step: number)
    for allowed in ({size // 2}, {0, 1}, {size - 2}, set(range(1, size - 1))):
        logits = np.full(size, -np.inf, dtype=np.float32)
        logits[list(allowed)] = np.random.default_rng(0).normal(size=len(allowed)) * 8
        assert sample(logits, SamplingParams(), 0, 0) in allowed
        assert sample(logits, SamplingParams(top_p=0.999), 0, 0) in allowed


@pytest.mark.parametrize("size", [5, 256, 700, 5000])
def test_tokens_are_drawn_by_the_running_sum(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    logits = np.random.default_rng(size).normal(size=size).astype(np.float32) * 2
    running = np.cumsum(np.exp(logits.astype(np.float64)))
    for number in np.random.default_rng(1).random(300):
        monkeypatch.setattr("kilter.serve.sampler.uniform", lambda seed, step, n=number: n)
        expected = int(np.searchsorted(running, number * running[-1], side="right"))
        if abs(running - number * running[-1]).min() > 1e-5 * running[-1]:
            assert sample(logits, SamplingParams(), 0, 0) == expected


def test_the_empirical_distribution_is_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    params = SamplingParams(temperature=1.0)
    counts = np.bincount([sample(logits, params, seed=9, step=i) for i in range(4000)])
    expected = np.array([0.5, 0.3, 0.2]) * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 dof, p = 0.001


def test_the_random_number_depends_on_seed_and_step_alone() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(s, t) for s in range(30) for t in range(30)}) == 900


def test_answers_of_one_seed_have_their_own_streams() -> None:
    keys = {stream_key(seed, i) for seed in (0, 1, 2**64 - 1) for i in range(4)}
    assert len({uniform(key, step) for key in keys for step in range(20)}) == 12 * 20
    assert uniform(stream_key(7, 0), 3) == uniform(7, 3)  # the first answer is that of n = 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), top_p=st.floats(0.001, 0.999), levels=st.integers(1, 4000))
def test_the_nucleus_is_the_smallest_set(seed: int, top_p: float, levels: int) -> None:
    """Brute force by sorting, with many equal logits and vocabularies that are halved often."""
    logits = (np.random.default_rng(seed).integers(0, levels, 5000) * (5 / levels)
              ).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind="stable")
    mass = np.cumsum(weights[order]) / weights.sum()
    count = int(np.searchsorted(mass, top_p)) + 1
    ids, probs = sampling_distribution(logits, SamplingParams(top_p=top_p))
    assert (np.diff(ids) > 0).all()
    if abs(mass[count - 1] - top_p) > 1e-6 and abs(mass[count - 2] - top_p) > 1e-6:
        np.testing.assert_array_equal(ids, np.sort(order[:count]))
        np.testing.assert_allclose(probs, weights[ids] / weights[ids].sum(), rtol=2e-6)


# ---- what acts on raw logits ----

@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), penalty=st.sampled_from([0.5, 1.1, 2.0]))
def test_repetition_penalty_equals_transformers(seed: int, penalty: float) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=50).astype(np.float32) * 5
    prompt, output = rng.integers(0, 50, 30).tolist(), rng.integers(0, 50, 90).tolist()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), torch.from_numpy(logits)[None].clone())[0].numpy()
    state = SamplingState(SamplingParams(repetition_penalty=penalty), prompt, output_ids=output)
    np.testing.assert_array_equal(state.processed(logits), expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), frequency=st.sampled_from([0.0, 0.5, -1.0]),
       presence=st.sampled_from([0.0, 1.5, -0.25]))
def test_openai_penalties_count_the_output(seed: int, frequency: float, presence: float) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c over the output, not the prompt."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=300).astype(np.float32)
    prompt, output = rng.integers(0, 300, 30).tolist(), rng.integers(0, 300, 200).tolist()
    counts = np.bincount(output, minlength=300)
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    row = SamplingState(params, prompt, output_ids=output).processed(logits)
    np.testing.assert_allclose(row, logits - counts * frequency - (counts > 0) * presence,
                               atol=1e-5)


def test_penalties_act_after_the_bias_in_the_written_order() -> None:
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0, frequency_penalty=0.5,
                            presence_penalty=0.25)
    state = SamplingState(params, prompt_ids=[1], output_ids=[0, 0])
    row = state.processed(np.array([1.0, -1.0, 4.0], dtype=np.float32))
    assert row.tolist() == [(1 + 3) / 2 - 2 * 0.5 - 0.25, -1 * 2.0, 4.0]


def test_state_follows_tokens_one_by_one() -> None:
    """Incremental bookkeeping equals a state made from the tokens, as after preemption."""
    rng = np.random.default_rng(0)
    params = SamplingParams(frequency_penalty=0.3, presence_penalty=-0.2, repetition_penalty=1.3,
                            seed=4, min_tokens=3)
    prompt, output = rng.integers(0, 500, 40).tolist(), rng.integers(0, 500, 300).tolist()
    state = SamplingState(params, prompt, end_ids=[2])
    for i, token in enumerate(output):
        logits = rng.normal(size=500).astype(np.float32)
        if i % 37 == 0 or i < 5:
            again = SamplingState(params, prompt, end_ids=[2], output_ids=output[:i])
            np.testing.assert_array_equal(again.processed(logits), state.processed(logits))
            assert again.choose(logits) == state.choose(logits)
        state.accept(token)


@pytest.mark.parametrize("value", [100.0, 1e9, 1e30])
def test_large_biases_are_respected(value: float) -> None:
    logits = np.array([5.0, 0.0, -3.0, 3e38], dtype=np.float32)[:3]
    for temperature in (0.0, 1e-8, 1e-4, 1.0, 100.0):
        params = SamplingParams(temperature=temperature, logit_bias={2: value, 0: -value}, seed=1)
        state = SamplingState(params)
        assert np.isfinite(state.processed(logits)).all()
        if value > 1000 or temperature <= 1:
            assert {state.choose(logits) for _ in range(5)} == {2}
    # every token down by the same much: still a choice
    params = SamplingParams(temperature=0, logit_bias={i: -value for i in range(3)})
    assert SamplingState(params).choose(logits * 0) == 0


def test_ids_outside_the_vocabulary_are_named() -> None:
    params = SamplingParams(logit_bias={-1: 1, 100: 2, 10**6: 3, 5: 1}, stop_token_ids=[100, 3],
                            logprobs=101)
    with pytest.raises(ValueError, match=r"of 100 tokens: -1, 100, 1000000; stop_token_ids .* "
                                         r"100; logprobs is 101"):
        params.check(100)
    params.__class__(logit_bias={0: 1, 99: 1}, stop_token_ids=(99,), logprobs=100).check(100)


def test_min_tokens_equals_transformers_and_masks_stop_ids_too() -> None:
    logits = np.zeros(10, dtype=np.float32)
    params = SamplingParams(min_tokens=3, stop_token_ids=[7])
    state = SamplingState(params, [1, 2], end_ids=[4, 9])
    oracle = MinNewTokensLengthLogitsProcessor(2, 3, [4, 7, 9])
    for step in range(5):
        ids = torch.zeros(1, 2 + step, dtype=torch.int64)
        expected = oracle(ids, torch.from_numpy(logits)[None].clone())[0].numpy()
        np.testing.assert_array_equal(state.processed(logits), expected)
        state.accept(0)


class OnlyTokens:
    """A grammar that allows the same tokens always."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = list(allowed)
        self.seen: list[int] = []

    @property
    def is_finished(self) -> bool:
        return self.seen[-1:] == self.allowed[-1:]

    def mask(self, logits_V: np.ndarray) -> None:
        keep = logits_V[self.allowed]
        logits_V[:] = -np.inf
        logits_V[self.allowed] = keep

    def accept(self, token: int) -> None:
        if token not in self.allowed:
            raise ValueError("no")
        self.seen.append(token)


def test_a_grammar_that_can_only_end_does_before_min_tokens() -> None:
    logits = np.array([9, 1, 2, 3], dtype=np.float32)
    params = SamplingParams(temperature=0, min_tokens=5)
    assert SamplingState(params, end_ids=[3], grammar=OnlyTokens(2, 3)).choose(logits) == 2
    assert SamplingState(params, end_ids=[3], grammar=OnlyTokens(3)).choose(logits) == 3
    with pytest.raises(SamplingError, match="allow no token"):
        SamplingState(params, end_ids=[3], grammar=OnlyTokens()).choose(logits)


def test_the_grammar_hears_of_every_token_and_ends_the_answer() -> None:
    state = SamplingState(SamplingParams(ignore_eos=True), end_ids=[3], grammar=OnlyTokens(2, 3))
    state.accept(2)
    assert not state.finished and not SamplingState(SamplingParams()).finished
    state.accept(3)
    assert state.finished
    with pytest.raises(SamplingError, match="no"):
        state.accept(1)


def test_the_given_row_is_not_changed() -> None:
    logits = np.arange(5, dtype=np.float32)
    state = SamplingState(SamplingParams(logit_bias={0: 1}, frequency_penalty=1, min_tokens=2),
                          end_ids=[1], grammar=OnlyTokens(0, 1), output_ids=[1])
    state.processed(logits)
    assert logits.tolist() == [0, 1, 2, 3, 4]


# ---- batches ----

MIXED: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1e-8, "top_p": 0.5}, {"temperature": 1e-4, "min_p": 0.1},
    {"seed": 1}, {"seed": 2, "top_k": 5, "logprobs": 0}, {"seed": 3, "top_p": 0.9, "logprobs": 4},
    {"temperature": 0, "logprobs": 2}, {"seed": 4, "min_p": 0.2, "temperature": 2.0},
    {"temperature": 0, "repetition_penalty": 1.5}, {"seed": 5, "logit_bias": {3: 1e9}},
    {"seed": 6, "frequency_penalty": 1.0, "presence_penalty": 0.5}, {"seed": 7, "min_tokens": 50},
    {"temperature": 0, "logprobs": 0, "min_tokens": 3},
]


def test_a_row_is_chosen_as_if_it_were_alone() -> None:
    rng = np.random.default_rng(1)
    states = [SamplingState(SamplingParams(**kwargs), rng.integers(0, 1000, 20).tolist(),
                            end_ids=[2], output_ids=rng.integers(0, 1000, 9).tolist())
              for kwargs in MIXED]
    for _ in range(6):
        logits = torch.from_numpy(rng.normal(size=(len(MIXED), 1000)).astype(np.float32) * 4)
        logits[0, 5:9] = -math.inf
        before = logits.clone()
        together = choose(logits, states, exact_ops())
        alone = [choose(logits[i:i + 1], [state], exact_ops())[0]
                 for i, state in enumerate(states)]
        order = rng.permutation(len(MIXED)).tolist()
        shuffled = choose(logits[order], [states[i] for i in order], exact_ops())
        assert together == alone == [shuffled[order.index(i)] for i in range(len(MIXED))]
        assert torch.equal(logits, before)
        for i, choice in enumerate(together):
            assert isinstance(choice, Choice)
            if MIXED[i].get("temperature", 1) <= 1e-4 and "repetition_penalty" not in MIXED[i]:
                assert choice.token_id == int(logits[i].argmax())
            states[i].accept(choice.token_id)


def test_a_seeded_answer_depends_on_no_neighbour() -> None:
    """Case 16: alone, among unseeded and other seeds, and after preemption; n = 4 are distinct."""
    rows = torch.randn(30, 200, generator=torch.Generator().manual_seed(0))

    def run(neighbours: list[SamplingState], index: int = 0, preempt_at: int = 99) -> list[int]:
        params = SamplingParams(seed=11)
        state = SamplingState(params, index=index)
        tokens: list[int] = []
        for step, row in enumerate(rows):
            if step == preempt_at:
                state = SamplingState(params, index=index, output_ids=tokens)
            place = min(1, len(neighbours))
            states = [*neighbours[:place], state, *neighbours[place:]]
            choice = choose(row.expand(len(states), -1).contiguous(), states, exact_ops())[place]
            assert isinstance(choice, Choice)
            tokens.append(choice.token_id)
            state.accept(tokens[-1])
        return tokens

    alone = run([])
    unseeded = [SamplingState(SamplingParams()) for _ in range(3)]
    assert run(unseeded) == run([SamplingState(SamplingParams(seed=5))] * 2) == alone
    assert run([], preempt_at=13) == alone
    answers = [run([], index=i) for i in range(4)]
    assert answers[0] == alone
    assert len({tuple(answer) for answer in answers}) == 4
    assert answers == [run(unseeded, index=i) for i in range(4)]
    a, b = SamplingState(SamplingParams()), SamplingState(SamplingParams())
    assert a.seed != b.seed


def test_a_broken_row_is_its_own_error_only() -> None:
    logits = torch.zeros(5, 8)
    logits[0, 3], logits[1, 2], logits[2] = math.nan, math.inf, -math.inf
    states = [SamplingState(SamplingParams(temperature=t)) for t in (0, 1, 0, 0)]
    states.append(SamplingState(SamplingParams(), grammar=OnlyTokens()))
    results = choose(logits, states, exact_ops())
    assert [type(r) for r in results] == [SamplingError, SamplingError, SamplingError, Choice,
                                          SamplingError]
    assert results[3] == Choice(0)


def test_logprobs_are_the_model_s_own() -> None:
    """Of raw logits, whatever bias and temperature did; alternatives by logit, ties by id."""
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(3)) * 3
    logits[1, 50] = logits[1, 20] = logits[1].max() + 1
    params = SamplingParams(temperature=0.3, seed=1, logit_bias={7: 1e9}, logprobs=5)
    results = choose(logits, [SamplingState(params) for _ in range(3)], exact_ops())
    expected = logits.double().log_softmax(-1)
    for row, choice in zip(expected, results, strict=True):
        assert isinstance(choice, Choice)
        assert choice.token_id == 7
        assert choice.logprob == pytest.approx(float(row[7]), abs=1e-5)
        values, ids = row.sort(descending=True, stable=True)
        assert [i for i, _ in choice.top] == ids[:5].tolist()
        np.testing.assert_allclose([p for _, p in choice.top], values[:5], atol=1e-5)
    bare = choose(logits, [SamplingState(SamplingParams(seed=1, logit_bias={7: 1e9}, logprobs=0))
                           for _ in range(3)], exact_ops())
    assert [c.logprob for c in bare] == [c.logprob for c in results]  # type: ignore[union-attr]
    assert all(c.top == () for c in bare)  # type: ignore[union-attr]


def test_prompt_tokens_are_scored_by_the_row_before_them() -> None:
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(5))
    tokens = [4, 8, 15, 16, 23, 42]
    expected = logits.double().log_softmax(-1)
    for tops in ([0] * 6, [3] * 6, [90, 0, 1, 2, 3, 4]):
        scored = score_tokens(logits, tokens, tops, exact_ops())
        assert [c.token_id for c in scored] == tokens
        assert [len(c.top) for c in scored] == tops
        np.testing.assert_allclose([c.logprob for c in scored],
                                   [float(expected[t, i]) for t, i in enumerate(tokens)], atol=1e-5)


def test_the_best_answers_are_the_likeliest_per_token() -> None:
    assert best_answers([-4.0, -1.0, -3.0, -2.0], [8, 1, 3, 2], 3) == [0, 1, 2]
    assert best_answers([-1.0, 0.0], [1, 0], 1) == [1]


# ---- settings ----

def test_all_bad_settings_are_listed() -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(max_tokens=-1, temperature=math.nan, top_k=-2, top_p=0.0, min_p=1.5,
                       seed=-1, stop=("",))
    for word in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop string"):
        assert word in str(error.value)


BAD: dict[str, Any] = {
    "max_tokens": 1.5, "temperature": "hot", "top_k": True, "top_p": math.nan, "min_p": -0.1,
    "seed": 2**64, "stop": 3, "stop_token_ids": [-1], "logprobs": -1, "prompt_logprobs": "x",
    "n": 0, "best_of": 0, "presence_penalty": 2.1, "frequency_penalty": -3,
    "repetition_penalty": 0, "logit_bias": {1: math.inf}, "min_tokens": -1, "grammar": "{}",
}


@pytest.mark.parametrize("name", BAD)
def test_each_bad_setting_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace("stop_token_ids", "stop token id")):
        SamplingParams(**{name: BAD[name]})


def test_bad_settings_together() -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**BAD)
    assert str(error.value).count(";") == len(BAD) - 1
    for wrong in ({"n": 3, "best_of": 2}, {"min_tokens": 5, "max_tokens": 4},
                  {"logit_bias": {"5": 1.0}}, {"logit_bias": [1]}, {"stop": ["a", 5]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_settings_are_copied_and_plain() -> None:
    bias, stop = {1: 2.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=[3],  # type: ignore[arg-type]
                            grammar=GrammarSpec.json_schema({"type": "object"}))
    bias[2], stop[0] = 1.0, "y"
    assert params.logit_bias == {1: 2.0} and params.stop == ("x",) and params.stop_token_ids == (3,)
    assert pickle.loads(pickle.dumps(params)) == params == copy.copy(params)
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(logprobs=False).logprobs is None
    assert SamplingParams(logprobs=True).logprobs == 1


def test_grammar_specs_are_checked() -> None:
    for kind, text in (("xml", ""), ("regex", 5), ("json_object", "{}")):
        with pytest.raises(ValueError, match="grammar"):
            GrammarSpec(kind, text)  # type: ignore[arg-type]


def test_extreme_settings_give_a_token() -> None:
    """Case 22: every combination of tiny and huge settings on rows with masks: no NaN, no error."""
    logits = np.array([0.5, -np.inf, 3e38, 1.0, -3e38, 2.9e38], dtype=np.float32)
    for temperature, top_p, top_k, min_p in itertools.product(
            (0, 1e-8, 1e-4, 1.0, 1e30), (1e-9, 0.5, 1.0), (0, 1, 3, 100), (0.0, 1e-9, 1.0)):
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        ids, probs = sampling_distribution(logits, params)
        assert np.isfinite(probs).all() and probs.sum() == pytest.approx(1)
        assert 1 not in ids[probs > 0]
        if temperature <= 1e-4 or top_k == 1 or min_p == 1.0 or top_p == 1e-9:
            assert ids[probs > 0].tolist() == [2] or temperature == 1e30
