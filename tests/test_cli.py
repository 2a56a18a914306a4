"""The command line's frame: fast help, one sentence per error, and the exit codes."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Callable

import pytest

from kilter import __version__, cli


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Replaces the verb `doctor` by a function."""
    def replace(run: Callable[[], int]) -> None:
        module = types.SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: run())
        monkeypatch.setitem(sys.modules, "kilter.verbs.doctor", module)

    return replace


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    code = ("import sys; from kilter.cli import main; assert main(['--help']) == 0; "
            "print(sorted(m for m in sys.modules if m.split('.')[0] in "
            "('torch', 'numpy', 'transformers', 'tokenizers', 'jinja2', 'rich')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n"), done.stdout[-300:]
    assert all(f"    {name} " in done.stdout for name in cli.VERBS)


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.VERBS:
        assert cli.main([name, "--help"]) == 0
        assert f"usage: kilter {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kilter {__version__}\n"


@pytest.mark.parametrize(("argv", "words"), [
    (["plan"], "`kilter plan` is not there yet"),
    (["caht", "-p", "hi"], "Did you mean `kilter chat`?"),
    (["zzz"], "There is no verb 'zzz'; the verbs are: doctor, pull"),
    (["doctor", "--jsn"], "unrecognized arguments: --jsn"),
    (["--bogus"], "required: VERB"),
    (["train", "job.toml", "--layout.dp=2"], "(a job's settings have no dashes: layout.dp=2)"),
    (["train"], "required: JOB.toml\n"),
    (["rl"], "required: JOB.toml\n"),
])
def test_bad_command_lines_exit_2(argv: list[str], words: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("The window is -1; it must be positive."),
     "kilter: error: The window is -1; it must be positive.\n"),
    (FileNotFoundError(2, "No such file or directory", "model.gguf"),
     "kilter: error: model.gguf: no such file or directory.\n"),
    (OSError("The disk is full."), "kilter: error: The disk is full.\n"),
])
def test_errors_are_one_line(error: Exception, line: str, verb: Callable,
                             capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(error))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr() == ("", line)


def test_debug_shows_the_traceback(verb: Callable) -> None:
    verb(raising(ValueError("why")))
    for argv in (["doctor", "--debug"], ["--debug", "doctor"]):
        with pytest.raises(ValueError, match="why"):
            cli.main(argv)


def test_a_bug_is_not_hidden(verb: Callable) -> None:
    verb(raising(KeyError("a bug")))
    with pytest.raises(KeyError):
        cli.main(["doctor"])


def test_interrupt_exits_130(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_the_verb_gives_the_exit_code(verb: Callable) -> None:
    verb(lambda: 1)
    assert cli.main(["doctor"]) == 1


def test_warnings_are_one_line(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        warnings.warn("slow path", RuntimeWarning, stacklevel=1)
        return 0

    verb(run)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().err == "kilter: warning: slow path\n"


def test_a_closed_pipe_is_silent() -> None:
    """The reader goes away before the first byte: no traceback, and the shell's code for it."""
    code = ("import sys, types; sys.stdin.read(); from kilter.cli import main; "
            "sys.modules['kilter.verbs.doctor'] = types.SimpleNamespace("
            "add_arguments=lambda p: None, run=lambda a: print('x') or 0); "
            "sys.exit(main(['doctor']))")
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
