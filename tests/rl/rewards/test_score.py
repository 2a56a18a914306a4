"""The caller of rewards: one finite number per sample, or an error that says where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kilter.rl.rewards import Sample, WeightedReward, action_turns, score
from kilter.rl.rewards.config import FunctionReward
from kilter.rl.rewards.score import RewardError, Unavailable
from kilter.rl.rewards.text import Contains


def samples(n: int) -> list[Sample]:
    return [Sample(prompt="?", answer_text=f"answer {i}", reference=str(i)) for i in range(n)]


def weighted(function: Any, name: str = "mine", **options: Any) -> WeightedReward:
    return WeightedReward(FunctionReward(name, function), **options)


def test_parts_and_their_weighted_total() -> None:
    parts = score([weighted(lambda s: [0.0, 1.0, 2.0], "a", weight=2.0),
                   weighted(lambda s: (1, True, -1.5), "b", weight=0.5)], samples(3))
    assert parts == {"a": [0.0, 1.0, 2.0], "b": [1.0, 1.0, -1.5], "total": [0.5, 2.5, 3.25]}
    assert all(type(value) is float for values in parts.values() for value in values)


def test_what_counts_as_numbers() -> None:
    for values in (np.array([1.0, 2.0], np.float32), torch.tensor([1.0, 2.0]), [np.int64(1), 2]):
        assert score([weighted(lambda s, v=values: v)], samples(2))["mine"] == [1.0, 2.0]


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0, 4.0], []])
@pytest.mark.parametrize("on_error", ["raise", 0.0])
def test_a_wrong_number_of_values_never_spreads(values: list[float], on_error: Any) -> None:
    """trl#6533: one value is not a value for all."""
    with pytest.raises(RewardError, match=rf"mine returned {len(values)} values for 3 samples"):
        score([weighted(lambda s: values, on_error=on_error)], samples(3))


@pytest.mark.parametrize("whole", [1.0, None, object()])
def test_something_without_a_length(whole: object) -> None:
    with pytest.raises(RewardError, match=r"mine answered with .* for 3 samples"):
        score([weighted(lambda s: whole)], samples(3))


@pytest.mark.parametrize(("value", "said"), [
    (None, "None, which is no number"), ("1.0", "'1.0', which is no number"),
    (math.nan, "nan, which is not finite"), (-math.inf, "-inf, which is not finite"),
    (1j, "1j, which is no number"), ([1.0], "which is no number"),
    (torch.zeros(2), "which is no number"), (10 ** 400, "which is no number")])
def test_values_that_are_no_finite_numbers(value: object, said: str) -> None:
    def reward(found: Sequence[Sample]) -> list[Any]:
        return [0.5, value, 0.5]

    with pytest.raises(RewardError, match=r"mine gave sample 1 .*") as raised:
        score([weighted(reward)], samples(3))
    assert said in str(raised.value)
    assert score([weighted(reward, on_error=-1.0)], samples(3))["mine"] == [0.5, -1.0, 0.5]


def fails_on_1(found: Sequence[Sample]) -> list[float]:
    return [1.0 / (int(sample.reference) - 1) for sample in found]


def test_an_exception_names_reward_and_sample() -> None:
    with pytest.raises(RewardError, match=r"mine failed on sample 1 \(answer 'answer 1'\): "
                                          "ZeroDivisionError"):
        score([weighted(fails_on_1)], samples(3))
    assert score([weighted(fails_on_1, on_error=7.0)], samples(3))["mine"] == [-1.0, 7.0, 1.0]


def test_an_exception_of_the_whole_only() -> None:
    def reward(found: Sequence[Sample]) -> list[float]:
        if len(found) > 1:
            raise RuntimeError("too many")
        return [1.0]

    with pytest.raises(RewardError, match="3 samples together, though on none of them alone"):
        score([weighted(reward)], samples(3))


def test_what_cannot_work_at_all_stops_whatever_on_error_says() -> None:
    def reward(found: Sequence[Sample]) -> list[float]:
        raise Unavailable("no package")

    with pytest.raises(Unavailable, match="no package"):
        score([weighted(reward, on_error=0.0)], samples(3))


def test_names_and_numbers_of_a_weighted_reward() -> None:
    with pytest.raises(RewardError, match="Two rewards are named mine"):
        score([weighted(fails_on_1), weighted(fails_on_1)], samples(1))
    with pytest.raises(ValueError, match=r"'total'.*weight of total is nan.*on_error of total"):
        weighted(fails_on_1, "total", weight=math.nan, on_error=math.inf)
    assert score([weighted(fails_on_1)], []) == {"mine": [], "total": []}


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_a_tools_output_is_not_the_answer() -> None:
    """verl#6392: only what the policy sampled is judged."""
    turns = [("What is 6*7?", False), ("call calc", True), ("the tool says 42.", False),
             ("I do not know", True)]
    tokens = [ord(letter) for text, _ in turns for letter in text]
    mask = [action for text, action in turns for _ in text]
    sample = Sample.of(prompt="What is 6*7?", tokens=tokens, is_action=mask, decode=decode,
                       reference="42")
    assert sample.answer_text == "call calc\nI do not know"
    assert decode(list(sample.token_ids)) == "call calcI do not know"
    assert Contains()([sample]) == [0.0]
    everything = Sample.of(prompt="", tokens=tokens, is_action=[True] * len(mask), decode=decode,
                           reference="42")
    assert Contains()([everything]) == [1.0]
    from_tensors = Sample.of(prompt="What is 6*7?", tokens=torch.tensor(tokens),  # type: ignore
                             is_action=torch.tensor(mask), decode=decode, reference="42")
    assert from_tensors == sample


def test_action_turns_need_a_whole_mask() -> None:
    assert action_turns([1, 2, 3], [False] * 3) == []
    with pytest.raises(ValueError, match="3 tokens but the action mask has 2"):
        action_turns([1, 2, 3], [True, False])
