"""The cache holds exactly the documents, whatever interrupted its making."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kilter.train.data import DataConfig, DataError, SourceConfig, stream
from kilter.train.data import cache as module
from kilter.train.data.cache import CachedFile, cached_files, default_cache
from kilter.train.data.tokenise import Tokeniser
from tests.train.data.tiny import chat_tokenizer, write_jsonl, write_texts

TEXTS = [f"text {i} " + "x" * (i % 7) for i in range(40)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART", 60)
    monkeypatch.setattr(stream, "_RECORDS", 3)


class Counting(Tokeniser):
    made: ClassVar[list[Any]]  # by the last one that was created

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # One of its own: threads of an interrupted build may still be at their last batch.
        self._own = Counting.made = []

    def documents(self, records: Any) -> Any:
        self._own.extend(records)  # safe between threads
        return super().documents(records)


def opened(path: Path, root: Path, **settings: Any) -> CachedFile:
    source = SourceConfig((str(path),), chat=settings.pop("chat", False))
    config = DataConfig((source,), seq_len=8, **settings)
    return cached_files([(source, path)], Counting(chat_tokenizer(), config), root)[0]


def contents(file: CachedFile) -> Iterator[str]:
    for document in range(len(file)):
        tokens, targets = file.read(document, 0, 10**9)
        assert targets is None
        assert tokens[-1] == 0
        yield chat_tokenizer().decode(tokens[:-1].tolist())


def test_documents_come_back_and_are_made_once(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "t.jsonl", TEXTS)
    file = opened(path, tmp_path / "c")
    assert len(Counting.made) == len(TEXTS)
    assert list(contents(file)) == TEXTS
    assert len(file._parts) > 5
    assert list(contents(opened(path, tmp_path / "c"))) == TEXTS
    assert Counting.made == []


def test_a_moved_file_is_known_and_a_changed_one_is_not(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "t.jsonl", TEXTS)
    os.utime(path, (1e9, 1e9))
    opened(path, tmp_path / "c")
    path = path.rename(tmp_path / "u.jsonl")
    opened(path, tmp_path / "c")
    assert Counting.made == []
    opened(path, tmp_path / "c", eos=False)
    assert len(Counting.made) == len(TEXTS)
    write_texts(path, TEXTS[1:])
    assert list(contents(opened(path, tmp_path / "c"))) == TEXTS[1:]


def test_an_interrupted_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "t.jsonl", TEXTS)
    save, calls = module._save, 0

    def fails(path: Path, array: np.ndarray) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:  # of two files per part
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save(path, array)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_save", fails)
        opened(path, tmp_path / "c")
    assert list(contents(opened(path, tmp_path / "c"))) == TEXTS
    assert 0 < len(Counting.made) < len(TEXTS)


def test_what_is_wrong_in_a_file_leaves_no_cache(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": t} for t in TEXTS] + [{"text": "\ud800"}])
    for _ in range(2):
        with pytest.raises(DataError, match=r"t\.jsonl, line 41: "):
            opened(path, tmp_path / "c")
    assert list((tmp_path / "c").rglob("whole.json")) == []


def test_targets_are_stored(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]
    path = write_jsonl(tmp_path / "t.jsonl", [{"messages": talk}] * 9)
    file = opened(path, tmp_path / "c", chat=True)
    for document in range(9):
        tokens, targets = file.read(document, 0, 10**9)
        assert targets is not None
        assert chat_tokenizer().decode(tokens[targets].tolist(), False) == "ab<|im_end|>"
        assert file.documents["first_target"][document] == np.flatnonzero(targets)[0]
        part, _ = file.read(document, 2, 5)
        assert part.tolist() == tokens[2:5].tolist()


def test_equal_documents_have_equal_digests(tmp_path: Path) -> None:
    file = opened(write_texts(tmp_path / "t.jsonl", ["a", "b", "a"]), tmp_path / "c")
    a, b, again = file.documents["digest"]
    assert a == again != b


def test_ranks_share_the_work(tmp_path: Path) -> None:
    """Locks are of open files, so threads stand for processes."""
    paths = [write_texts(tmp_path / f"{n}.jsonl", [f"{n}{t}" for t in TEXTS]) for n in range(4)]
    files = [(SourceConfig((str(path),)), path) for path in paths]
    tokeniser = Counting(chat_tokenizer(), DataConfig((files[0][0],), seq_len=8))
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(lambda _: cached_files(files, tokeniser, tmp_path / "c"), range(3)))
    assert len(Counting.made) == 4 * len(TEXTS)
    for opened_files in found:
        assert [list(contents(file))[-1] for file in opened_files] == [
            f"{n}{TEXTS[-1]}" for n in range(4)]


def test_a_file_that_changes_is_not_mistaken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size, with the old time put back, or while it is tokenised."""
    path = write_texts(tmp_path / "t.jsonl", ["aaa"])
    monkeypatch.setattr(module.time, "time", lambda: 1e12)  # long ago, so it is remembered

    def change(text: str) -> None:
        """So that the file system's clock, which may be a slow one, tells."""
        before = path.stat().st_ctime_ns
        while path.stat().st_ctime_ns == before:
            with open(path, "r+") as file:
                file.write(json.dumps({"text": text}))
            os.utime(path, (1e9, 1e9))

    change("aaa")
    assert list(contents(opened(path, tmp_path / "c"))) == ["aaa"]
    change("bbb")
    assert list(contents(opened(path, tmp_path / "c"))) == ["bbb"]

    def reads(*_: Any, **__: Any) -> Iterator[Any]:
        change("ccc")
        yield from read(*_, **__)

    read = module.read_records
    change("ddd")
    with monkeypatch.context() as patch, pytest.raises(DataError, match="changed while it was"):
        patch.setattr(module, "read_records", reads)
        opened(path, tmp_path / "c")
    assert list(contents(opened(path, tmp_path / "c"))) == ["ccc"]
    change("ddd")
    assert list(contents(opened(path, tmp_path / "c"))) == ["ddd"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, save, calls = write_texts(tmp_path / "t.jsonl", TEXTS), module._save, 0

    def full(path: Path, array: np.ndarray) -> None:
        nonlocal calls
        calls += 1
        save(path, array)
        if calls == 8:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
        patch.setattr(module, "_save", full)
        opened(path, tmp_path / "c")
    assert "cannot be written" in str(caught.value) and "No space left" in str(caught.value)
    assert list((tmp_path / "c").rglob(".*")) == []
    assert list(contents(opened(path, tmp_path / "c"))) == TEXTS
    assert len(Counting.made) < len(TEXTS)


def test_what_a_killed_process_left_is_taken_away(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "t.jsonl", TEXTS)
    folder = tmp_path / "c" / opened(path, tmp_path / "c").key
    (folder / "whole.json").unlink()
    (folder / ".00001.tokens.npy.77-88").write_bytes(b"half")
    assert list(contents(opened(path, tmp_path / "c"))) == TEXTS
    assert not (folder / ".00001.tokens.npy.77-88").exists()


def test_a_whole_cache_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "t.jsonl", TEXTS)
    opened(path, tmp_path / "c")

    def refuse(owner: Any, name: str) -> None:
        allowed = getattr(owner, name)

        def call(path: Path, *arguments: Any, **settings: Any) -> Any:
            if Path(path).is_relative_to(tmp_path):
                raise OSError(errno.EROFS, "Read-only file system")
            return allowed(path, *arguments, **settings)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((Path, "mkdir"), (Path, "write_text"), (Path, "replace"),
                        (module.os, "open"), (module, "_save")):
        refuse(owner, name)
    monkeypatch.setattr(module.time, "time", lambda: 1e12)  # it would remember the file
    assert list(contents(opened(path, tmp_path / "c"))) == TEXTS
    with pytest.raises(DataError, match=r"cannot be written: .*Read-only .*KILTER_HOME"):
        opened(path, tmp_path / "other")


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "t.jsonl", TEXTS)
    file = opened(path, tmp_path / "c")
    folder = tmp_path / "c" / file.key
    for name in ("00001.tokens.npy", "00001.documents.npy"):
        kept = (folder / name).read_bytes()
        for damage in (b"", kept[:-1]):
            (folder / name).write_bytes(damage)
            with pytest.raises(DataError, match=rf"{name} in the cache is damaged.*Delete"):
                list(contents(opened(path, tmp_path / "c")))
        (folder / name).write_bytes(kept)
    assert list(contents(opened(path, tmp_path / "c"))) == TEXTS


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILTER_HOME", "/somewhere")
    assert default_cache() == Path("/somewhere/data")
