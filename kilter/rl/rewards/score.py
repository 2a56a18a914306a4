"""Rewards, and the one place that calls them.

    parts = score([WeightedReward(Math()), WeightedReward(Format(), weight=0.2)], samples)
    parts["math"], parts["format"], parts["total"]    # a list each, one number per sample

A reward is given all samples at once and answers with one finite number each. Anything else is an
error that names the reward and the sample: a number that silently spreads over a batch, or a NaN,
is found long after it was made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from kilter.rl.rewards.sample import Sample

OnError = Literal["raise"] | float
TOTAL = "total"


@runtime_checkable
class Reward(Protocol):
    """Judges answers. Called from one thread, with all samples of a step that it may judge."""

    @property
    def name(self) -> str: ...

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float]: ...


class RewardError(ValueError):
    """A reward that failed, or answered with something else than one finite number per sample."""


class Unavailable(RuntimeError):
    """A reward that can judge nothing at all: a package or the system lacks what it needs. It is
    raised whatever `on_error` says."""


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its share of the total.

    Attributes:
        on_error: what a sample gets where its reward fails or is not a finite number; "raise"
            stops instead. A wrong number of values always stops: it is unknown whose they are.
    """

    reward: Reward
    weight: float = 1.0
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        problems = []
        if self.reward.name == TOTAL or not self.reward.name:
            problems.append(f"The reward's name is {self.reward.name!r}, which is taken or empty; "
                            "give another name.")
        if not math.isfinite(self.weight):
            problems.append(f"The weight of {self.reward.name} is {self.weight} but must be "
                            "finite.")
        if isinstance(self.on_error, str):
            if self.on_error != "raise":
                problems.append(f"on_error of {self.reward.name} is {self.on_error!r} but must be "
                                "'raise' or a number.")
        elif not math.isfinite(self.on_error):
            problems.append(f"on_error of {self.reward.name} is {self.on_error} but must be "
                            "finite.")
        if problems:
            raise ValueError(" ".join(problems))


def score(rewards: Sequence[WeightedReward], samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Every reward's values by its name, and under "total" their weighted sum.

    Raises:
        Unavailable: where a reward cannot work here.
        RewardError: for two rewards of one name, a reward that raises, a wrong number of values, or
            a value that is no finite number (the last two by `on_error`).
    """
    names = [weighted.reward.name for weighted in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RewardError(f"Two rewards are named {', '.join(twice)}; give each its own name.")
    parts = {weighted.reward.name: _values(weighted, samples) for weighted in rewards}
    parts[TOTAL] = [math.fsum(weighted.weight * parts[weighted.reward.name][i]
                              for weighted in rewards) for i in range(len(samples))]
    return parts


def _values(weighted: WeightedReward, samples: Sequence[Sample]) -> list[float]:
    reward, name, n = weighted.reward, weighted.reward.name, len(samples)
    if not samples:
        return []
    try:
        values: Sequence[Any] = reward(samples)
    except Unavailable:
        raise
    except Exception as error:
        return _one_by_one(weighted, samples, error)
    try:
        found = len(values)
    except TypeError:
        raise RewardError(f"The reward {name} answered with {type(values).__name__} for {n} "
                          "samples; it must return a sequence with one number per "
                          "sample.") from None
    if found != n:
        raise RewardError(f"The reward {name} returned {found} values for {n} samples; it must "
                          "return one number per sample.")
    return [_number(weighted, value, i) for i, value in enumerate(values)]


def _one_by_one(weighted: WeightedReward, samples: Sequence[Sample],
                first: Exception) -> list[float]:
    """After a failure of the whole: each sample alone, to learn which one fails."""
    reward, name = weighted.reward, weighted.reward.name
    result: list[float] = []
    for i, sample in enumerate(samples):
        try:
            values = reward([sample]) if len(samples) > 1 else _again(first)
            if len(values) != 1:
                raise RewardError(f"it returned {len(values)} values for one sample")
        except Exception as error:
            if isinstance(weighted.on_error, str):
                raise RewardError(f"The reward {name} failed on sample {i} "
                                  f"({_excerpt(sample)}): {_said(error)}") from error
            result.append(float(weighted.on_error))
            continue
        result.append(_number(weighted, values[0], i))
    if isinstance(weighted.on_error, str):
        raise RewardError(f"The reward {name} failed on {len(samples)} samples together, though on "
                          f"none of them alone: {_said(first)}") from first
    return result


def _again(error: Exception) -> Sequence[float]:
    raise error


def _number(weighted: WeightedReward, value: Any, i: int) -> float:
    name = weighted.reward.name
    try:
        if not hasattr(type(value), "__float__"):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        problem = f"{value!r}, which is no number"
    else:
        if math.isfinite(number):
            return number
        problem = f"{number}, which is not finite"
    if isinstance(weighted.on_error, str):
        raise RewardError(f"The reward {name} gave sample {i} {problem}; return a finite number, "
                          "or set its on_error to the value such samples get.")
    return float(weighted.on_error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _excerpt(sample: Sample) -> str:
    text = sample.answer_text
    return f"answer {text[:60] + '…' if len(text) > 60 else text!r}"
