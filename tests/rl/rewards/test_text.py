"""Rewards of text and length, on answers judged by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.rl.rewards import Sample
from kilter.rl.rewards.text import Contains, Exact, Format, Length, Regex, extract_answer


def judged(reward: Any, text: str, reference: Any = None, tokens: int = 0) -> float:
    return reward([Sample(prompt="", answer_text=text, reference=reference,
                          token_ids=tuple(range(tokens)))])[0]


@pytest.mark.parametrize(("text", "how", "answer"), [
    (" 7 \n", "whole", "7"), ("a\n b \n\n", "last_line", "b"), (" \n ", "last_line", None),
    ("x<answer> 7 </answer>y", "tag", "7"), ("<answer>1</answer><answer>2</answer>", "tag", "2"),
    ("<answer>1", "tag", None), ("1</answer>", "tag", None), ("</answer><answer>", "tag", None),
    ("<answer>1</answer> <answer>", "tag", "1"), ("<answer>a\nb</answer>", "tag", "a\nb")])
def test_extraction(text: str, how: Any, answer: str | None) -> None:
    assert extract_answer(text, how) == answer


def test_exact() -> None:
    assert judged(Exact(), " 42\n", "42") == judged(Exact(), "42", 42) == 1.0
    assert judged(Exact(), "42!", "42") == 0.0
    assert judged(Exact(), "b", ["a", "b"]) == judged(Exact(), "b", {"answer": ["b"]}) == 1.0
    assert judged(Exact(ignore_case=True, ignore_space=True), "New\n york", "NEW YORK") == 1.0
    assert judged(Exact(extract="tag"), "42 <answer>41</answer>", "42") == 0.0
    assert judged(Exact(extract="tag"), "no answer", "") == 0.0
    for reference in (None, [], {"x": 1}, [None], True):
        with pytest.raises(ValueError, match="The reference is"):
            judged(Exact(), "", reference)


def test_contains() -> None:
    assert judged(Contains(), "it is 42.", "42") == 1.0
    assert judged(Contains(), "it is 1420", "42") == 0.0
    assert judged(Contains(words=False), "it is 1420", "42") == 1.0
    assert judged(Contains(), "a", ["a", "b"]) == 1.0
    assert judged(Contains(match="all"), "a", ["a", "b"]) == 0.0
    assert judged(Contains(match="all", ignore_case=True), "B, A", ["a", "b"]) == 1.0
    assert judged(Contains(), "f(x)", "f(x)") == 1.0  # no pattern


def test_regex() -> None:
    assert judged(Regex(r"^\d+$", flags="m", otherwise=-0.5), "so\n12\n") == 1.0
    assert judged(Regex(r"\d+", full=True, otherwise=-0.5), "12 ") == -0.5
    with pytest.raises(ValueError, match=r"flags is 'x'.*not a regular expression"):
        Regex("(", flags="x")


@pytest.mark.parametrize(("text", "holds"), [
    ("<think>a</think> <answer>b</answer>\n", True), ("a</think><answer>b</answer>", False),
    ("<answer>b</answer><think>a</think>", False), ("<think>a</think><answer>b", False),
    ("<think>a</think>so<answer>b</answer>", False), ("<think>a</think><answer>b</answer>.", False),
    ("<think>a<answer>b</think></answer>", False), ("", False),
    ("<think>a</think><answer>b</answer><answer>c</answer>", False)])
def test_format(text: str, holds: bool) -> None:
    assert judged(Format(), text) == float(holds)


def test_a_tag_that_the_prompt_opens() -> None:
    opened = Format(optional_open=("think",))
    assert judged(opened, "a</think><answer>b</answer>") == 1.0
    assert judged(opened, "<think>a</think><answer>b</answer>") == 1.0
    assert judged(opened, "<answer>b</answer>") == 0.0
    with pytest.raises(ValueError, match="only the first tag"):
        Format(optional_open=("answer",))


@given(st.text(alphabet="ab<>/think answer\n", max_size=60))
def test_format_is_the_pattern_it_describes(text: str) -> None:
    import re
    oracle = re.fullmatch(r"\s*<think>((?!</?think>|</?answer>).)*</think>\s*"
                          r"<answer>((?!</?think>|</?answer>).)*</answer>\s*", text, re.DOTALL)
    assert judged(Format(), text) == float(oracle is not None)


def test_length_is_dapos_overlong_punishment() -> None:
    reward = Length(free=12, limit=16)
    assert [judged(reward, "", tokens=n) for n in (0, 12, 13, 14, 16, 99)] == [
        0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert judged(Length(free=0, limit=4, unit="characters"), "ab", tokens=99) == -0.5
    with pytest.raises(ValueError, match="free is 5 and limit 5"):
        Length(free=5, limit=5)
