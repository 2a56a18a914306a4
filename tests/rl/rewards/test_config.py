"""Rewards from a job's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kilter.job import build, dump
from kilter.rl.rewards import REWARDS, RewardConfig, Sample, build_reward, build_rewards, score
from kilter.rl.rewards.text import Length


def brevity(samples: Sequence[Sample], scale: float = 1.0) -> list[float]:
    return [-scale * len(sample.answer_text) for sample in samples]


@dataclass(frozen=True)
class Constant:
    value: float
    name: str = "constant"

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self.value] * len(samples)


class Nameless:
    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return []


MADE = Constant(3.0)
HERE = __name__
SAMPLES = [Sample(prompt="", answer_text="abc", reference="abc")]


@dataclass(frozen=True)
class Job:
    rewards: tuple[RewardConfig, ...]


def test_a_job_file_says_rewards() -> None:
    job = build(Job, {"rewards": [
        {"kind": "exact"}, {"kind": "length", "name": "short", "weight": 0.5,
                            "options": {"free": 0, "limit": 6, "unit": "characters"}},
        {"kind": f"{HERE}:brevity", "options": {"scale": 2.0}, "on_error": -1},
        {"kind": f"{HERE}:Constant", "name": "four", "options": {"value": 4}},
        {"kind": f"{HERE}:MADE"}]})
    assert score(build_rewards(job.rewards), SAMPLES) == {
        "exact": [1.0], "short": [-0.5], "brevity": [-6.0], "four": [4.0], "constant": [3.0],
        "total": [1.0 - 0.25 - 6.0 + 4.0 + 3.0]}
    assert build(Job, dump(job)) == job


def test_every_kind_can_be_built() -> None:
    needed = {"regex": {"pattern": "a"}, "length": {"free": 1, "limit": 2}}
    for kind in REWARDS:
        assert build_reward(RewardConfig(kind, options=needed.get(kind, {}))).reward.name == kind
    assert build_reward(RewardConfig("length", options=needed["length"])).reward == Length(1, 2)


@pytest.mark.parametrize(("table", "said"), [
    ({"kind": "exakt"}, "kind is 'exakt' but must be one of exact, contains"),
    ({"kind": "exact", "options": {"ignore_cas": True}}, "ignore_cas is not a setting; did you"),
    ({"kind": "length"}, "free is missing"), ({"kind": "exact", "weight": float("nan")}, "weight"),
    ({"kind": "exact", "on_error": "skip"}, "on_error"),
    ({"kind": "math", "options": {"seconds": 0}}, "seconds is 0.0"),
    ({"kind": "exact", "options": {"name": "x"}}, "set name beside kind")])
def test_what_is_wrong_is_told_when_the_job_is_read(table: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(RewardConfig, table)


@pytest.mark.parametrize(("config", "said"), [
    (RewardConfig(f"{HERE}:nothing"), "has no nothing"),
    (RewardConfig(f"{HERE}:HERE"), "must be a function or a class"),
    (RewardConfig(f"{HERE}:Nameless"), "a reward has a name"),
    (RewardConfig(f"{HERE}:Nameless", options={"a": 1}), "does not take its options"),
    (RewardConfig(f"{HERE}:Constant", options={"valu": 1}), "did you mean value"),
    (RewardConfig(f"{HERE}:MADE", options={"value": 1}), "made already"),
    (RewardConfig("no_such_module:f"), "no module no_such_module")])
def test_paths_that_lead_nowhere(config: RewardConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_reward(config)


def test_two_of_one_name() -> None:
    with pytest.raises(ValueError, match="Two rewards are named exact"):
        build_rewards([RewardConfig("exact"), RewardConfig("exact", weight=2.0)])
