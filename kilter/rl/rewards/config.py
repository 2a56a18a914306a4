"""Rewards as a job file says them, and what they are built into.

    [[rewards]]
    kind = "math"                   # a name of `REWARDS`, or "package.module:name" of your own
    weight = 1.0
    options = { seconds = 5 }       # the fields of that reward's class
    [[rewards]]
    kind = "my_rewards:brevity"     # a function (samples) -> one number each, or a class
    weight = 0.1
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kilter.job import build
from kilter.rl.rewards.gym import ReasoningGym
from kilter.rl.rewards.mathematics import Mathematics
from kilter.rl.rewards.program import Program
from kilter.rl.rewards.sample import Sample
from kilter.rl.rewards.score import OnError, Reward, WeightedReward
from kilter.rl.rewards.text import Contains, Exact, Format, Length, Regex

REWARDS: Mapping[str, type] = {
    "exact": Exact, "contains": Contains, "regex": Regex, "format": Format, "length": Length,
    "math": Mathematics, "reasoning_gym": ReasoningGym, "program": Program,
}


@dataclass(frozen=True)
class RewardConfig:
    """One reward of a job.

    Attributes:
        kind: a name of `REWARDS`, or the path "package.module:name" of a function of samples (its
            options are keyword arguments) or of a class (they are its constructor's).
        name: what its values are called; default: the kind, or the function's own name.
        weight: its share of the total.
        on_error: what a sample gets where the reward fails; "raise" stops the run.
        options: the fields of the reward's class.
    """

    kind: str
    name: str | None = None
    weight: float = 1.0
    on_error: OnError = "raise"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if ":" not in self.kind and self.kind not in REWARDS:
            problems.append(f"kind is {self.kind!r} but must be one of {', '.join(REWARDS)}, or "
                            "the path package.module:name of your own.")
        if not math.isfinite(self.weight):
            problems.append(f"weight is {self.weight} but must be finite.")
        if isinstance(self.on_error, str) and self.on_error != "raise":
            problems.append(f"on_error is {self.on_error!r} but must be \"raise\" or a number.")
        if "name" in self.options:
            problems.append("options has a name; set name beside kind instead.")
        if self.kind in REWARDS and not problems:
            try:
                build_reward(self)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError(" ".join(problems))


def build_reward(config: RewardConfig) -> WeightedReward:
    """The reward of a config. Processes and packages it needs are asked for at its first call.

    Raises ValueError for options it does not have, or a path that does not lead to a reward.
    """
    if config.kind in REWARDS:
        table = {**config.options, "name": config.name or config.kind}
        reward = cast(Reward, build(REWARDS[config.kind], table, f"the reward {config.kind}"))
    else:
        reward = _own(config)
    return WeightedReward(reward, config.weight, config.on_error)


def build_rewards(configs: Sequence[RewardConfig]) -> tuple[WeightedReward, ...]:
    """All of them.

    Raises ValueError for two of one name, beside what `build_reward` raises.
    """
    rewards = tuple(build_reward(config) for config in configs)
    names = [weighted.reward.name for weighted in rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Two rewards are named {', '.join(twice)}; give one another name.")
    return rewards


@dataclass(frozen=True)
class FunctionReward:
    """A function of samples as a reward."""

    name: str
    function: Callable[..., Sequence[float]]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float]:
        return self.function(samples, **self.options)


def resolve(path: str) -> Any:
    """What "package.module:name" names.

    Raises ValueError where it names nothing.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"The path {path!r} must have the form package.module:name.")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} cannot be had: there is no module {error.name} (looked for on "
                         "Python's path; set PYTHONPATH to where yours is).") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{path} cannot be had: {module} has no {name}.")
        found = getattr(found, part)
    return found


def _own(config: RewardConfig) -> Reward:
    found = resolve(config.kind)
    if not callable(found):
        raise ValueError(f"{config.kind} is {found!r} but must be a function or a class.")
    if not inspect.isclass(found):
        if isinstance(found, Reward) and not inspect.isfunction(found):
            if config.options:
                raise ValueError(f"{config.kind} is made already, so it can have no options; name "
                                 "its class instead.")
            return found if config.name is None else FunctionReward(config.name, found)
        name = config.name or str(getattr(found, "__name__", config.kind))
        return FunctionReward(name, found, config.options)
    reward: Any
    if dataclasses.is_dataclass(found):
        named = {} if config.name is None else {"name": config.name}
        reward = build(found, {**config.options, **named}, f"the reward {config.kind}")
    else:
        try:
            reward = found(**config.options)
        except TypeError as error:
            raise ValueError(f"The reward {config.kind} does not take its options: {error}."
                             ) from error
    if not isinstance(reward, Reward):
        raise ValueError(f"{config.kind} makes {reward!r}, but a reward has a name and is called "
                         "with samples.")
    if config.name is not None and reward.name != config.name:
        return FunctionReward(config.name, reward)
    return reward
