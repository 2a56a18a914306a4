"""Candidate programs: what passes, and what must not hurt.

Every nasty program also prints what it was supposed to, so that a lock that does not hold shows as
a test passed or as damage done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kilter.rl.rewards import Sample, score
from kilter.rl.rewards.jails import Jails, Limits, NoJail, Outcome
from kilter.rl.rewards.program import Program, extract_program, same
from kilter.rl.rewards.score import WeightedReward

LONG = 600.0  # seconds in which a program that ends does so, on a busy machine too


@pytest.fixture(scope="module")
def jails() -> Iterator[Jails]:
    pool = Jails("program", Limits(seconds=LONG, cpu_seconds=30, memory_mb=256, output_kb=64), 2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Jails]:
    pool = Jails("program", Limits(seconds=0.5), 2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def reward() -> Iterator[Program]:
    made = Program(workers=2, seconds=LONG)
    yield made
    made.close()


def script(jails: Jails, text: str, stdin: str = "") -> Outcome:
    return jails.run([{"program": text, "stdin": stdin}])[0]


def said(jails: Jails, text: str) -> str:
    outcome = script(jails, text)
    assert outcome.ok, outcome
    return outcome.output.strip()


def sample(text: str, tests: Any) -> Sample:
    return Sample(prompt="", answer_text=text, reference=tests)


ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def test_the_share_of_tests_passed(reward: Program) -> None:
    calls = [{"call": "add", "args": [1, 2], "expected": 3},
             {"call": "add", "args": ["a", "b"], "expected": "ab"},
             {"call": "add", "args": [1], "kwargs": {"b": 0.5}, "expected": 1.5},
             {"call": "add", "args": [1, 1], "expected": 3}]
    asserts = [{"assert": "assert add(1, 2) == 3"}, {"assert": "assert add(1, 2) == 4"}]
    script = "```\na, b = map(int, input().split())\nprint(a + b)\n```"
    runs = [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "5 -5", "stdout": "0\n"},
            {"stdin": "x", "stdout": ""}]
    found = score([WeightedReward(reward)], [
        sample(ADD, calls), sample(ADD, {"tests": asserts}), sample(script, runs),
        sample("no program", runs), sample("```python\n1/0\n```", runs),
        sample("```python\nsyntax error\n```", asserts)])
    assert found["program"] == pytest.approx([3 / 4, 1 / 2, 2 / 3, 0.0, 0.0, 0.0])


def test_all_or_nothing() -> None:
    strict = Program(all_or_nothing=True, workers=1, seconds=LONG)
    test = {"call": "add", "args": [1, 2], "expected": 3}
    assert strict([sample(ADD, [test]), sample(ADD, [test, test | {"expected": 4}])]) == [1.0, 0.0]
    strict.close()


@pytest.mark.parametrize("cheat", [
    "import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit",
    "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "import os\nos.write(3, b'{\"passed\": true}')\nos.write(3, b'{\"value\": 3}')\nos._exit(0)"])
def test_stopping_early_passes_nothing(reward: Program, cheat: str) -> None:
    tests = [{"call": "add", "args": [1, 2], "expected": 4}, {"stdin": "", "stdout": "3"}]
    if "__eq__" not in cheat:  # an assertion in the candidate's process cannot see through that
        tests.append({"assert": "assert add(1, 2) == 4"})
    assert reward([sample(f"```python\n{cheat}\n```", tests)]) == [0.0]


def test_time_is_up(hasty: Jails) -> None:
    """Busy, asleep, deaf to signals, without output, in threads."""
    loops = ["while True: pass", "import time\ntime.sleep(99)",
             "import os\nfor fd in range(9):\n    try: os.close(fd)\n    except OSError: pass\n"
             "while True: pass",
             "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
             "    except (OSError, ValueError): pass\nwhile True: pass",
             "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"
             "\nwhile True: pass"]
    assert [o.end for o in hasty.run([{"program": p, "stdin": ""} for p in loops])] == ["time"] * 5
    # A machine may be so busy that half a second is too short for this.
    ends = (script(hasty, "print('still there')") for _ in range(100))
    assert Outcome("exit", 0, "still there\n") in ends


def test_limits_hold(jails: Jails) -> None:
    assert script(jails, "while True: print('x' * 1000)").end == "output"
    assert len(script(jails, "while True: print('x' * 1000)").output) == 64 << 10
    assert not script(jails, "x = bytearray(1 << 30)\nprint(len(x))").ok
    assert said(jails, "x = bytearray(100 << 20)\nprint(len(x))") == str(100 << 20)
    assert not script(jails, "def f(): f()\nf()").ok
    assert script(jails, "import os\nos.abort()") == Outcome("signal", signal.SIGABRT, "")
    assert said(jails, "import resource\ntry:\n"
                       "    resource.setrlimit(resource.RLIMIT_CPU, (99, 99))\n"
                       "except (OSError, ValueError): print('refused')") == "refused"
    hungry = "import os\nfds = []\ntry:\n    while True: fds.append(os.dup(1))\n" \
             "except OSError: print(len(fds) < 64)"
    assert said(jails, hungry) == "True"


def test_standard_input_is_the_tests(jails: Jails) -> None:
    text = "import sys\nprint(sys.stdin.read())"
    assert script(jails, text, "a\nb\x00é").output == "a\nb\x00é\n"
    assert script(jails, text).output == "\n"
    assert script(jails, "print(input())") .code == 1  # at its end


TRIED = "\n".join(["def tried(name, f, *args):", "    try:", "        f(*args)",
                   "        print(name, 'done')", "    except OSError as error:",
                   "        print(name, 'refused')", "import os, signal, socket, ctypes"])


def test_other_processes_are_out_of_reach(jails: Jails) -> None:
    ours = os.getpid()
    found = said(jails, f"""{TRIED}
