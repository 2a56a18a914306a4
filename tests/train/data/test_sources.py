"""Files to records: every format, from any record on, with errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.train.data import DataConfig, DataError, SourceConfig
from kilter.train.data import sources as module
from kilter.train.data.sources import files_of, read_records
from tests.train.data.tiny import write_jsonl

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def values(path: Path, skip: int = 0, **settings: Any) -> list[Any]:
    source = SourceConfig((str(path),), **settings)
    return [record.value for record in read_records(source, path, skip)]


def test_formats_give_the_same_records(tmp_path: Path) -> None:
    texts = ["a\nb", "ü", "c"]
    text = tmp_path / "t.txt"
    text.write_text("---".join(texts), encoding="utf-8")
    lines = write_jsonl(tmp_path / "t.jsonl", [{"text": t} for t in texts])
    lines.write_text(lines.read_text().replace("\n", "\n\n"))  # blank lines are no records
    table = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3], "text": texts}), table)
    for skip in range(4):
        assert values(text, skip, separator="---") == texts[skip:]
        assert values(lines, skip) == values(table, skip) == texts[skip:]
    assert values(text) == ["a\nb---ü---c"]


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("ab-é"), max_size=30), st.integers(1, 5))
def test_text_is_cut_the_same_whatever_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "t.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert values(path, separator="--") == [part for part in text.split("--") if part]


def test_parquet_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 4)
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": [str(i) for i in range(10)]}), path)
    for skip in range(11):
        assert values(path, skip, field="body") == [str(i) for i in range(skip, 10)]


def test_chats_of_jsonl_and_parquet(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": None}]
    expected = [{"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": None}]
    assert values(write_jsonl(tmp_path / "t.jsonl", rows), chat=True) == expected
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert values(path, chat=True) == expected


@pytest.mark.parametrize(("line", "chat", "why"), [
    ('{"text": ', False, "not valid JSON"),
    ("[1]", False, "must be a JSON object"),
    ('{"body": "x"}', False, "no field 'text'; it has 'body'"),
    ('{"text": 3}', False, "must be text, but is of type int"),
    (json.dumps({"text": CHAT}), False, "set the source's chat to true"),
    ('{"messages": "x"}', True, "must be a conversation"),
    ('{"messages": []}', True, "must be a conversation"),
    ('{"text": "\udcff"}', False, "not valid JSON"),
])
def test_bad_lines_are_named(tmp_path: Path, line: str, chat: bool, why: str) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps({"text": "x", "messages": CHAT})
    path.write_bytes(f"{good}\n\n{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=rf"t\.jsonl, line 3.*{why}"):
        values(path, chat=chat)


def test_other_bad_files(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_bytes(b"a\n\nb\xff")
    with pytest.raises(DataError, match=r"document 2 is not UTF-8: byte 1 of it is 0xff"):
        values(text, separator="\n\n")
    table = tmp_path / "t.parquet"
    table.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        values(table)
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), table)
    with pytest.raises(DataError, match="no column 'text'; it has body"):
        values(table)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        values(tmp_path / "none.jsonl")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'kilter\[data\]'"):
        values(tmp_path / "t.parquet")


def test_globs(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = files_of(SourceConfig((f"{tmp_path}/b.txt", f"{tmp_path}/**/*.txt")))
    assert [path.name for path in found] == ["b.txt", "a.txt", "c.txt", "odd[1].txt"]
    assert files_of(SourceConfig((f"{tmp_path}/odd[1].txt",))) == [tmp_path / "odd[1].txt"]
    with pytest.raises(DataError, match=r"No file matches .*\*\.md"):
        files_of(SourceConfig((f"{tmp_path}/*.md",)))


@pytest.mark.parametrize(("make", "why"), [
    (lambda: SourceConfig(()), "needs paths"),
    (lambda: SourceConfig(("x.bin",)), r"The suffix of x\.bin"),
    (lambda: SourceConfig(("x.txt",), chat=True), "no conversations"),
    (lambda: SourceConfig(("x.txt",), field="body"), "no fields"),
    (lambda: SourceConfig(("x.jsonl",), separator="-"), "separator"),
    (lambda: SourceConfig(("x.txt",), weight=0), "weight"),
    (lambda: SourceConfig(("x",), format="csv"), "'csv'"),  # type: ignore[arg-type]
    (lambda: DataConfig((), 8), "no sources"),
    (lambda: DataConfig((SourceConfig(("x.txt",)),), 1), "seq_len is 1"),
    (lambda: DataConfig((SourceConfig(("x.txt",)),), 8, eval_fraction=1.0), "eval_fraction is 1"),
    (lambda: DataConfig((SourceConfig(("x.txt",)),), 8, eval_fraction=0.5,
                        eval_sources=(SourceConfig(("y.txt",)),)), "Keep one"),
])
def test_settings_are_checked(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()
