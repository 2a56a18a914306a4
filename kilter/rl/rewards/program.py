"""Programs: the share of a task's tests that an answer's Python passes.

A reference is a list of tests, or a record with them under "tests". A test is one of

    {"stdin": "3 4\\n", "stdout": "7\\n"}             run as a script; white space at ends is free
    {"call": "add", "args": [3, 4], "expected": 7}   a function's value, as JSON has it
    {"assert": "assert add(3, 4) == 7"}              statements after the candidate, in its process

What is expected of the first two is compared here and never given to the candidate, so it can pass
only by finding it. A candidate shares its process with an assertion and could tamper with it: take
assertions where you trust the policy to be no cheat, or have nothing else.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kilter.rl.rewards.jails import Limits, Outcome
from kilter.rl.rewards.judged import Jailed, reported
from kilter.rl.rewards.sample import Sample

_FENCE = re.compile(r"^```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL
                    | re.IGNORECASE)
_KEYS = {"stdin": {"stdin", "stdout"}, "call": {"call", "args", "kwargs", "expected"},
         "assert": {"assert"}}


@dataclass(frozen=True)
class Program(Jailed):
    """The share of tests passed, each run for itself; or 1 for all and else 0, by `all_or_nothing`.

    Attributes:
        extract: "fence": the last block in ``` fences (none scores 0); "whole": all of the answer.
        output_kb, open_files, file_mb: as `jails.Limits`.
    """

    name: str = "program"
    extract: Literal["fence", "whole"] = "fence"
    all_or_nothing: bool = False
    memory_mb: int = 512
    output_kb: int = 256
    open_files: int = 64
    file_mb: int = 0

    def _limits(self) -> Limits:
        return Limits(seconds=self.seconds, memory_mb=self.memory_mb, output_kb=self.output_kb,
                      open_files=self.open_files, file_mb=self.file_mb)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        jobs, owners = [], []
        counts = [0] * len(samples)
        for i, sample in enumerate(samples):
            tests = tests_of(sample)
            counts[i] = len(tests)
            program = extract_program(sample.answer_text, self.extract)
            for test in tests if program is not None else ():
                jobs.append(({"program": program} | _job(test), test))
                owners.append(i)
        passed = [0] * len(samples)
        outcomes = self._run("program", [job for job, _ in jobs])
        for i, (job, test), outcome in zip(owners, jobs, outcomes, strict=True):
            passed[i] += _passed(job, test, outcome)
        if self.all_or_nothing:
            return [float(p == n) for p, n in zip(passed, counts, strict=True)]
        return [p / n for p, n in zip(passed, counts, strict=True)]


def extract_program(text: str, how: Literal["fence", "whole"]) -> str | None:
    """An answer's program, or None where there is none."""
    if how == "whole":
        return text
    found = _FENCE.findall(text)
    return found[-1] if found else None


def tests_of(sample: Sample) -> list[Mapping[str, Any]]:
    """A reference's tests, checked.

    Raises ValueError for a reference without tests or a test of another form.
    """
    reference = sample.reference
    tests = reference.get("tests") if isinstance(reference, dict) else reference
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"The reference is {reference!r}, but this reward needs a list of tests, "
                         "or a record with one under \"tests\".")
    for test in tests:
        kind = [key for key in _KEYS if isinstance(test, dict) and key in test]
        if len(kind) != 1 or set(test) - _KEYS[kind[0]] or (
                kind[0] != "assert" and not {"stdout", "expected"} & test.keys()):
            raise ValueError(f"The test {test!r} is none of {{stdin, stdout}}, {{call, args, "
                             "kwargs, expected} and {assert}.")
    return tests


def _job(test: Mapping[str, Any]) -> dict[str, Any]:
    if "assert" in test:
        return {"assert": test["assert"], "token": secrets.token_hex(16)}
    return {key: value for key, value in test.items() if key not in ("stdout", "expected")}


def _passed(job: Mapping[str, Any], test: Mapping[str, Any], outcome: Outcome) -> bool:
    if "stdin" in test:
        return outcome.ok and _lines(outcome.output) == _lines(test["stdout"])
    record = reported(outcome)
    if "assert" in test:
        return record.get("passed") == job["token"]
    return "value" in record and same(record["value"], test["expected"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; numbers that are not whole to one part in 10⁹."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
