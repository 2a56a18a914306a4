"""Files to records: every format, from any record on, with errors that name file and line."""

from __future__ import annotations

import codecs
import json
import re
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
    found: list[Any] = []
    begins = True
    for record in read_records(source, path, skip):
        assert record.begins == begins
        found = [*found, record.value] if begins else [*found[:-1], found[-1] + record.value]
        begins = record.ends
    assert begins
    return found


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


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.sampled_from("ab\n\ré"), max_size=8), max_size=5), st.integers(1, 7))
def test_line_feeds_of_a_separator_stand_for_crlf(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int
) -> None:
    path = tmp_path_factory.mktemp("crlf") / "t.txt"
    text = "\n\n".join(texts)
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert values(path, separator="\n\n") == [
            part for part in re.split("\r?\n\r?\n", text) if part.strip()]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, text, expected in (("t.txt", "a--b", ["a--b"]), ("t.jsonl", '{"text": "a"}', ["a"]),
                                 ("t.json", '[{"text": "a"}]', ["a"])):
        path = tmp_path / name
        path.write_bytes(codecs.BOM_UTF8 + text.encode())
        assert values(path) == expected
    (tmp_path / "t.txt").write_text("ab", "utf-16")
    with pytest.raises(DataError, match="is not UTF-8: byte 0 of it is 0xff"):
        values(tmp_path / "t.txt")


def test_a_large_text_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose characters are cut by blocks, and errors still say which byte."""
    monkeypatch.setattr(module, "_BLOCK", 4)
    path = tmp_path / "t.txt"
    path.write_text("üßüß é\n" * 9, "utf-8")
    source = SourceConfig((str(path),))
    records = list(read_records(source, path))
    assert max(record.size for record in records) <= 4 and len(records) > 9
    assert values(path) == ["üßüß é\n" * 9]
    path.write_bytes("üßü".encode() + b"\xc3")
    with pytest.raises(DataError, match="byte 6 of it is 0xc3"):
        values(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3), max_leaves=8)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.fixed_dictionaries({"text": st.text(max_size=9), "more": json_values}),
                max_size=5), st.integers(1, 30), st.sampled_from([None, 1]), st.booleans())
def test_an_array_is_read_as_it_comes(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], block: int, indent: int | None,
    ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "t.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=ascii_only), "utf-8",
                    "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert values(path) == [record["text"] for record in records]
        assert values(path, skip=2) == [record["text"] for record in records][2:]


@pytest.mark.parametrize(("name", "content", "why"), [
    ("t.json", '[{"text": "a"}, {"text": ', r"t\.json, record 2 is not valid JSON"),
    ("t.json", '[{"text": "a"},', "ends after record 1, before its array does"),
    ("t.json", '[{"text": "a"} {"text" "b"}]', "record 2 is not valid JSON: Expecting ':'"),
    ("t.json", '[{"text": "a"}, 3]', r"record 2 must be a JSON object, but is of type int"),
    ("t.json", '[{"text": "a"}] {}', "goes on after its array"),
    ("t.json", '{"data": [\n]}', r"line 1 is not valid JSON"),
    ("t.jsonl", '[{"text": "a"}]', "set the source's format to json"),
    ("t.jsonl", '{"text": "a"}\n{"text": "b', "line 2 .* It is the last line and has no end"),
    ("t.jsonl", '{"text": null}', "must be text, but is null"),
    ("t.jsonl", '{"talk": [{"role": "user"}]}', "set the source's chat to true"),
])
def test_what_is_wrong_is_said(tmp_path: Path, name: str, content: str, why: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=why):
        values(path)


def test_parquet_columns_of_other_text_types(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    texts = ["a", "b", "a"]
    for column in (pyarrow.array(texts, pyarrow.large_string()),
                   pyarrow.array(texts).dictionary_encode(),
                   pyarrow.array(texts, pyarrow.string_view())):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=2)
        assert values(path) == texts
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match="row 2 must be text, but is null"):
        values(path)


def test_parquet_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 4)
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": [str(i) for i in range(10)]}), path)
    for skip in range(11):
        assert values(path, skip, field="body") == [str(i) for i in range(skip, 10)]


def test_chats_of_jsonl_and_parquet(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": None}]
    expected = [{"messages": CHAT, "tools": found, "learned": [False, True]}
                for found in (tools, None)]
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
