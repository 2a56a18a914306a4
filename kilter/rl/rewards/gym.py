"""Answers to reasoning-gym's questions, judged by the dataset's own `score_answer`.

It runs in processes of its own (jails.py): some datasets evaluate the answer as an expression, and
Python's ``eval`` on what a model wrote is a program like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilter.rl.rewards.judged import Jailed, number, reported
from kilter.rl.rewards.sample import Sample
from kilter.rl.rewards.text import Extract, extract_answer


@dataclass(frozen=True)
class ReasoningGym(Jailed):
    """The dataset's score, in 0 … 1; 0 where there is no answer to be found.

    A reference is what `tasks.GymTask` makes: {"dataset", "config", "index", "answer"}; or
    {"dataset", "entry"} with an entry of your own. Needs the extra ``rl``.

    Attributes:
        extract: which part of the text is the answer, as `text.extract_answer`.
    """

    name: str = "reasoning_gym"
    extract: Extract = "tag"
    tag: str = "answer"

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        jobs, owners = [], []
        for i, sample in enumerate(samples):
            reference = sample.reference
            if not isinstance(reference, dict) or "dataset" not in reference or not (
                    {"index", "entry"} & reference.keys()):
                raise ValueError(f"The reference is {reference!r}, but this reward needs a record "
                                 "with \"dataset\" and either \"index\" or \"entry\".")
            answer = extract_answer(sample.answer_text, self.extract, self.tag)
            if answer is not None:
                jobs.append({"reference": reference, "answer": answer})
                owners.append(i)
        values = [0.0] * len(samples)
        for i, outcome in zip(owners, self._run("reasoning_gym", jobs), strict=True):
            values[i] = number(reported(outcome))
        return values
