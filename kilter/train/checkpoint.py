"""Checkpoints: whole or absent, and readable by any layout.

    checkpoints/
      step-00000100/          a folder with this name is complete: it is renamed when it is
        .metadata, *.distcp   torch's distributed checkpoint (DCP): parameters and optimizer states
        trainer.json          step, data position, the job, the layout it was written under
      step-00000200.partial/  being written or removed, or left by a run that died

The folder is locked while a run writes to it. Tensors are written as the boxes of the whole
parameters that their ranks own, under the parameters' own names, so reading one is asking for other
boxes of the same thing: other degrees, other numbers of ranks, one process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kilter.comm.axis import Axis
from kilter.train.pieces import (
    INDEX,
    Pieces,
    PiecesError,
    load_pieces,
    save_pieces,
    stored_shapes,
)

_NAME = re.compile(r"step-(\d+)")
_FACTS = "trainer.json"
_FORMAT = 1  # of what a checkpoint holds and how


class CheckpointError(ValueError):
    """A checkpoint that is not there, does not fit or cannot be written; the message says what to
    do."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept.

    Attributes:
        every: steps between two; 0: only at the end of the run and when it is stopped.
        keep: how many of the last ones; 0: all.
        asynchronous: write while training goes on (from a copy in the host's memory).
    """

    every: int = 100
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 0:
            raise ValueError(f"Checkpoints every {self.every} steps, keeping {self.keep}, cannot "
                             f"be: neither number may be negative.")


class Checkpointer:
    """Writes and finds the checkpoints of one run.

    Args:
        folder: where the ``step-…`` folders are.
        world: all ranks; they call every method together.

    Raises:
        CheckpointError: on all ranks, if the folder cannot be made, is not the same one for all of
            them, or another run has it.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, world: Axis) -> None:
        self._folder, self._config, self._world = folder, config, world
        # DCP warns whenever one process is alone, which is what we ask of it.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        # The writer talks beside the training's collectives, so it has a group of its own.
        self._group = dist.new_group(list(world.ranks), backend="gloo") if world.size > 1 else None
        self._lock: int | None = None
        self._on_first(self._take)
        if self._group is not None:
            try:
                self._check_shared(self._group)
            except BaseException:
                self.close()
                raise

    def save(self, step: int, tensors: Mapping[str, Pieces], facts: Mapping[str, Any]) -> None:
        """Writes the checkpoint of a step; with ``asynchronous`` returns when a copy is made.

        Args:
            facts: what `trainer.json` holds; the same on all ranks.

        Raises:
            CheckpointError: on all ranks, if writing failed on any; with ``asynchronous``, the next
                call or `wait` raises it, and `failed` tells. Nothing is left of it, and the
                checkpoints before it are untouched.
        """
        self.wait()
        copies = {name: pieces.copy() for name, pieces in tensors.items()}
        text = json.dumps({"format": _FORMAT, "step": step, **facts}, indent=1)
        self._writing = self._thread.submit(self._write, step, copies, text)
        if not self._config.asynchronous:
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether the last write is known to have failed."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def wait(self) -> None:
        """Until nothing is being written. Raises CheckpointError, as `save`."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _take(self) -> None:
        """Makes the folder this run's, and removes what a run left that died in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise CheckpointError(f"Another run is writing to {self._folder}. Wait for its end or "
                                  "stop it, or name another output folder.") from None
        except OSError:  # a file system without locks
            os.close(lock)
        else:
            self._lock = lock
        for left in self._folder.glob("step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)

    def _check_shared(self, group: dist.ProcessGroup) -> None:
        """That all ranks write to one place: else what some write would never be read again."""
        token: list[str | None] = [secrets.token_hex(8)]
        dist.broadcast_object_list(token, self._world.ranks[0], group=group)
        mark = self._folder / f"step-{token[0]}.partial"
        self._on_first(mark.mkdir)
        seen: list[bool | None] = [None] * self._world.size
        dist.all_gather_object(seen, mark.is_dir(), group=group)
        self._on_first(mark.rmdir)
        if blind := [rank for rank, sees in enumerate(seen) if not sees]:
            raise CheckpointError(
                f"What rank 0 writes to {self._folder} is not there for rank"
                f"{'s' if len(blind) > 1 else ''} {', '.join(map(str, blind))}. Let output be a "
                "folder on a file system that all machines share.")

    def _on_first(self, work: Callable[[], None]) -> None:
        """Rank 0 works, and all wait for it and raise `CheckpointError` if it failed."""
        failure: str | None = None
        if self._world.index == 0:
            try:
                work()
            except CheckpointError as error:
                failure = str(error)
            except OSError as error:
                failure = f"{error.filename or self._folder}: {error.strerror}"
        told = [failure]
        if self._group is not None:
            dist.broadcast_object_list(told, self._world.ranks[0], group=self._group)
        if told[0] is not None:
            raise CheckpointError(told[0])

    def _write(self, step: int, tensors: dict[str, Pieces], text: str) -> None:
        final = self._folder / f"step-{step:08d}"
        partial = final.with_name(final.name + ".partial")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            with open(partial / _FACTS, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # the rest is synced by DCP

        def end() -> None:
            if final.exists():  # but is not whole, or the run would have gone on from it
                _remove(final)
            os.replace(partial, final)
            _sync(self._folder)
            if self._config.keep:
                for old in checkpoints(self._folder)[:-self._config.keep]:
                    with suppress(OSError):  # then the next one removes it too
                        _remove(old)

        try:
            self._on_first(begin)
            save_pieces(tensors, partial, self._group)
            self._on_first(end)
        except (CheckpointError, PiecesError) as error:
            why = str(error)
            self._on_first(lambda: self._lost(step, why, partial))

    def _lost(self, step: int, why: str, partial: Path) -> None:
        """Removes what there is of a checkpoint that could not be written, and raises."""
        free = ""
        with suppress(OSError):
            free = f"; {shutil.disk_usage(self._folder).free / 1e9:.2f} GB are free there"
        shutil.rmtree(partial, ignore_errors=True)
        whole = checkpoints(self._folder)
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {self._folder} ({why}{free}). "
            "Make room for it, or mend what is wrong there; the same command then "
            + (f"goes on from {whole[-1].name}, which is whole." if whole else
               "starts again, as there was none before it."))


def _remove(checkpoint: Path) -> None:
    """Renames first: half removed, it must not look whole."""
    aside = checkpoint.with_name(checkpoint.name + ".partial")
    os.replace(checkpoint, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Puts a folder's entries on the disk, where the file system can."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)
             and (path / INDEX).is_file()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `Checkpointer.save` was given as facts, and the step.

    Raises:
        CheckpointError: if the folder is no checkpoint, or one of another version.
    """
    try:
        facts = json.loads((checkpoint / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, str(error)) from None
    if not isinstance(facts, dict) or "step" not in facts:
        raise _damaged(checkpoint, f"{_FACTS} says no step")
    if facts.get("format") != _FORMAT:
        raise CheckpointError(
            f"{checkpoint} was written by another version of Kilter, in the format "
            f"{facts.get('format', 0)}; this version reads the format {_FORMAT}. Finish the run "
            "with that version, or name another output folder.")
    return facts


def _damaged(checkpoint: Path, why: str) -> CheckpointError:
    before = [path.name for path in checkpoints(checkpoint.parent) if path.name < checkpoint.name]
    return CheckpointError(
        f"{checkpoint} cannot be read ({why}); it is damaged or no checkpoint. Put it back as it "
        "was, or remove it: the same command then "
        + (f"goes on from {before[-1]}." if before else
           "starts again, as there is none before it."))


def load_tensors(checkpoint: Path, tensors: Mapping[str, Pieces], world: Axis) -> None:
    """Fills the pieces' tensors; each rank reads its own boxes, whatever layout wrote them.

    Raises:
        CheckpointError: for a tensor that the checkpoint does not have, or has in another shape;
            on all ranks, if it is damaged.
    """
    try:
        stored = stored_shapes(checkpoint)
        problems = [
            f"{name} is not in it" if name not in stored else
            f"{name} has shape {list(stored[name])} there and {list(pieces.shape)} here"
            for name, pieces in tensors.items() if stored.get(name) != tuple(pieces.shape)]
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(f"The checkpoint {checkpoint} is not of this model and "
                                  f"optimizer: {'; '.join(problems[:10])}{more}.")
        load_pieces(tensors, checkpoint, world.group)
    except PiecesError as error:
        raise _damaged(checkpoint, str(error)) from None
