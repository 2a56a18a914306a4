"""The two ways an op can compute on a CPU, and row-by-row products in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kilter.ops.cpu import library


@pytest.fixture(params=["kernel", "torch"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the compiled kernel and with the pure-torch fallback of the op module that
    the test file imports as ``module``."""
    if request.param == "torch":
        monkeypatch.setattr(request.module.module, "available", lambda: False)
    elif not library.available():
        pytest.skip("no compiler")
    return request.param


class _RowByRow:
    """numpy, but for `matmul`. Triton's interpreter multiplies with numpy, whose library may sum a
    row differently beside other rows (on some processors it does); a GPU's `tl.dot` does not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        return np.matmul(a[..., :, None, :], b[..., None, :, :], **options)[..., 0, :]


@pytest.fixture(autouse=True, scope="session")
def interpreted_rows_are_rows() -> Iterator[None]:
    try:
        from triton.runtime import interpreter
    except ImportError:  # then there are no such tests
        yield
        return
    before, interpreter.np = interpreter.np, _RowByRow()
    yield
    interpreter.np = before
