"""The loaded kernel library, and the one way to call into it.

Every kernel is ``void kt_name(const Args*)`` over a plain struct that is mirrored here as a
`ctypes.Structure`. `Kernel.call` makes the call at once, or, while a `Tape` is recording, also
appends it, so that a whole pass can be replayed later as one call.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from kilter.ops.cpu import build

if TYPE_CHECKING:
    from kilter.ops.cpu.tape import Tape

recording: ContextVar[Tape | None] = ContextVar("recording", default=None)


@functools.cache
def load(isa: str | None = None) -> ctypes.CDLL:
    """The kernel library for an instruction set (default: the best this processor has), with as
    many threads as torch has.

    Raises:
        build.KernelBuildError: if it cannot be built.
    """
    library = ctypes.CDLL(str(build.build(isa)))
    library.kt_set_num_threads(torch.get_num_threads())
    return library


@functools.cache
def available() -> bool:
    """Whether the compiled kernels can be used; says why not, once, if they cannot."""
    try:
        load()
    except build.KernelBuildError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return False
    return True


class Kernel:
    """One entry point: its name and its argument struct."""

    def __init__(self, name: str, args: type[ctypes.Structure]) -> None:
        self.name = name
        self.args = args
        self._fn: Any = None

    def call(self, *values: Any, keep: tuple[Any, ...] = ()) -> None:
        """Calls the kernel. ``values`` fill the struct in order; ``keep`` are the objects whose
        memory it points to (a recording tape holds on to them)."""
        if self._fn is None:
            self._fn = getattr(load(), self.name)
            self._fn.restype = None
        block = self.args(*values)
        self._fn(ctypes.byref(block))
        tape = recording.get()
        if tape is not None:
            tape.append(self._fn, block, keep)


def set_num_threads(count: int) -> None:
    """How many threads the kernels use from now on.

    Raises:
        ValueError: for fewer than 1 or more than 1,024.
    """
    if not 1 <= count <= 1024:
        raise ValueError(f"{count} threads were asked for; it must be from 1 to 1024.")
    if available():
        load().kt_set_num_threads(count)
