"""`kilter doctor`: passes where Kilter works, and says what fails where it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kilter.cli import main
from kilter.ops.cpu import build, library
from kilter.report import machine
from kilter.serve import exactness

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speeds are real measurements and take a second each; here they need not."""
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 2e10)
    monkeypatch.setattr(machine, "gemm_rate", lambda: 3e11)


def test_this_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == []
    differences = [c for c in report["checks"] if "chunks" in c["name"] or "batch" in c["name"]]
    assert all(c["detail"] == "0.0" for c in differences)
    shown = re.findall(r"^  ok  (\S.*?)  +0\.0$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert [c["name"] for c in differences] == shown != []
    assert report["speed"] == {"read_bytes_per_s": 2e10, "fp32_gemm_flop_per_s": 3e11}


def test_a_difference_of_one_bit_fails(monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(exactness, "self_test", lambda: [("fp32: chunks", 0.0),
                                                         ("int8: decoded", 2.0**-23)])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "Failed: int8: decoded." in out
    assert "ok    fp32: chunks" in out and "FAIL  int8: decoded" in out
    assert "reads memory at 20.0 GB/s, multiplies fp32 matrices at 300 GFLOP/s" in out


def test_no_compiler_fails_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(exactness, "self_test", lambda: [])
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(library, "load", lambda: build.build())
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "compiler   none" in out
    assert "FAIL  CPU kernels  No C++ compiler was found" in out and "set CXX" in out


def test_models_in_the_cache_are_listed(smollm2: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(exactness, "self_test", lambda: [])
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["smollm2-135m"] == str(smollm2)


def test_speeds_are_measured() -> None:
    """The real functions (the fixture replaced the module's names, not these)."""
    calls: list[int] = []
    assert machine.best_seconds(lambda: calls.append(1), budget=0.0) >= 0.0
    assert len(calls) == 4
