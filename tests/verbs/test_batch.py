"""`kilter batch`: the file format, bounded concurrency, resuming, and real answers."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from kilter import cli
from kilter.serve import batch
from kilter.serve.batch import BatchStopped, partial_path, run_batch
from tests.models import tiny
from tests.serve.tiny_tokenizer import save_byte_tokenizer


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: dict[str, Any] | str | bytes) -> Path:
    raw = [line if isinstance(line, bytes) else line.encode() if isinstance(line, str)
           else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def read(path: Path) -> dict[str | None, dict[str, Any]]:
    """Records by custom_id."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {record["custom_id"]: record for record in records}
    assert len({record["id"] for record in records}) == len(records)
    return by_id


async def echo(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    await asyncio.sleep(0)
    if "status" in body:
        return body["status"], {"error": {"message": "No."}}
    return 200, {"url": url, "body": body, "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


# ---- the file format, answered by an echo ----

def test_results_are_in_openais_format(paths: tuple[Path, Path]) -> None:
    source, output = paths
    write(source, request("a", prompt="x"), "", request("ü", "/v1/embeddings", input=["é"]),
          request("c", "/v1/chat/completions", status=400))
    summary = asyncio.run(run_batch(source, output, echo))
    records = read(output)
    assert list(records["a"]) == ["id", "custom_id", "response", "error"]
    assert records["a"]["response"] == {
        "status_code": 200, "request_id": records["a"]["id"],
        "body": {"url": "/v1/completions", "body": {"prompt": "x"},
                 "usage": {"prompt_tokens": 2, "completion_tokens": 3}}}
    assert records["ü"]["response"]["body"]["body"] == {"input": ["é"]}
    assert records["c"]["response"]["status_code"] == 400 and records["c"]["error"] is None
    assert (summary.answered, summary.failed, summary.kept) == (2, 1, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (4, 6)
    assert not partial_path(output).exists()


BAD_LINES = [
    (b'{"custom_id": "x", "method"', "not valid JSON"),
    (b'\xff{}', "not UTF-8 text: byte 0 is 0xff"),
    (b'[]', "must be a JSON object, but is an array"),
    (b'{"a":' * 100_000, "nested more than 100 deep"),
    (b'{"custom_id": "x", "body": NaN}', "NaN is not a JSON number"),
    (b'{"method": "POST", "url": "/v1/completions", "body": {}}', "custom_id is None"),
    (json.dumps({**request("x"), "custom_id": 7}).encode(), "custom_id is 7"),
    (json.dumps({**request("x"), "custom_id": ""}).encode(), "custom_id is ''"),
    (json.dumps({**request("x"), "method": "GET"}).encode(), "method is 'GET'"),
    (json.dumps({**request("x"), "url": "/v1/files"}).encode(), "url is '/v1/files'"),
    (json.dumps({**request("x"), "url": ["/v1/completions"]}).encode(), "url is ["),
    (json.dumps({**request("x"), "body": None}).encode(), "body is a NoneType"),
    (json.dumps({**request("x"), "priority": 1}).encode(), "unknown fields: priority"),
    (json.dumps(request("x", stream=True)).encode(), "body.stream is set"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_a_bad_line_is_an_error_with_its_number_and_nothing_else(
        paths: tuple[Path, Path], line: bytes, words: str) -> None:
    source, output = paths
    write(source, request("good", prompt="p"), line)
    summary = asyncio.run(run_batch(source, output, echo))
    records = read(output)
    assert records.pop("good")["response"]["status_code"] == 200
    (bad,) = records.values()
    assert bad["response"] is None
    assert bad["error"]["code"] == "invalid_line" and bad["error"]["line"] == 2
    assert bad["error"]["message"].startswith("Line 2: ") and words in bad["error"]["message"]
    assert (summary.answered, summary.failed) == (1, 1)


def test_the_same_nonsense_twice_is_two_errors(paths: tuple[Path, Path]) -> None:
    source, output = paths
    write(source, "nonsense", "nonsense")
    summary = asyncio.run(run_batch(source, output, echo))
    assert summary.failed == 2 == len(output.read_text().splitlines())


def test_what_cannot_begin_says_so_before_anything_is_answered(
        paths: tuple[Path, Path]) -> None:
    source, output = paths

    async def never(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        raise AssertionError("asked")

    write(source, request("a"), request("b"), request("a", prompt="other"))
    with pytest.raises(ValueError, match="'a' in lines 1 and 3"):
        asyncio.run(run_batch(source, output, never))
    write(source, "", "  ")
    with pytest.raises(ValueError, match="holds no requests"):
        asyncio.run(run_batch(source, output, never))
    write(source, request("a"))
    with pytest.raises(ValueError, match="both input and output"):
        asyncio.run(run_batch(source, source, never, overwrite=True))
    output.write_text("precious")
    with pytest.raises(ValueError, match="is there already"):
        asyncio.run(run_batch(source, output, never))
    assert output.read_text() == "precious" and not partial_path(output).exists()
    asyncio.run(run_batch(source, output, echo, overwrite=True))
    assert set(read(output)) == {"a"}


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_no_more_requests_run_at_a_time_than_asked_for(paths: tuple[Path, Path],
                                                       concurrency: int) -> None:
    source, output = paths
    write(source, *(request(str(i)) for i in range(20)))
    running, most = 0, 0

    async def answer(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 200, {}

    asyncio.run(run_batch(source, output, answer, concurrency=concurrency))
    assert most == min(concurrency, 20) and len(read(output)) == 20


# ---- resuming ----

def stopping(after: int, asked: list[str]) -> Callable:
    """Answers so many requests; then the engine is gone."""
    async def answer(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if len(asked) >= after:
            return 503, {"error": {"message": "The engine has stopped."}}
        asked.append(body["prompt"])
        return (400 if body["prompt"] == "1" else 200), {"prompt": body["prompt"]}

    return answer


def test_an_interrupted_batch_goes_on_where_it_stopped(paths: tuple[Path, Path]) -> None:
    source, output = paths
    write(source, *(request(str(i), prompt=str(i)) for i in range(10)), "nonsense")
    asked: list[str] = []
    with pytest.raises(BatchStopped, match=r"The engine has stopped\. Run the same command again"):
        asyncio.run(run_batch(source, output, stopping(4, asked), concurrency=2))
    assert not output.exists()
    partial = partial_path(output)
    with open(partial, "ab") as file:  # killed while it wrote
        file.write(b'{"id": "batch_req_00", "custom_')
    again: list[str] = []
    seen: list[tuple[int, int]] = []
    summary = asyncio.run(run_batch(source, output, stopping(99, again),
                                    progress=lambda done, total: seen.append((done, total))))
    assert sorted(asked + again, key=int) == [str(i) for i in range(10)] and len(asked) == 4
    assert (summary.answered, summary.failed, summary.kept) == (9, 2, 4)
    assert seen[0] == (4, 11) and seen[-1] == (11, 11)
    records = read(output)
    assert len(records) == 11 and not partial.exists()
    assert all(r["response"]["body"] == {"prompt": i} for i, r in records.items() if i)


def test_results_of_something_else_are_not_mixed_in(paths: tuple[Path, Path]) -> None:
    source, output = paths
    write(source, *(request(str(i), prompt=str(i)) for i in range(4)))
    with pytest.raises(BatchStopped):
        asyncio.run(run_batch(source, output, stopping(2, []), loaded="one model"))
    with pytest.raises(ValueError, match="of another input, or of a model"):
        asyncio.run(run_batch(source, output, echo, loaded="another"))
    write(source, *(request(str(i), prompt="changed") for i in range(4)))
    with pytest.raises(ValueError, match="of another input"):
        asyncio.run(run_batch(source, output, echo, loaded="one model"))
    partial_path(output).write_text("this is no JSON\n")
    with pytest.raises(ValueError, match=r"not a batch's partial output \(line 1\)"):
        asyncio.run(run_batch(source, output, echo))
    assert partial_path(output).read_text() == "this is no JSON\n"


def test_two_runs_do_not_write_one_output(paths: tuple[Path, Path]) -> None:
    source, output = paths
    write(source, request("a"))

    async def both() -> None:
        async def answer(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            with pytest.raises(OSError, match="Another run is writing"):
                await run_batch(source, output, echo)
            return 200, {}

        await run_batch(source, output, answer)

    asyncio.run(both())
    assert set(read(output)) == {"a"}


def test_a_run_that_begins_as_another_ends_replaces_what_it_may(
        paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one ends after this one has looked for the output and opened the partial file."""
    source, output = paths
    write(source, request("a"))
    real = batch._lock

    def late(file: BinaryIO, output: Path) -> None:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, run_batch(source, output, echo)).result()
        real(file, output)

    async def never(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        raise AssertionError("asked")

    monkeypatch.setattr(batch, "_lock", late)
    with pytest.raises(ValueError, match="is there already"):
        asyncio.run(run_batch(source, output, never))
    assert set(read(output)) == {"a"} and not partial_path(output).exists()
    output.unlink()
    monkeypatch.setattr(batch, "_lock", late)
    summary = asyncio.run(run_batch(source, output, echo, overwrite=True))
    assert (summary.answered, summary.kept) == (1, 0)
    assert set(read(output)) == {"a"} and not partial_path(output).exists()


# ---- the command, with a model ----

@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.make("llama-plain", folder)
    save_byte_tokenizer(folder, 131)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    return folder


def requests() -> list[dict[str, Any]]:
    return [
        request("greedy", prompt="abc", max_tokens=8, temperature=0),
        request("seeded", prompt="abc", max_tokens=8, seed=3, n=2, logprobs=1),
        request("chat", "/v1/chat/completions", max_tokens=5, seed=1, model="tiny",
                messages=[{"role": "user", "content": "abc"}]),
        request("vector", "/v1/embeddings", input=["abc", "abd"]),
        request("long", prompt="a" * 1000),
        request("unknown", prompt="a", suffix="b"),
        request("other", prompt="a", model="gpt-4o"),
        request("infinite", prompt="a", temperature=1e300),
        request("surrogate", prompt="\ud800")]


def essence(record: dict[str, Any]) -> Any:
    """A result without what is of its moment alone: its id, when, and what was cached."""
    response = json.loads(json.dumps(record["response"]))
    for name in ("id", "created", "usage", "system_fingerprint"):
        response["body"].pop(name, None)
    return response


def test_answers_are_the_servers_and_do_not_depend_on_the_file(
        model: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, output = paths
    write(source, *requests())
    assert cli.main(["batch", str(source), str(output), "--model", str(model)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"Wrote {output}: 4 answered, 5 failed; ") and "tokens in" in said
    together = read(output)
    assert {i: r["response"]["status_code"] for i, r in together.items()} == {
        "greedy": 200, "seeded": 200, "chat": 200, "vector": 200, "long": 400, "unknown": 400,
        "other": 404, "infinite": 400, "surrogate": 400}
    assert "suffix" in together["unknown"]["response"]["body"]["error"]["message"]
    usage = together["seeded"]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == 3 and usage["completion_tokens"] == 16
    for entry in requests():
        write(source, entry)
        cli.main(["batch", str(source), str(output), "--model", str(model), "--overwrite",
                  "--concurrency", "1"])
        alone = read(output)
        assert essence(alone[entry["custom_id"]]) == essence(together[entry["custom_id"]])
        assert alone[entry["custom_id"]]["id"] == together[entry["custom_id"]]["id"]


def test_a_good_file_exits_0_and_a_bad_command_2(
        model: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, output = paths
    write(source, request("a", prompt="a", max_tokens=1, model="mine"))
    command = ["batch", str(source), str(output), "--model", str(model)]
    assert cli.main([*command, "--served-name", "mine"]) == 0
    assert "1 answered, 0 failed" in capsys.readouterr().out
    for extra in ([], ["--concurrency", "0", "--overwrite"]):
        assert cli.main([*command, *extra]) == 2
    assert cli.main(["batch", str(source.with_name("none")), *command[2:]]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 3
    assert "is there already" in err and "concurrency is 0" in err and "is not a file" in err


def test_an_output_that_cannot_be_is_refused_before_the_model_is_loaded(
        paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, output = paths
    write(source, request("a", prompt="a"))
    output.write_text("years of work")
    for place, words in ((output, "or replace it with --overwrite."),
                         (source, "is both input and output"),
                         (output.with_name("none") / "out.jsonl", "none is no folder, so out.")):
        assert cli.main(["batch", str(source), str(place), "--model", "not a model"]) == 2
        assert words in capsys.readouterr().err
    assert output.read_text() == "years of work"


# `kilter batch`, killed where the answer to the fourth line is there and not yet written.
MORTAL = """
import os, signal, sys
from kilter import cli
from kilter.serve import batch

result = batch._result

async def mortal(line, *args):
    record = await result(line, *args)
    if line.number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return record

batch._result = mortal
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_killed_run_goes_on_where_it_was(model: Path, paths: tuple[Path, Path]) -> None:
    source, output = paths
    entries = [request(str(i), prompt="abc" * i, max_tokens=30, seed=i, ignore_eos=True)
               for i in range(1, 13)]
    write(source, *entries)
    command = ["batch", str(source), str(output), "--model", str(model), "--concurrency", "1"]
    partial = partial_path(output)
    killed = subprocess.run([sys.executable, "-c", MORTAL, *command])
    assert killed.returncode == -signal.SIGKILL and not output.exists()
    before = partial.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["custom_id"] for line in before] == ["1", "2", "3"]
    assert cli.main(command) == 0
    assert output.read_bytes().splitlines(keepends=True)[:len(before)] == before
    resumed = read(output)
    assert set(resumed) == {str(i) for i in range(1, 13)} and not partial.exists()
    assert cli.main([*command, "--overwrite"]) == 0
    whole = read(output)
    assert {i: essence(r) for i, r in resumed.items()} == {i: essence(r) for i, r in whole.items()}
