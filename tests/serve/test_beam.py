"""Beam search gives what transformers gives, driven by its own model without a cache."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kilter.serve.beam import BeamSearch, expand
from kilter.serve.params import BeamParams

VOCAB, PAD, PROMPT = 23, 22, [3, 1, 4]


@pytest.fixture(scope="module", params=[0, 1, 2])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(request.param)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.6, eos_token_id=2, pad_token_id=PAD)
    return transformers.LlamaForCausalLM(config).eval()


@torch.inference_mode()
def search_with(model: Any, params: BeamParams, ends: list[int]) -> BeamSearch:
    search = BeamSearch(params, ends)
    answers: list[list[int]] = [[]]
    while not search.done:
        logits = model(torch.tensor([[*PROMPT, *answer] for answer in answers])).logits[:, -1]
        moves = search.advance(logits.float().log_softmax(-1).numpy())
        answers = [[*answers[move.parent], move.token] for move in moves]
        assert search.done or answers == [list(beam.tokens) for beam in search.running]
    return search


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.7])
@pytest.mark.parametrize("width,ends", [(1, [2]), (3, [2]), (4, [2, 7, 11])])
def test_equals_transformers(model: Any, width: int, ends: list[int], length_penalty: float,
                             early_stopping: Any) -> None:
    params = BeamParams(width, 9, length_penalty, early_stopping)
    search = search_with(model, params, ends)
    if width == 1:  # transformers would take its greedy path
        greedy = model.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False,
                                eos_token_id=ends)[0, 3:].tolist()
        assert list(search.finished[0].tokens) == greedy
        return
    expected = model.generate(
        torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, max_new_tokens=9,
        length_penalty=length_penalty, early_stopping=early_stopping, do_sample=False,
        eos_token_id=ends, pad_token_id=PAD, return_dict_in_generate=True, output_scores=True)
    got = [list(h.tokens) for h in search.finished]
    for tokens, sequence in zip(got, expected.sequences[:, 3:].tolist(), strict=True):
        assert tokens == sequence[:len(tokens)]
        assert set(sequence[len(tokens):]) <= {PAD}
    np.testing.assert_allclose([h.score for h in search.finished],
                               expected.sequences_scores.numpy(), rtol=1e-5)


def test_a_wide_beam_finds_the_best_of_all_answers(model: Any) -> None:
    """Width V**(n-1) is exhaustive: brute force over every answer of three tokens."""
    search = search_with(model, BeamParams(VOCAB**2, 3, 0.0, ignore_eos=True), [2])
    with torch.inference_mode():
        all_pairs = list(itertools.product(range(VOCAB), repeat=2))
        rows = model(torch.tensor([[*PROMPT, *pair] for pair in all_pairs])).logits[:, 2:]
        logprobs = rows.log_softmax(-1).numpy().astype(np.float64)
    first = np.array([logprobs[i, 0, a] + logprobs[i, 1, b] for i, (a, b) in enumerate(all_pairs)])
    total = first[:, None] + logprobs[:, 2]
    best = np.unravel_index(total.argmax(), total.shape)
    assert search.finished[0].tokens == (*all_pairs[best[0]], best[1])
    assert search.finished[0].score == pytest.approx(total.max(), rel=1e-5)


@pytest.mark.parametrize("early_stopping,length_penalty,done", [
    (True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True),
    ("never", -1.0, True)])
def test_when_a_longer_answer_may_still_win(early_stopping: Any, length_penalty: float, done: bool
                                            ) -> None:
    """Finished at -0.5, running at -1.0: only at ten tokens could it average -0.1."""
    search = BeamSearch(BeamParams(1, 10, length_penalty, early_stopping), end_ids=[0])
    search.advance(np.array([[-0.5, -1.0]], dtype=np.float32))
    assert search.done is done


def test_ties_go_to_the_earlier_beam_and_the_lower_token() -> None:
    logprobs = np.log(np.full((2, 4), 0.25, dtype=np.float32))
    moves, finishing = expand(logprobs, np.zeros(2, dtype=np.float32), 2, ends={1})
    assert [(m.parent, m.token) for m in moves] == [(0, 0), (0, 2)]
    assert [(m.parent, m.token) for m in finishing] == [(0, 1)]


def test_impossible_tokens_are_never_taken() -> None:
    logprobs = np.array([[-np.inf, 0.0, -np.inf]], dtype=np.float32)
    moves, finishing = expand(logprobs, np.zeros(1, dtype=np.float32), 3, ends={2})
    assert [(m.token, float(m.score)) for m in moves] == [(1, 0.0)]
    assert finishing == []


def test_bad_settings_are_listed() -> None:
    with pytest.raises(ValueError) as error:
        BeamParams(width=0, max_tokens=0, length_penalty=float("nan"), early_stopping="soon",
                   stop_token_ids=(-1,))  # type: ignore[arg-type]
    for word in ("width", "max_tokens", "length_penalty", "early_stopping", "stop token id"):
        assert word in str(error.value)
