"""Mathematical answers: equal as numbers, expressions, sets or intervals, by math-verify.

The answer is read from the last ``\\boxed{…}``, else from what follows "the final answer is", else
from the last expression; math-verify's own rules. It runs in processes of its own (jails.py): it
parses what a model wrote with a computer algebra system, which can take for ever, and its own time
limits work in a process's main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilter.rl.rewards.judged import Jailed, number, reported
from kilter.rl.rewards.sample import Sample
from kilter.rl.rewards.text import Extract, extract_answer, reference_texts


@dataclass(frozen=True)
class Mathematics(Jailed):
    """1 where the answer equals one of the references, else 0 (also where it takes too long).

    References are LaTeX or plain expressions, as `text.reference_texts`. Needs the extra ``rl``.

    Attributes:
        extract: which part of the answer is read at all, as `text.extract_answer`.
        digits: decimals to which numbers are rounded before they are compared.
        strict: names of variables count, and a set is no tuple.
    """

    name: str = "math"
    extract: Extract = "whole"
    tag: str = "answer"
    digits: int = 6
    strict: bool = True

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        jobs, owners = [], []
        for i, sample in enumerate(samples):
            golds = reference_texts(sample)
            answer = extract_answer(sample.answer_text, self.extract, self.tag)
            if answer is None:
                continue
            for gold in golds:
                jobs.append({"gold": _latex(gold), "answer": answer, "digits": self.digits,
                             "strict": self.strict})
                owners.append(i)
        values = [0.0] * len(samples)
        for i, outcome in zip(owners, self._run("mathematics", jobs), strict=True):
            values[i] = max(values[i], number(reported(outcome)))
        return values


def _latex(gold: str) -> str:
    return gold if "\\boxed" in gold or "$" in gold else f"$\\boxed{{{gold}}}$"
