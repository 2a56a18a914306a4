"""Tests of the ops, and how they run one kernel on every instruction set this machine has."""

from __future__ import annotations

import gc

import pytest

from kilter.ops.cpu import build, library


def runnable_isas() -> list[str]:
    """The instruction sets we build for that this processor can run, widest first."""
    order = list(build.ISA_FLAGS)
    return order[order.index(build.detect_isa()):]


def use_library(monkeypatch: pytest.MonkeyPatch, isa: str, threads: int = 1) -> None:
    """Makes every kernel run from the library built for `isa`, until the test ends."""
    loaded = library.load(isa)
    loaded.kt_set_num_threads(threads)
    for kernel in gc.get_objects():
        if type(kernel) is library.Kernel:
            fn = getattr(loaded, kernel.name)
            fn.restype = None
            monkeypatch.setattr(kernel, "_fn", fn)
