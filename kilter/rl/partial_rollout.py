"""A rollout while it is sampled: what the policy chose and what it was told, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kilter.rl.experience import FinishReason, Rollout


@dataclass
class PartialRollout:
    """A rollout in the making."""

    id: str
    group: int
    tokens: list[int]
    is_action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    actions: int = 0

    def __post_init__(self) -> None:
        given = len(self.tokens) - len(self.is_action)
        self.is_action += [False] * given
        self.logprobs += [math.nan] * given
        self.versions += [-1] * given
        self.actions = sum(self.is_action)

    @staticmethod
    def of(rollout: Rollout, whole: bool) -> PartialRollout:
        """To go on with all of a rollout, or with what comes before its first action."""
        flags = list(rollout.is_action)
        end = len(flags) if whole or not any(flags) else flags.index(True)
        return PartialRollout(rollout.id, rollout.group, list(rollout.tokens[:end]), flags[:end],
                       list(rollout.logprobs[:end]), list(rollout.versions[:end]))

    def act(self, token: int, logprob: float, version: int) -> None:
        self._append(token, True, logprob, version)
        self.actions += 1

    def observe(self, tokens: Sequence[int], context: int) -> None:
        """Goes on after these, or ends where they leave no room for an answer."""
        if len(self.tokens) + len(tokens) >= context:
            self.finish = "length"
            return
        for token in tokens:
            self._append(token, False, math.nan, -1)
        self.finish = None

    def rollout(self) -> Rollout:
        assert self.finish is not None
        return Rollout(list(self.tokens), list(self.is_action), list(self.logprobs),
                       list(self.versions), self.group, self.finish, self.id)

    def _append(self, token: int, is_action: bool, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.is_action.append(is_action)
        self.logprobs.append(logprob)
        self.versions.append(version)
