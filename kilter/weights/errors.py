"""The one error of this room: everything wrong with a model's files, in full sentences."""

from __future__ import annotations

from collections.abc import Sequence


class WeightsError(ValueError):
    """A model's files cannot be used as they are; the message lists every problem found."""


def raise_all(problems: Sequence[str], heading: str) -> None:
    """Raises one `WeightsError` that holds every sentence of `problems`; nothing when empty."""
    if len(problems) == 1:
        raise WeightsError(f"{heading} {problems[0]}")
    if problems:
        raise WeightsError("\n  - ".join([f"{heading} There are {len(problems)} problems:",
                                          *problems]))
