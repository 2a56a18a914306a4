"""Compressed files say what they hold; broken ones are refused by name."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from kilter.train.data import DataError, SourceConfig
from kilter.train.data.sources import files_of, read_records

TEXTS = [f"text {i} é" * (1 + i % 5) for i in range(400)]


def zstandard(data: bytes) -> bytes:
    packed: bytes = pyarrow.compress(data, codec="zstd", asbytes=True)
    return packed


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}


def values(path: Path, skip: int = 0, separator: str = "") -> list[object]:
    source = SourceConfig((str(path),), separator=separator)
    return [record.value for record in read_records(source, path, skip)]


@pytest.mark.parametrize("suffix", PACK)
def test_they_hold_what_was_packed(tmp_path: Path, suffix: str) -> None:
    """In one member, or in several that were put together."""
    lines = [(json.dumps({"text": text}) + "\n").encode() for text in TEXTS]
    for name, data, separator in (("t.jsonl", lines, ""), ("t.txt", [
            f"{text}\r\n\r\n".encode() for text in TEXTS], "\n\n"), ("t.JSON", [
            b"[", b",\n".join(lines), b"]"], "")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(PACK[suffix](b"".join(data)))
        assert values(path, 0, separator) == TEXTS
        path.write_bytes(PACK[suffix](b"".join(data[:1])) + PACK[suffix](b"".join(data[1:])))
        assert values(path, 3, separator) == TEXTS[3:]
    path = tmp_path / f"empty.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b""))
    assert values(path) == []


@pytest.mark.parametrize("suffix", PACK)
def test_broken_ones_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.jsonl{suffix}"
    whole = PACK[suffix](b"".join((json.dumps({"text": text}) + "\n").encode() for text in TEXTS))
    for data in (whole[:-20], b"no such thing at all", whole[:40] + b"\0" * 40 + whole[80:]):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"t\.jsonl\{suffix} cannot be decompressed: .*\."):
            values(path)


def test_zstandard_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(zstandard(b'{"text": "a"}\n'))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow.*or decompress the file with `zstd -d`"):
        values(path)


def test_suffixes(tmp_path: Path) -> None:
    assert SourceConfig(("a/*.jsonl.gz",)).format_of("a/b.v1.jsonl.GZ") == "jsonl"
    assert SourceConfig(("a.gz",), format="text").format_of("a.gz") == "text"
    with pytest.raises(ValueError, match=r"suffix of a\.gz does not tell.*\.zst after them"):
        SourceConfig(("a.gz",))
    with pytest.raises(ValueError, match="compressed inside"):
        SourceConfig(("a.parquet.gz",))
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match=r"is a folder\. Name the files in it"):
        files_of(SourceConfig((str(tmp_path),), format="jsonl"))
