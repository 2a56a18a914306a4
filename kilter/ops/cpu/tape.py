"""A `Tape` is a recorded pass over the CPU kernels that replays as one call.

A decode step runs the same kernels on the same buffers again and again; only the numbers in its
input buffers change. Recording it once takes Python out of the loop, as a CUDA graph does on a
GPU. What is recorded are kernel calls only: everything a recorded pass computes must be done by
kernels, on buffers that live as long as the tape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kilter.ops.cpu import library


class _Call(ctypes.Structure):
    _fields_ = [("fn", ctypes.c_void_p), ("args", ctypes.c_void_p)]


class Tape:
    """Use as ``tape = Tape(); with tape.record(): run()``, then ``tape.replay()``."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, ctypes.Structure]] = []
        self._keep: list[Any] = []
        self._array: ctypes.Array[_Call] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def record(self) -> Iterator[Tape]:
        if self._array is not None or self._calls:
            raise ValueError("This tape has been recorded already; make a new one.")
        token = library.recording.set(self)
        try:
            yield self
        finally:
            library.recording.reset(token)
        self._array = (_Call * len(self._calls))(
            *(_Call(fn, ctypes.addressof(block)) for fn, block in self._calls))

    def append(self, fn: Any, block: ctypes.Structure, keep: tuple[Any, ...]) -> None:
        address = ctypes.cast(fn, ctypes.c_void_p).value
        assert address is not None
        self._calls.append((address, block))
        self._keep.append(keep)

    def replay(self) -> None:
        """Runs every recorded call, in order, on the buffers they were recorded with.

        Raises:
            ValueError: if nothing has been recorded.
        """
        if self._array is None:
            raise ValueError("This tape is empty: record a pass before replaying it.")
        library.load().kt_replay(ctypes.byref(self._array), ctypes.c_long(len(self._calls)))
