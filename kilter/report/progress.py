"""A progress bar on stderr for long work, so that stdout stays the command's own output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, in_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Shows a bar for `what` while the block runs, on a terminal only, and takes it away after.

    Yields ``update(done, total, what=what)``, in bytes or in things, total 0 while it is unknown,
    to be called as often as one likes.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, what="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = ([DownloadColumn(binary_units=True), TransferSpeedColumn()] if in_bytes
              else [MofNCompleteColumn()])
    bar = Progress(TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn(),
                   console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int, what: str = what) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield update
