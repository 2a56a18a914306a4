"""Writes a benchmark's section of docs/benchmarks.md, between its two markers."""

from __future__ import annotations

import time
from pathlib import Path

from kilter.report.machine import cpu_name

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def write_section(name: str, text: str) -> None:
    """Replaces what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.

    Raises:
        ValueError: if the page has no such markers.
    """
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in page or end not in page:
        raise ValueError(f"{PAGE} has no section {name!r}: it needs {begin} and {end}.")
    head, _, rest = page.partition(begin)
    tail = rest.partition(end)[2]
    PAGE.write_text(f"{head}{begin}\n{text.strip()}\n{end}{tail}", encoding="utf-8")


def provenance() -> str:
    """Where and when, for the first line of a section."""
    return f"{time.strftime('%Y-%m-%d')}, {cpu_name()}."
