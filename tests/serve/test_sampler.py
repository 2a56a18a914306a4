"""Sampling: the distribution that is asked for, from a seed that nothing else touches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kilter.serve.sampler import SamplingParams, sample, sampling_distribution, uniform


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
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected = scores.softmax(-1)[0].numpy()
    ids, probs = sampling_distribution(logits, SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    got = np.zeros(size)
    got[ids] = probs
    np.testing.assert_allclose(got, expected, atol=1e-9)


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


def test_the_empirical_distribution_is_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    params = SamplingParams(temperature=1.0)
    counts = np.bincount([sample(logits, params, seed=9, step=i) for i in range(4000)])
    expected = np.array([0.5, 0.3, 0.2]) * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 dof, p = 0.001


def test_the_random_number_depends_on_seed_and_step_alone() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(s, t) for s in range(30) for t in range(30)}) == 900


def test_all_bad_settings_are_listed() -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(max_tokens=-1, temperature=math.nan, top_k=-2, top_p=0.0, min_p=1.5,
                       seed=-1, stop=("",))
    for word in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop string"):
        assert word in str(error.value)
