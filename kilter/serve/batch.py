"""A file of requests answered into a file of results: OpenAI's batch format, offline.

Every line of the input is one request, every line of the output one result, in the order in which
they ended:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "batch_req_…", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "batch_req_…", "body": {...}}}

Results are appended to ``OUTPUT.partial``, which is renamed when it is whole. A run that finds such
a file goes on where the other one stopped: a result's id is a digest of its line and of how the
model was loaded, so a result is kept only for the very same request.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kilter.serve.server.body import parse_object
from kilter.serve.server.errors import ApiError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

# (url, body) -> (HTTP status, response body)
Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


class BatchStopped(OSError):
    """The engine cannot answer any more; what was answered is in the partial file."""


@dataclass
class Summary:
    """How a batch ended.

    Attributes:
        answered: results with status 200.
        failed: results with another status, and lines that are no request.
        kept: of all these, results of an earlier run.
        prompt_tokens, completion_tokens: of this run.
    """

    answered: int = 0
    failed: int = 0
    kept: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def count(self, record: dict[str, Any]) -> None:
        response = record["response"]
        if response is None or response["status_code"] != 200:
            self.failed += 1
        else:
            self.answered += 1


@dataclass(frozen=True)
class _Line:
    """A line of the input: a request, or what is wrong with it."""

    number: int
    id: str
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: str = ""


def partial_path(output: Path) -> Path:
    """Where the results are while they are not all there."""
    return output.with_name(output.name + ".partial")


async def run_batch(source: Path, output: Path, answer: Answer, *, concurrency: int = 64,
                    loaded: str = "", overwrite: bool = False,
                    progress: Callable[[int, int], object] = lambda done, total: None) -> Summary:
    """Answers every request of ``source`` and writes ``output``.

    Args:
        concurrency: requests that are under way at a time.
        loaded: what besides a line decides its answer (the model and how it was loaded); results
            of a run that differs in it are not mixed with this one's.
        overwrite: replace ``output`` if it is there.
        progress: called with (lines done, lines in all).

    Raises:
        ValueError: before anything is answered: nothing to answer, two lines of one custom_id, an
            output that is there, or a partial file of another input or model.
        BatchStopped: if the engine stops.
        OSError: if a file cannot be read or written, or another run is writing this output.
    """
    if concurrency < 1:
        raise ValueError(f"The concurrency is {concurrency} but must be at least 1.")
    if output.exists() and output.samefile(source):
        raise ValueError(f"{output} is both input and output; choose another output.")
    _check_output(output, overwrite)
    ids = _check_input(source, loaded)
    partial = partial_path(output)
    with _locked(partial, output) as file:
        _check_output(output, overwrite)  # another run may have ended since
        summary = Summary()
        done = _kept(file, partial, ids, summary)
        todo = (line for line in _lines(source, loaded) if line.id not in done)
        progress(len(done), len(ids))

        async def work() -> None:
            for line in todo:
                record = await _result(line, answer, summary)
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                summary.count(record)
                progress(summary.answered + summary.failed, len(ids))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(ids) - len(done))):
                    group.create_task(work())
        except ExceptionGroup as failures:  # the first one says what happened
            raise failures.exceptions[0] from None
        os.fsync(file.fileno())
        partial.rename(output)
    return summary


async def _result(line: _Line, answer: Answer, summary: Summary) -> dict[str, Any]:
    record: dict[str, Any] = {"id": line.id, "custom_id": line.custom_id, "response": None,
                              "error": None}
    if line.body is None:
        return {**record, "error": {"code": "invalid_line", "line": line.number,
                                    "message": f"Line {line.number}: {line.problem}"}}
    status, body = await answer(line.url, line.body)
    if status == 503:
        raise BatchStopped(f"The batch stopped at line {line.number}: "
                           f"{body.get('error', {}).get('message', 'the engine has stopped.')} "
                           f"Run the same command again to go on.")
    usage = body.get("usage") or {}
    summary.prompt_tokens += usage.get("prompt_tokens", 0)
    summary.completion_tokens += usage.get("completion_tokens", 0)
    return {**record, "response": {"status_code": status, "request_id": line.id, "body": body}}


def _check_output(output: Path, overwrite: bool) -> None:
    if not overwrite and output.exists():
        raise ValueError(f"{output} is there already; choose another output, or ask for it to be "
                         f"overwritten.")


# ---- the input ----

def _check_input(source: Path, loaded: str) -> set[str]:
    """The ids of all lines. Raises ValueError if there are none, or two of one custom_id."""
    first: dict[str, int] = {}
    twice: list[str] = []
    ids = set()
    for line in _lines(source, loaded):
        ids.add(line.id)
        if line.custom_id is not None:
            before = first.setdefault(line.custom_id, line.number)
            if before != line.number:
                twice.append(f"{line.custom_id!r} in lines {before} and {line.number}")
    if twice:
        more = f", and {len(twice) - 10} more" if len(twice) > 10 else ""
        raise ValueError(f"Results are told apart by custom_id, but {source} has some of them more "
                         f"than once: {', '.join(twice[:10])}{more}.")
    if not ids:
        raise ValueError(f"{source} holds no requests.")
    return ids


def _lines(source: Path, loaded: str) -> Iterator[_Line]:
    """Reads the input line by line; lines of blanks alone are skipped."""
    with open(source, "rb") as file:
        for number, raw in enumerate(file, 1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if raw.strip():
                yield _parse(number, raw.strip(), loaded)


def _parse(number: int, raw: bytes, loaded: str) -> _Line:
    digest = hashlib.sha256(loaded.encode() + b"\0" + raw)
    custom_id = None
    try:
        entry = parse_object(raw, "it")
        custom_id = _custom_id(entry)
        url, body = _request(entry)
    except (ApiError, ValueError) as error:
        if custom_id is None:  # the same nonsense may come twice
            digest.update(b"%d" % number)
        return _Line(number, _id(digest.hexdigest()), custom_id, problem=str(error))
    return _Line(number, _id(digest.hexdigest()), custom_id, url, body)


def _id(digest: str) -> str:
    return f"batch_req_{digest[:32]}"


def _custom_id(entry: dict[str, Any]) -> str:
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id is {custom_id!r:.100} but must be a text that is not empty.")
    return custom_id


def _request(entry: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(url, body), or a ValueError that lists all that is wrong."""
    problems = []
    if unknown := sorted(entry.keys() - {"custom_id", "method", "url", "body"}):
        problems.append(f"it has unknown fields: {', '.join(unknown)}")
    if entry.get("method") != "POST":
        problems.append(f"method is {entry.get('method')!r:.100} but must be \"POST\"")
    if entry.get("url") not in URLS:
        problems.append(f"url is {entry.get('url')!r:.100} but must be one of {', '.join(URLS)}")
    body = entry.get("body")
    if not isinstance(body, dict):
        problems.append(f"body is a {type(body).__name__} but must be an object")
    elif body.get("stream"):
        problems.append("body.stream is set, but a batch does not stream; leave it out")
    if problems or not isinstance(body, dict):
        raise ValueError("; ".join(problems) + ".")
    return entry["url"], body


