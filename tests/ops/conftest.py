"""The two ways an op can compute on a CPU."""

from __future__ import annotations

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
