"""Where a run tells of itself: the console, ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class Record:
    """Of one rank; only the first writes.

    Args:
        output: the run's folder; None on other ranks.
        step: the last whose lines stay; what is there of later ones is taken back.
    """

    def __init__(self, output: Path | None, *, jsonl: bool, tensorboard: bool, step: int) -> None:
        self.unread = False  # whether the console is gone, which ends the run
        self._first = output is not None
        self._seconds: dict[str, float] = {}  # by phase
        self._lines = self._board = None
        if output is None:
            return
        output.mkdir(parents=True, exist_ok=True)
        if jsonl:
            self._lines = lines_to(output / "metrics.jsonl", step)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(output / "tensorboard"), purge_step=step + 1)

    def say(self, text: str) -> None:
        """A line on the console."""
        if self._first and not self.unread:
            try:
                print(text, flush=True)
            except OSError:  # a reader that went away, a terminal that was closed
                self.unread = True

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A line in the files."""
        if self._lines is not None:
            self._lines.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._lines.flush()
        if self._board is not None:
            for name, value in _numbers(values):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Its seconds are told with the step's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._board is not None:
            self._board.close()


def lines_to(path: Path, step: int) -> TextIO:
    """A file of JSON lines to append to, without those of later steps than this and without a last
    line that was cut off."""
    if path.exists():
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                late = json.loads(line)["step"] > step
            except ValueError:
                continue  # the process died while it wrote this
            if not late:
                kept.append(line + "\n")
        new = path.with_name(f".{path.name}.new")
        new.write_text("".join(kept), encoding="utf-8")
        os.replace(new, path)
    return open(path, "a", encoding="utf-8")


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)