# ---- the partial file ----

@contextlib.contextmanager
def _locked(partial: Path, output: Path) -> Iterator[BinaryIO]:
    """The partial file, locked: no other run writes this output meanwhile. It does not stay where
    nothing was written."""
    while True:
        with open(partial, "a+b") as file:
            _lock(file, output)
            if not _is_at(file, partial):
                continue  # another run ended, and renamed it, since it was opened
            try:
                yield file
            finally:
                if _is_at(file, partial) and not os.fstat(file.fileno()).st_size:
                    partial.unlink()
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: BinaryIO, output: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(f"Another run is writing {output}; wait for it, or choose another output."
                      ) from error


def _kept(file: BinaryIO, partial: Path, ids: set[str], summary: Summary) -> set[str]:
    """The ids of an earlier run's results, which are counted; a result that was cut off while it
    was being written is dropped."""
    done = set()
    file.seek(0)
    end = 0
    for number, raw in enumerate(file, 1):
        if not raw.endswith(b"\n"):
            file.truncate(end)
            break
        end += len(raw)
        try:
            record = json.loads(raw)
            summary.count(record)
            done.add(record["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{partial} is not a batch's partial output (line {number}); remove "
                             f"it to start anew.") from error
    if not done <= ids:
        raise ValueError(f"{partial} holds results of another input, or of a model that was loaded "
                         f"in another way; remove it to start anew, or choose another output.")
    summary.kept = len(done)
    return done
