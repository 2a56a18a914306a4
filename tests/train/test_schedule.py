"""Learning-rate factors against transformers' schedules and closed forms."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import transformers
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


@pytest.mark.parametrize("warmup", [0, 7, 30])
@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_those_of_transformers(name: str, warmup: int, floor: float) -> None:
    """From the warm-up's end to the last step. Theirs rises from a first step of 0, ours takes that
    step already."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    steps, decay = 50, 20
    theirs = {
        "constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
        "cosine": lambda: transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, steps, min_lr_rate=floor),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps),
        "wsd": lambda: transformers.get_wsd_schedule(
            optimizer, warmup, decay, num_training_steps=steps, min_lr_ratio=floor,
            decay_type="linear")}[name]().lr_lambdas[0]
    schedule = ScheduleConfig(name, warmup, decay if name == "wsd" else None,  # type: ignore[arg-type]
                              floor)
    for step in range(steps):
        expected = theirs(step) if step >= warmup else (step + 1) / warmup
        if name == "linear" and step >= warmup:  # theirs has no floor
            expected = floor + (1.0 - floor) * expected
        assert schedule.factor(step, steps) == pytest.approx(expected, abs=1e-12), step
    if warmup and floor == 0.0:
        assert [schedule.factor(step, steps) for step in range(warmup)] == pytest.approx(
            [theirs(step + 1) for step in range(warmup)])


@pytest.mark.parametrize("name", NAMES)
def test_the_last_step_and_the_end(name: str) -> None:
    """The last step is one short of the floor, so it is not in vain where that is 0."""
    last = {"constant": 1.0, "cosine": 0.5 * (1 - math.cos(math.pi / 40)), "linear": 1 / 40,
            "wsd": 1 / 5}[name]
    schedule = ScheduleConfig(name, warmup_steps=10)  # type: ignore[arg-type]
    assert schedule.factor(49, 50) == pytest.approx(last)
    assert ScheduleConfig(name, 10, None, 0.25).factor(50, 50) == (  # type: ignore[arg-type]
        1.0 if name == "constant" else 0.25)


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 50))
def test_no_step_falls_further_than_the_decays_slope(warmup: int, decay: int, steps: int) -> None:
    """Nothing jumps where a warm-up and the decay leave no time for each other."""
    schedule = ScheduleConfig("wsd", warmup, decay)
    factors = [schedule.factor(step, steps) for step in range(steps)]
    slope = 1.0 / max(1, min(decay, steps - warmup))
    assert all(a - b <= slope + 1e-12 for a, b in pairwise(factors))
    if warmup >= steps:
        assert factors == [(step + 1) / warmup for step in range(steps)]


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
