"""Files to records, as a stream: of a file no more than one record (of Parquet, one batch of rows)
is in memory.

A record's number counts the records of its file from 0; (source, file, record) names it for good.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilter.train.data.config import SourceConfig
from kilter.train.data.errors import DataError
from kilter.train.data.pairs import FIELDS, pair_of

_BLOCK = 1 << 20  # bytes of a text file read at a time
_ROWS = 256  # rows of a Parquet file read at a time


@dataclass(frozen=True)
class Record:
    """One document as its file has it."""

    where: str  # for messages: the file and the line, row or document in it
    # text, a conversation {"messages": [...], "tools": ...}, or what `pairs.pair_of` gives
    value: str | dict[str, Any]
    position: int  # bytes of the file read so far, about


def files_of(source: SourceConfig) -> list[Path]:
    """The source's files in their order, absolute, each once.

    Raises DataError if a path does not exist or a glob matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in source.paths:
        if Path(pattern).is_file():
            matches = [pattern]
        else:
            matches = sorted(p for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
        if not matches:
            raise DataError(f"No file matches {pattern} (looked from {Path.cwd()}). Correct the "
                            "path in the data's sources.")
        found.update(dict.fromkeys(Path(match).resolve() for match in matches))
    return list(found)


def read_records(source: SourceConfig, path: Path, skip: int = 0) -> Iterator[Record]:
    """The records of one of the source's files, without the first `skip`.

    Raises DataError, with file and line, for a record that is not what the source says.
    """
    kind = source.format_of(str(path))
    try:
        if kind == "text":
            yield from _read_text(source, path, skip)
        elif kind == "jsonl":
            yield from _read_jsonl(source, path, skip)
        else:
            yield from _read_parquet(source, path, skip)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read_text(source: SourceConfig, path: Path, skip: int) -> Iterator[Record]:
    for number, (data, position) in enumerate(_cut(path, source.separator.encode())):
        if number < skip:
            continue
        where = f"{path}, document {number + 1}" if source.separator else str(path)
        try:
            yield Record(where, data.decode(), position)
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8: byte {error.start} of it is "
                            f"0x{data[error.start]:02x}. Convert the file to UTF-8.") from error


def _cut(path: Path, separator: bytes) -> Iterator[tuple[bytes, int]]:
    """(document, end) between separators, empty ones left out."""
    if not separator:
        data = path.read_bytes()
        yield data, len(data)
        return
    with open(path, "rb") as file:
        rest, end = b"", 0
        while block := file.read(_BLOCK):
            *whole, rest = (rest + block).split(separator)
            for data in whole:
                end += len(data) + len(separator)
                if data.strip():
                    yield data, end
        if rest.strip():
            yield rest, end + len(rest)


def _read_jsonl(source: SourceConfig, path: Path, skip: int) -> Iterator[Record]:
    number = position = 0
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            position += len(line)
            if not line.strip():
                continue
            number += 1
            if number <= skip:
                continue
            where = f"{path}, line {line_number}"
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not valid JSON: {error}.") from error
            yield Record(where, _value(source, content, where), position)


def _read_parquet(source: SourceConfig, path: Path, skip: int) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path} is a Parquet file, and reading it needs pyarrow. Install it with "
                        "`pip install 'kilter[data]'`.") from error
    size = path.stat().st_size
    try:
        file = ParquetFile(path)
        names = file.schema_arrow.names
        if source.pairs:
            wanted = [name for name in FIELDS if name in names]
        elif source.column not in names:
            raise DataError(f"{path} has no column {source.column!r}; it has {', '.join(names)}. "
                            "Set the source's field to one of them.")
        else:
            wanted = [source.column, *(["tools"] if source.chat and "tools" in names else [])]
        row = 0
        for batch in file.iter_batches(_ROWS, columns=wanted):
            if row + batch.num_rows <= skip:
                row += batch.num_rows
                continue
            for content in batch.to_pylist():
                row += 1
                if row > skip:
                    where = f"{path}, row {row}"
                    done = size * row // file.metadata.num_rows
                    yield Record(where, _value(source, content, where), done)
    except ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}.") from error


def _value(source: SourceConfig, content: Any, where: str) -> str | dict[str, Any]:
    if not isinstance(content, dict):
        raise DataError(f"{where} must be a JSON object, but is of type {type(content).__name__}.")
    if source.pairs:
        return pair_of(content, where)
    if source.column not in content:
        raise DataError(f"{where} has no field {source.column!r}; it has "
                        f"{', '.join(map(repr, content)) or 'none'}. Set the source's field, or "
                        "correct the record.")
    value = content[source.column]
    if not source.chat:
        if not isinstance(value, str):
            raise DataError(f"The field {source.column!r} of {where} must be text, but is of type "
                            f"{type(value).__name__}.{_CHAT_HINT if _is_chat(value) else ''}")
        return value
    if not _is_chat(value):
        raise DataError(f"The field {source.column!r} of {where} must be a conversation: a list of "
                        "at least one message, each an object with role and content.")
    return {"messages": value, "tools": content.get("tools") or None}


_CHAT_HINT = " If the records are conversations, set the source's chat to true."


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)
