"""Writes a benchmark's section of a page of docs/, between its two markers."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kilter.report.machine import cpu_name

DOCS = Path(__file__).parents[1] / "docs"


def write_section(name: str, text: str, page: Path = DOCS / "benchmarks.md") -> None:
    """Replaces what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.

    Raises:
        ValueError: if the page has no such markers.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no section {name!r}: it needs {begin} and {end}.")
    write(page, f"{head}{begin}\n{text.strip()}\n{end}{tail}")


def write(path: Path, text: str) -> None:
    """A file whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def provenance() -> str:
    """Where and when, for the first line of a section."""
    return f"{time.strftime('%Y-%m-%d')}, {cpu_name()}."
