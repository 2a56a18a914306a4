"""`kilter pull` as a command; downloading, verifying and resuming are tests/weights' business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kilter.cli import main
from kilter.verbs.pull import pulled_models


def test_a_model_that_is_there_is_not_fetched_again(smollm2: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert main(["pull", "smollm2-135m"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"smollm2-135m was already in {smollm2} (")


def test_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KILTER_HOME", str(tmp_path))
    other = tmp_path / "models" / "org--name"
    other.mkdir(parents=True)
    (other / "kilter.json").write_text(json.dumps({"name": "org/name"}))
    assert pulled_models() == {"org/name": other}
    assert main(["pull", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "what", "it", "is", "licence", "download", "pulled"]
    assert lines[1].startswith("smollm2-135m") and lines[1].endswith(" no")
    assert lines[3].startswith("org/name") and lines[3].endswith(" 20 B")


@pytest.mark.parametrize(("argv", "words"), [
    (["pull"], "one of the arguments name --list is required"),
    (["pull", "nope"], "nope is not a model that can be pulled; the catalogue has smollm2-135m"),
    (["pull", "../etc"], "is not a model that can be pulled"),
])
def test_wrong_names(argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KILTER_HOME", str(tmp_path))
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and list(tmp_path.iterdir()) == []
