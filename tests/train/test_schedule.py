"""Learning-rate factors against closed forms."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.train.schedule import ScheduleConfig

NAMES = ("constant", "cosine", "linear", "wsd")


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_a_line_to_the_peak(name: str) -> None:
    schedule = ScheduleConfig(name, warmup_steps=4)  # type: ignore[arg-type]
    assert [schedule.factor(step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_shapes_after_the_warmup() -> None:
    assert ScheduleConfig("constant").factor(99, 100) == 1.0
    cosine = ScheduleConfig("cosine", warmup_steps=10, floor=0.1)
    assert cosine.factor(55, 100) == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine.factor(40, 100) == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3)))
    assert cosine.factor(100, 100) == pytest.approx(0.1)
    assert ScheduleConfig("linear", warmup_steps=20).factor(60, 100) == pytest.approx(0.5)
    wsd = ScheduleConfig("wsd", decay_steps=20)
    assert [wsd.factor(step, 100) for step in (0, 79, 80)] == [1.0, 1.0, 1.0]
    assert wsd.factor(90, 100) == pytest.approx(0.5)
    assert ScheduleConfig("wsd").factor(95, 100) == pytest.approx(0.5)  # a tenth of all


@given(st.sampled_from(NAMES), st.integers(0, 50), st.integers(1, 60), st.floats(0, 1))
def test_never_outside_floor_and_peak(name: str, warmup: int, steps: int, floor: float) -> None:
    schedule = ScheduleConfig(name, warmup_steps=warmup, floor=floor)  # type: ignore[arg-type]
    factors = [schedule.factor(step, steps) for step in range(steps)]
    assert all(0.0 < f <= 1.0 or floor == 0.0 for f in factors[:warmup])
    after = factors[warmup:]
    assert all(floor - 1e-12 <= f <= 1.0 for f in after)
    assert all(a >= b - 1e-12 for a, b in pairwise(after))


@pytest.mark.parametrize("wrong", [
    {"name": "cos"}, {"warmup_steps": -1}, {"floor": 1.5}, {"decay_steps": 3},
    {"name": "wsd", "decay_steps": 0}])
def test_mistakes(wrong: dict) -> None:
    with pytest.raises(ValueError, match="schedule cannot be so"):
        ScheduleConfig(**wrong)
