"""Rewards that look at the text or its length only: exact, contains, regex, format, length."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kilter.rl.rewards.sample import Sample

Extract = Literal["whole", "tag", "last_line"]


def extract_answer(text: str, how: Extract, tag: str = "answer") -> str | None:
    """The part of an answer that is judged, stripped; None where there is no such part.

    Args:
        how: "whole"; "tag": inside the last ``<tag>…</tag>``; "last_line": the last line that is
            not blank.
    """
    if how == "tag":
        end = text.rfind(f"</{tag}>")
        start = text.rfind(f"<{tag}>", 0, max(end, 0))
        return text[start + len(tag) + 2:end].strip() if end >= 0 and start >= 0 else None
    if how == "last_line":
        lines = text.strip().splitlines()
        return lines[-1].strip() if lines else None
    return text.strip()


def reference_texts(sample: Sample) -> list[str]:
    """The accepted answers of a reference: a text or a number, a list of them, or a record with
    them under "answer".

    Raises ValueError for anything else.
    """
    found: Any = sample.reference
    if isinstance(found, dict):
        found = found.get("answer")
    texts = found if isinstance(found, list | tuple) else [found]
    if not texts or not all(isinstance(t, str | int | float) and not isinstance(t, bool)
                            for t in texts):
        raise ValueError(f"The reference is {sample.reference!r}, but this reward needs a text or "
                         "number, a list of them, or a record with them under \"answer\".")
    return [str(text) for text in texts]


@dataclass(frozen=True)
class Exact:
    """1 where the answer is one of the references, else 0.

    Attributes:
        extract: which part of the answer, as `extract_answer`.
        ignore_case: compare without case.
        ignore_space: take every run of white space as one blank.
    """

    name: str = "exact"
    extract: Extract = "whole"
    tag: str = "answer"
    ignore_case: bool = False
    ignore_space: bool = False

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> float:
        accepted = {self._plain(text) for text in reference_texts(sample)}
        answer = extract_answer(sample.answer_text, self.extract, self.tag)
        return float(answer is not None and self._plain(answer) in accepted)

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_space else text.strip()
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True)
class Contains:
    """1 where the answer contains one of the references (or all of them, by `match`), else 0.

    Attributes:
        words: count only whole words, so that 42 is not in 1420.
    """

    name: str = "contains"
    match: Literal["any", "all"] = "any"
    words: bool = True
    ignore_case: bool = False

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> float:
        edge = (r"(?<!\w)", r"(?!\w)") if self.words else ("", "")
        flags = re.IGNORECASE if self.ignore_case else 0
        found = [re.search(edge[0] + re.escape(text) + edge[1], sample.answer_text, flags)
                 is not None for text in reference_texts(sample)]
        return float(sum(found) == len(found) if self.match == "all" else any(found))




@dataclass(frozen=True)
class Regex:
    """`matched` where a pattern of Python's `re` matches, else `otherwise`.

    The pattern is yours and the text is a model's: avoid nested repetitions, which can take time
    exponential in the text.

    Attributes:
        full: the whole answer has to match, instead of a part of it.
        flags: of "i" (ignore case), "m" (^ and $ at lines), "s" (. matches newlines).
    """

    pattern: str
    name: str = "regex"
    full: bool = False
    flags: str = ""
    matched: float = 1.0
    otherwise: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if set(self.flags) - set("ims"):
            problems.append(f"flags is {self.flags!r} but may only have the letters i, m and s.")
        try:
            re.compile(self.pattern)
        except re.error as error:
            problems.append(f"The pattern {self.pattern!r} is not a regular expression: {error}.")
        problems += _finite(matched=self.matched, otherwise=self.otherwise)
        if problems:
            raise ValueError(" ".join(problems))

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        flags = re.NOFLAG
        for letter in self.flags:
            flags |= {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}[letter]
        pattern = re.compile(self.pattern, flags)
        match = pattern.fullmatch if self.full else pattern.search
        return [self.matched if match(sample.answer_text) else self.otherwise
                for sample in samples]


@dataclass(frozen=True)
class Format:
    """1 where the answer is exactly one ``<tag>…</tag>`` for every tag in their order, with nothing
    but white space around them; else 0. A tag of `optional_open` may lack its opening, which some
    chat templates write into the prompt."""

    name: str = "format"
    tags: tuple[str, ...] = ("think", "answer")
    optional_open: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", tuple(self.tags))
        object.__setattr__(self, "optional_open", tuple(self.optional_open))
        problems = []
        if not self.tags or len(set(self.tags)) < len(self.tags):
            problems.append(f"tags is {self.tags} but must name at least one, each once.")
        if set(self.optional_open) - set(self.tags[:1]):
            problems.append(f"optional_open is {self.optional_open}, but only the first tag "
                            f"({self.tags[0] if self.tags else 'none'}) can be opened by a prompt.")
        if problems:
            raise ValueError(" ".join(problems))

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._holds(sample.answer_text)) for sample in samples]

    def _holds(self, text: str) -> bool:
        place = 0
        for tag in self.tags:
            start, end = f"<{tag}>", f"</{tag}>"
            if text.count(end) != 1 or text.count(start) > 1:
                return False
            if start in text:
                at = text.index(start)
                if at < place or text[place:at].strip():
                    return False
                place = at + len(start)
            elif tag not in self.optional_open:
                return False
            if text.index(end) < place:
                return False
            place = text.index(end) + len(end)
        return not text[place:].strip()


@dataclass(frozen=True)
class Length:
    """A penalty for long answers: 0 up to `free`, falling in a straight line to −1 at `limit`.

    With `free` = limit − buffer this is the soft overlong punishment of DAPO (arXiv 2503.14476).

    Attributes:
        unit: what is counted: the action tokens, or characters.
    """

    free: int
    limit: int
    name: str = "length"
    unit: Literal["tokens", "characters"] = "tokens"

    def __post_init__(self) -> None:
        if not 0 <= self.free < self.limit:
            raise ValueError(f"free is {self.free} and limit {self.limit}, but it must be 0 <= "
                             "free < limit.")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> float:
        n = len(sample.token_ids) if self.unit == "tokens" else len(sample.answer_text)
        return 0.0 - min(max((n - self.free) / (self.limit - self.free), 0.0), 1.0)


def _finite(**values: float) -> list[str]:
    return [f"{name} is {value} but must be finite." for name, value in values.items()
            if not math.isfinite(value)]
