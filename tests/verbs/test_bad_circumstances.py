"""What a stranger's machine and hands may do to the command line: no compiler, closed or broken
streams, nonsense in the environment. Each is answered in a sentence, or just works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kilter import LLM, SamplingParams
from kilter.cli import main
from tests.models import tiny
from tests.serve.tiny_tokenizer import save_byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.make("llama-plain", folder)
    save_byte_tokenizer(folder, 131)
    return folder


def test_without_a_compiler_it_is_slow_and_right(model: Path, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "KILTER_HOME": str(tmp_path), "CXX": "/nonexistent",
                   "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "generate", str(model), "-p", "abc", "--max-tokens", "12",
         "--json"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No C++ compiler was found" in done.stderr
    greedy = SamplingParams(max_tokens=12, temperature=0)
    assert json.loads(done.stdout)["token_ids"] == LLM(model).generate("abc", greedy)[0].token_ids


@pytest.mark.parametrize(("arguments", "said"), [
    (["--threads", "100000"], "1 to 1024"),
    (["--threads", "0"], "1 to 1024"),
    (["--device", "tpu"], "must be cpu or cuda"),
])
def test_options_out_of_range(model: Path, capsys: pytest.CaptureFixture[str],
                              arguments: list[str], said: str) -> None:
    assert main(["generate", str(model), "-p", "a", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_streams_and_environment(model: Path) -> None:
    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "kilter", *arguments], text=True,
                              capture_output=True, **options)  # type: ignore[call-overload]

    bad = subprocess.run([sys.executable, "-m", "kilter", "generate", str(model), "-p", "-"],
                         input=b"\xff\xfe", capture_output=True)
    assert bad.returncode == 2 and b"is not UTF-8 text" in bad.stderr
    nonsense = run("generate", str(model), "-p", "a", env={**os.environ, "KILTER_CPU_ISA": "zz"})
    assert nonsense.returncode == 2 and "must be one of" in nonsense.stderr
    assert "Traceback" not in nonsense.stderr


def test_a_long_chat_drops_its_oldest_turns(model: Path, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(model, tmp_path / "chats")  # others have it without a template
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}.{% endfor %}")
    lines = iter(["abcdefgh", "ijklmnop", "qrstuvwx", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", str(model), "--context", "24", "--max-tokens", "8"]) == 0
    err = capsys.readouterr().err
    assert "were dropped" in err and "error" not in err


def test_one_llm_for_several_threads(model: Path) -> None:
    llm = LLM(model, context=64)
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    expected = llm.generate("abc", greedy)[0].token_ids
    results: list[list[int]] = []

    def work() -> None:
        for answer in llm.generate(["abc"] * 4, greedy):
            results.append(answer.token_ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 16
    llm.engine.check_integrity()
