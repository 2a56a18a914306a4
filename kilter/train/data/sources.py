"""Files to records, as a stream: of a file no more than one record (of Parquet, one batch of rows;
of a text file, one block) is in memory.

A record's number counts the records of its file from 0; (source, file, record) names it for good.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kilter.train.data.compressed import opened
from kilter.train.data.config import SourceConfig
from kilter.train.data.errors import DataError
from kilter.train.data.pairs import FIELDS as PAIR_FIELDS
from kilter.train.data.pairs import pair_of
from kilter.train.data.shapes import FIELDS as CHAT_FIELDS
from kilter.train.data.shapes import conversation_of

_BLOCK = 1 << 20  # bytes of a file read at a time
_ROWS = 256  # rows of a Parquet file read at a time
_BOM = codecs.BOM_UTF8


@dataclass(frozen=True)
class Record:
    """One document as its file has it, or a piece of a long text.

    where: for messages: the file and the line, row or document in it.
    value: text; or what `shapes.conversation_of` or `pairs.pair_of` gives.
    position: bytes of the file read so far, about.
    begins, ends: whether the document begins and ends with this record. The pieces of one follow
        each other.
    """

    where: str
    value: str | dict[str, Any]
    position: int
    begins: bool = True
    ends: bool = True

    @property
    def size(self) -> int:
        """Characters, about."""
        if isinstance(self.value, str):
            return len(self.value)
        return sum(len(message["content"]) for key in ("messages", "chosen", "rejected")
                   for message in self.value.get(key, ())
                   if isinstance(message.get("content"), str))


def files_of(source: SourceConfig) -> list[Path]:
    """The source's files in their order, absolute, each once.

    Raises DataError if a path does not exist or a glob matches nothing.
    """
    found: dict[Path, None] = {}
    for path in source.paths:
        pattern = os.path.expanduser(path)
        if Path(pattern).is_file():
            matches = [pattern]
        else:
            matches = sorted(p for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
        if not matches and Path(pattern).is_dir():
            raise DataError(f"{path} is a folder. Name the files in it, as in "
                            f"{path.rstrip('/')}/*.jsonl.")
        if not matches:
            raise DataError(f"No file matches {path} (looked from {Path.cwd()}). Correct the "
                            "path in the data's sources.")
        found.update(dict.fromkeys(Path(match).resolve() for match in matches))
    return list(found)


def read_records(source: SourceConfig, path: Path, skip: int = 0) -> Iterator[Record]:
    """The records of one of the source's files, without the first `skip` documents.

    Raises DataError, with file and line, for a record that is not what the source says.
    """
    kind = source.format_of(str(path))
    if kind == "parquet":
        yield from _read_parquet(source, path, skip)
        return
    with opened(path) as (file, position):
        if kind == "text":
            yield from _read_text(source, path, file, position, skip)
            return
        array = kind == "json" and file.peek(64).removeprefix(_BOM).lstrip()[:1] == b"["
        contents = _elements(path, file) if array else _lines(path, file, skip)
        for number, (where, content) in enumerate(contents):
            if number >= skip:
                yield Record(where, _value(source, content, where), position())


def _read_text(source: SourceConfig, path: Path, file: BinaryIO, position: Callable[[], int],
               skip: int) -> Iterator[Record]:
    number, begins, done = 0, True, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    for data, ends in _cut(file, source.separator.encode()):
        if number >= skip:
            where = f"{path}, document {number + 1}" if source.separator else str(path)
            held = len(decoder.getstate()[0])  # the begin of a character
            try:
                text = decoder.decode(data, final=ends)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where} is not UTF-8: byte {done - held + error.start} of it is "
                    f"0x{error.object[error.start]:02x}. Convert the file to UTF-8.") from error
            yield Record(where, text, position(), begins, ends)
        begins, done = ends, 0 if ends else done + len(data)
        number += ends


def _cut(file: BinaryIO, separator: bytes) -> Iterator[tuple[bytes, bool]]:
    """(data, whether a document ends with it), in blocks; documents without text are left out."""
    pattern = re.compile(re.escape(separator).replace(b"\\\n", b"\r?\n"))
    # Of a separator that has only begun.
    overlap = max(0, len(separator) + separator.count(b"\n") - 1)
    rest, begun, first = b"", False, True
    while block := file.read(_BLOCK):
        rest, first = (rest + block).removeprefix(_BOM) if first else rest + block, False
        if separator:
            *whole, rest = pattern.split(rest)
            for data in whole:
                if begun or data.strip():
                    yield data, True
                begun = False
        piece = rest[: max(0, len(rest) - overlap)] if len(rest) >= _BLOCK else b""
        if piece and (begun or piece.strip()):
            yield piece, False
            rest, begun = rest[len(piece) :], True
    if begun or rest.strip() or not separator:
        yield rest, True


def _lines(path: Path, file: BinaryIO, skip: int) -> Iterator[tuple[str, Any]]:
    """(where, content) of each line that is not blank. The first `skip` ones are not looked at."""
    number = 0
    for line_number, line in enumerate(file, 1):
        if line_number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        number += 1
        where = f"{path}, line {line_number}"
        if number <= skip:
            yield where, None
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            cut_off = "" if line.endswith(b"\n") else (
                " It is the last line and has no end, so the file may have been cut off.")
            raise DataError(f"{where} is not valid JSON: {error}.{cut_off}") from error
        if isinstance(content, list) and number == 1:
            raise DataError(f"{where} must be a JSON object, but is of type list. If the file is "
                            "one array of objects, set the source's format to json.")
        yield where, content


def _elements(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """(where, content) of each element of the file's one array, read as far as it is needed."""
    decoder, json_decoder = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder()
    text, at, number, wanted, more = "", 0, 0, _BLOCK, True

    def read() -> None:
        nonlocal text, at, more
        data = file.read(wanted)
        more = bool(data)
        try:
            text, at = text[at:] + decoder.decode(data, final=not more), 0
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, record {number + 1} is not UTF-8: {error}.") from error

    def skip_space(after: str) -> str:
        """The next character that is neither white space nor one of `after`."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n" + after:
                at += 1
            if at < len(text) or not more:
                return text[at : at + 1]
            read()

    skip_space("")
    at += 1  # "["
    while (character := skip_space("," if number else "")) != "]":
        number += 1
        where = f"{path}, record {number}"
        if not character:
            raise DataError(f"{path} ends after record {number - 1}, before its array does; the "
                            "file may have been cut off.")
        while True:
            try:
                content, end = json_decoder.raw_decode(text, at)
                if end < len(text) or not more:
                    break
            except json.JSONDecodeError as error:
                unfinished = error.pos > len(text) - 16 or error.msg.startswith("Unterminated")
                if not (more and unfinished):
                    raise DataError(f"{where} is not valid JSON: {error.msg}.") from error
            except RecursionError as error:
                raise DataError(f"{where} is not valid JSON: it is nested too deeply.") from error
            wanted *= 2  # of a long one, twice as much each time
            read()
        at, wanted = end, _BLOCK
        yield where, content
    at += 1  # "]"
    if skip_space(""):
        raise DataError(f"{path} goes on after its array. Make it one array, or a line for each "
                        "object.")


def _read_parquet(source: SourceConfig, path: Path, skip: int) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path} is a Parquet file, and reading it needs pyarrow. Install it with "
                        "`pip install 'kilter[data]'`.") from error
    try:
        size = path.stat().st_size
        # Buffered: else a row group's whole columns, which may be all of the file, are in memory.
        with ParquetFile(path, buffer_size=_BLOCK, pre_buffer=False) as file:
            wanted = _columns(source, file.schema_arrow.names, path)
            row = 0
            for batch in file.iter_batches(_ROWS, columns=wanted):
                if row + batch.num_rows <= skip:
                    row += batch.num_rows
                    continue
                for content in batch.to_pylist():
                    row += 1
                    if row > skip:
                        where = f"{path}, row {row}"
                        if source.chat or source.pairs:
                            content = _without_nulls(content)
                        yield Record(where, _value(source, content, where),
                                     size * row // file.metadata.num_rows)
    except ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _columns(source: SourceConfig, names: list[str], path: Path) -> list[str]:
    """Those that a record of the source needs."""
    main: tuple[str, ...] = (source.field or "text",)
    if source.pairs:
        main = PAIR_FIELDS
    elif source.chat and not source.field:
        main = CHAT_FIELDS
    beside = ("tools", "system") if source.chat else ()
    if not set(main) & set(names):
        raise DataError(f"{path} has no column {main[0]!r}; it has {', '.join(names)}. "
                        "Set the source's field to one of them.")
    return [name for name in dict.fromkeys((*main, *beside)) if name in names]


def _without_nulls(value: Any) -> Any:
    """Without the fields that are null: rows of one type have the fields of all the others too, so
    a tool's arguments would get those of every other tool."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _value(source: SourceConfig, content: Any, where: str) -> str | dict[str, Any]:
    if not isinstance(content, dict):
        raise DataError(f"{where} must be a JSON object, but is of type {type(content).__name__}.")
    if source.pairs:
        return pair_of(content, where)
    if source.chat:
        return conversation_of(content, source.field, source.shape, where)
    field = source.field or "text"
    if field not in content:
        raise DataError(f"{where} has no field {field!r}; it has "
                        f"{', '.join(map(repr, content)) or 'none'}. Set the source's field, or "
                        f"correct the record.{_CHAT_HINT if _looks_like_chat(content) else ''}")
    value = content[field]
    if not isinstance(value, str):
        hint = _CHAT_HINT if _looks_like_chat({field: value}) else ""
        raise DataError(f"The field {field!r} of {where} must be text, but is "
                        f"{'null' if value is None else f'of type {type(value).__name__}'}.{hint}")
    return value


_CHAT_HINT = " If the records are conversations, set the source's chat to true."


def _looks_like_chat(content: dict[str, Any]) -> bool:
    return any(isinstance(value, list) and value and all(isinstance(m, dict) for m in value)
               for value in content.values())
