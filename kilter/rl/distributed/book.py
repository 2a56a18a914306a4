"""Which prompts are begun, and how far they are; pure bookkeeping.

    waiting ──give──► out (at a replica) ──back──► waiting, or done ──take──► the trainer

Prompts are begun in the row's order. Those that the trainer asks for may always be begun; beyond
them as many as its next ``max_staleness`` steps take, so that what is begun with weights v is
learned from by weights v + max_staleness at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kilter.rl.experience import Rollout
from kilter.rl.prompts import Question
from kilter.rl.shaping import staleness_capacity
from kilter.serve.params import SamplingParams

Ahead = Callable[[int], Question]  # the prompts that follow those asked for, from 0 on


@dataclass(frozen=True)
class Group:
    """A prompt and all its samples.

    Attributes:
        step: that the seeds of its samples are made of.
        aside: it is not of the row that is learned from, and somebody waits for it.
        rollouts: with finish "abort" where there is more to sample.
    """

    question: Question
    step: int
    params: SamplingParams
    aside: bool
    rollouts: tuple[Rollout, ...]

    @staticmethod
    def begun(question: Question, step: int, params: SamplingParams, aside: bool) -> Group:
        """Nothing sampled yet."""
        prompt = question.prompt
        n = len(prompt.ids)
        return Group(question, step, params, aside, tuple(
            Rollout(list(prompt.ids), [False] * n, [math.nan] * n, [-1] * n, prompt.group, "abort",
                    f"{prompt.id}/{i}") for i in range(prompt.n)))

    @property
    def id(self) -> str:
        return self.question.prompt.id

    @property
    def unfinished(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.finish == "abort"]

    @property
    def place(self) -> tuple[bool, int]:
        """What comes first is wanted first."""
        return not self.aside, self.question.prompt.group


class Book:
    """Of one run.

    Args:
        batch: prompts that a step takes, at least.
        max_staleness: steps that rollouts may be ahead.
        steps: of the run; nothing is begun for later ones.
    """

    def __init__(self, batch: int, max_staleness: int, steps: int) -> None:
        self._batch, self._max_staleness, self._steps = batch, max_staleness, steps
        self._waiting: dict[str, Group] = {}
        self._out: dict[str, Group] = {}
        self._done: dict[str, Group] = {}
        self._asked: list[str] = []
        # Of the last row that was asked for: its step, settings and what follows it, and how many
        # of these are begun.
        self._row: tuple[int, SamplingParams, Ahead] | None = None
        self._begun = 0

    @property
    def ahead(self) -> int:
        """Prompts begun beyond those asked for, that nobody has taken."""
        return sum(not group.aside and group.id not in self._asked for part in
                   (self._waiting, self._out, self._done) for group in part.values())

    def ask(self, questions: Sequence[Question], step: int, params: SamplingParams,
            ahead: Ahead | None) -> None:
        """What the trainer needs now; `take` gives it.

        Args:
            ahead: what follows in the row; None: these are aside from it.
        """
        self._asked = [question.prompt.id for question in questions]
        for question in questions:
            if not self._has(question.prompt.id):
                group = Group.begun(question, step, params, ahead is None)
                self._waiting[group.id] = group
        if ahead is not None:
            self._row, self._begun = (step, params, ahead), 0
            while self._may_begin() and self._has(ahead(self._begun).prompt.id):
                self._begun += 1

    def give(self, most: int) -> list[Group]:
        """Groups of one step for a replica, the first that wait; begins some where it may."""
        while len(self._waiting) < most and self._may_begin():
            assert self._row is not None
            step, params, ahead = self._row
            group = Group.begun(ahead(self._begun), step + 1 + self._begun // self._batch, params,
                                False)
            self._waiting[group.id] = group
            self._begun += 1
        first = sorted(self._waiting.values(), key=lambda group: group.place)
        given = [group for group in first[:most]
                 if (group.step, group.aside) == (first[0].step, first[0].aside)]
        for group in given:
            self._out[group.id] = self._waiting.pop(group.id)
        return given

    def back(self, groups: Sequence[Group]) -> int:
        """Groups that were given out, as far as they have come; how many are done.

        Raises:
            ValueError: for a group that was not given out.
        """
        done = 0
        for group in groups:
            if self._out.pop(group.id, None) is None:
                raise ValueError(f"The prompt {group.id} came back, but nobody had it; it would be "
                                 "learned from twice.")
            finished = not group.unfinished
            (self._done if finished else self._waiting)[group.id] = group
            done += finished
        return done

    def take(self) -> list[Rollout] | None:
        """All samples of what was asked for, in that order; None while some are not done."""
        if any(name not in self._done for name in self._asked):
            return None
        asked, self._asked = self._asked, []
        return [rollout for name in asked for rollout in self._done.pop(name).rollouts]

    def _has(self, name: str) -> bool:
        return name in self._waiting or name in self._out or name in self._done

    def _may_begin(self) -> bool:
        """Counted in prompts from the step's first on: its own batch counts as accepted. A step
        that takes more than a batch only makes what follows younger."""
        if self._row is None:
            return False
        left = max(self._steps - 1 - self._row[0], 0)
        return staleness_capacity(max_staleness=min(self._max_staleness, left), version=0,
                                  batch=self._batch, accepted=self._batch,
                                  running=self._begun) > 0