tried("fork", os.fork)
tried("spawn", os.posix_spawn, "/bin/true", ["true"], {{}})
tried("exec", os.execv, "/bin/true", ["true"])
tried("kill", os.kill, {ours}, 0)
tried("parent", os.kill, os.getppid(), 9)
tried("all", os.kill, -1, 0)
tried("pidfd", os.pidfd_open, {ours})
tried("session", os.setsid)
tried("nice", os.setpriority, os.PRIO_PROCESS, 0, 5)
tried("self", os.kill, os.getpid(), 0)""")
    assert found.splitlines() == [f"{name} refused" for name in (
        "fork", "spawn", "exec", "kill", "parent", "all", "pidfd", "session", "nice")] + [
        "self done"]


def test_a_fork_bomb_is_a_dud(jails: Jails) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: break\nprint('dud')"
    assert said(jails, bomb) == "dud"
    again = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'])"
    assert not script(jails, again).ok


def test_there_is_no_network(jails: Jails) -> None:
    assert said(jails, f"{TRIED}\nfor f in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):\n"
                       "    tried('socket', socket.socket, f)") == "\n".join(["socket refused"] * 3)


def test_files_are_out_of_reach(jails: Jails, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    found = said(jails, f"""{TRIED}
tried("read", open, {str(secret)!r})
tried("write", open, {str(secret)!r}, "w")
tried("append", open, {str(secret)!r}, "a")
tried("new", open, {str(tmp_path / "new")!r}, "w")
tried("own", open, "own", "w")
tried("remove", os.unlink, {str(secret)!r})
tried("rename", os.rename, {str(secret)!r}, {str(tmp_path / "moved")!r})
tried("list", os.listdir, {str(tmp_path)!r})
tried("folder", os.mkdir, {str(tmp_path / "folder")!r})
tried("link", os.symlink, "/", {str(tmp_path / "link")!r})
tried("mode", os.chmod, {str(secret)!r}, 0)
tried("times", os.utime, {str(secret)!r}, (0, 0))
tried("truncate", os.truncate, {str(secret)!r}, 0)
tried("passwords", open, "/etc/passwd")
tried("environment", open, "/proc/self/environ")
tried("parent", open, f"/proc/{{os.getppid()}}/environ")
tried("memory", open, "/dev/shm/x", "w")
print(dict(os.environ))""")
    assert "done" not in found and found.count("refused") == 17 and found.endswith("{}")
    assert [p.name for p in tmp_path.iterdir()] == ["secret"] and secret.read_text() == "42"


def test_files_of_its_own_where_they_are_allowed() -> None:
    jails = Jails("program", Limits(seconds=LONG, file_mb=1), 1)
    text = ("import os\nopen('a', 'w').write('1')\nprint(open('a').read(), os.getcwd())\n"
            "try: open('b', 'wb').write(bytes(2 << 20))\nexcept OSError: print('too large')\n"
            "try: open('../c', 'w')\nexcept OSError: print('outside')")
    first, *rest = said(jails, text).splitlines()
    assert first.startswith("1 ") and rest == ["too large", "outside"]
    assert not Path(first.split()[1]).exists()
    jails.close()


def test_one_answer_leaves_nothing_for_the_next(reward: Program) -> None:
    bad = "```python\nimport builtins, json\nbuiltins.print = json.dumps = None\n```"
    good = "```python\nprint(1)\n```"
    test = [{"stdin": "", "stdout": "1"}]
    assert reward([sample(bad, test), sample(good, test)] * 3) == [0.0, 1.0] * 3


def test_useful_things_work(jails: Jails) -> None:
    assert said(jails, "import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))") == "7"
    assert said(jails, "import threading\nt = threading.Thread(target=print, args=(7,))\n"
                       "t.start()\nt.join()") == "7"
    assert said(jails, "import collections, decimal, heapq, hashlib, random, re, secrets, sqlite3,"
                       "datetime, itertools\nprint(__name__)") == "__main__"


def test_a_program_does_the_same_in_every_process() -> None:
    pools = [Jails("program", Limits(seconds=LONG), 1) for _ in range(2)]
    assert len({said(pool, "print(set('kilter'), hash('a'))") for pool in pools}) == 1
    for pool in pools:
        pool.close()


def test_many_at_once_and_from_a_thread(jails: Jails) -> None:
    found: list[str] = []
    jobs = [{"program": "print(int(input()) ** 2)", "stdin": str(i)} for i in range(12)]
    thread = threading.Thread(target=lambda: found.extend(o.output for o in jails.run(jobs)))
    thread.start()
    thread.join()
    assert found == [f"{i * i}\n" for i in range(12)]
    assert len(jails._idle) <= 2


def test_a_worker_that_dies_is_replaced(jails: Jails) -> None:
    jails.run([{"program": "import time\ntime.sleep(0.1)", "stdin": ""}] * 2)
    assert 1 <= len(jails._idle) <= 2  # one that was quick may have run both
    for worker in jails._idle:
        worker._process.kill()
        worker._process.wait()
    assert script(jails, "print(2)").output == "2\n"


def test_what_cannot_be_isolated_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kilter.rl.rewards import jails as module
    text = Path(module._SCRIPT).read_text().replace("libc.syscall(444, None", "-1 or (None")
    (tmp_path / "jail.py").write_text(text)
    monkeypatch.setattr(module, "_SCRIPT", tmp_path / "jail.py")
    with pytest.raises(NoJail, match=r"isolated here: the kernel has no Landlock.*isolation to"):
        Jails("program", Limits(seconds=LONG), 1).run([{"program": "1", "stdin": ""}])
    loose = Jails("program", Limits(seconds=LONG), 1, isolation="limits")
    assert script(loose, "print(1)").output == "1\n"
    loose.close()


@pytest.mark.parametrize("reference", [
    None, [], {"tests": []}, [{}], [{"stdin": ""}], [{"call": "f"}], ["assert True"],
    [{"assert": "1", "stdin": "", "stdout": ""}], [{"stdin": "", "stdout": "", "more": 1}]])
def test_references_without_tests(reward: Program, reference: Any) -> None:
    with pytest.raises(ValueError, match=r"The (reference|test) .* (needs|none of)"):
        reward([sample(ADD, reference)])


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"workers is 0.*isolation is 'none'.*seconds is -1"):
        Program(workers=0, isolation="none", seconds=-1.0)  # type: ignore[arg-type]


def test_extraction_and_equality() -> None:
    assert extract_program("```py\na\n```\ntext\n```python\nb\n```", "fence") == "b\n"
    assert extract_program("a", "fence") is None and extract_program("a", "whole") == "a"
    assert same([1, 2.0, {"a": None}], [1, 2, {"a": None}]) and same(0.1 + 0.2, 0.3)
    assert not same(True, 1) and not same([1], [1, 1]) and not same("1", 1) and not same(1, 2)
    assert not same(float("nan"), float("nan"))
