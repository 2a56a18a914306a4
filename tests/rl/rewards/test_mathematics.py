"""Mathematical answers: pairs whose equality is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kilter.rl.rewards import RewardConfig, Sample, WeightedReward, build_reward, score
from kilter.rl.rewards.jails import Limits, NoJail
from kilter.rl.rewards.mathematics import Mathematics
from kilter.rl.rewards.score import RewardError

pytest.importorskip("math_verify")

EQUAL = [
    ("1/2", "0.5"), ("\\frac{1}{2}", "so it is \\boxed{0.5}."), ("0.333333", "$1/3$"),
    ("x^2+2x+1", "$(x+1)^2$"), ("\\sqrt{8}", "$2\\sqrt{2}$"), ("\\sin^2 x + \\cos^2 x", "$1$"),
    ("\\{1,2\\}", "$\\{2,1\\}$"), ("[0,1)", "$[0,1)$"), ("1000", "1,000"),
    ("5", "The final answer is 5."), ("x=5", "$5$"),
    ("5", "first \\boxed{4}.\n\nAfter a second look at all of it: \\boxed{5}"),
    ("50\\%", "$\\boxed{0.5}$"), ("-3", "$-3$"), (7, "7"), ("\\boxed{2}", "2"),
    (["1", "2"], "2"), ({"answer": "3"}, "$3$")]
UNEQUAL = [
    ("1/2", "0.51"), ("x", "$y$"), ("(0,1)", "$[0,1]$"), ("\\sqrt{2}", "1.41"), ("3", "-3"),
    ("5", "5 is not it, it is \\boxed{4}"), ("4", ""), ("4", "I do not know."),
    ("5", "\\boxed{4} or \\boxed{5}"),  # two answers are not one right one
    ("\\{1,2\\}", "$\\{1,2,3\\}$"), (["1", "2"], "3")]


LONG = 600.0  # seconds in which a judgement that ends does so, on a busy machine too


@dataclass(frozen=True)
class Hasty(Mathematics):
    """With seconds of CPU instead of a clock's, which a busy machine does not shorten."""

    def _limits(self) -> Limits:
        return Limits(seconds=LONG, cpu_seconds=3, memory_mb=self.memory_mb)


@pytest.fixture(scope="module")
def reward() -> Iterator[Mathematics]:
    made = Mathematics(workers=1, seconds=LONG)
    yield made
    made.close()


def sample(reference: Any, answer: str) -> Sample:
    return Sample(prompt="", answer_text=answer, reference=reference)


def test_pairs_known_to_be_equal_or_not(reward: Mathematics) -> None:
    values = reward([sample(*pair) for pair in (*EQUAL, *UNEQUAL)])
    wrong = [pair for pair, value, good in zip(
        (*EQUAL, *UNEQUAL), values, [1.0] * len(EQUAL) + [0.0] * len(UNEQUAL), strict=True)
        if value != good]
    assert wrong == []


def test_an_answer_that_takes_for_ever_costs_its_time_only() -> None:
    hasty = Hasty(workers=1)
    found: list[float] = []
    answers = [sample("10", "\\boxed{" + "9^{" * 6 + "9" + "}" * 7), sample("10", "$10$")]
    thread = threading.Thread(target=lambda: found.extend(hasty(answers)))  # no main thread
    thread.start()
    thread.join()
    hasty.close()
    assert found == [0.0, 1.0]


def test_extraction_options() -> None:
    tagged = Mathematics(workers=1, seconds=LONG, extract="tag")
    assert tagged([sample("4", "4"), sample("4", "5 <answer>4</answer>")]) == [0.0, 1.0]
    tagged.close()


@pytest.mark.parametrize("reference", [None, [], {"solution": "4"}, ""])
def test_references_that_cannot_be_used(reward: Mathematics, reference: Any) -> None:
    with pytest.raises(RewardError, match=r"math failed on sample 1 .* The reference"):
        score([WeightedReward(reward)], [sample("4", "4"), sample(reference, "4")])


def test_a_missing_package_is_named() -> None:
    import sys

    from kilter.rl.rewards import jails
    path = sys.path[:]
    try:
        sys.path[:] = [p for p in path if "site-packages" not in p]
        with pytest.raises(NoJail, match=r"package that is not there: .*math_verify.*"
                                         r"pip install 'kilter\[rl\]'"):
            jails.Jails("mathematics", jails.Limits(), 1).run([{}])
    finally:
        sys.path[:] = path


def test_it_is_built_from_a_job() -> None:
    weighted = build_reward(RewardConfig("math", weight=0.5, options={"seconds": 3, "digits": 2}))
    assert weighted.reward == Mathematics(seconds=3.0, digits=2) and weighted.weight == 0.5
