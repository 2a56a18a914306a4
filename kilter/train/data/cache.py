"""Tokenised files on disk. A file is tokenised once; then every run, rank and epoch reads tokens
from memory-mapped arrays and knows all lengths in advance.

    ${KILTER_HOME:-~/.cache/kilter}/data/
        contents/KEY                a file's sha256, by path, size and times of change
        KEY/                        of (the file's sha256, the tokeniser's fingerprint)
            00000.tokens.npy        uint16 or uint32 [tokens]
            00000.targets.npy       bool [tokens]; only for conversations and pairs
            00000.pairs.npy         PAIR [documents]; only for pairs
            00000.documents.npy     DOCUMENT [documents]; written last: with it the part is whole
            00001. ...
            whole.json              written when all parts are

Parts are written under a temporary name and renamed. An interrupted build goes on after its last
whole part. Whoever builds a file holds its lock, so the ranks of a machine share the files among
themselves and none is tokenised twice. What is whole is only read, so the cache may then lie where
nothing can be written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from kilter.home import home
from kilter.report.progress import progress
from kilter.train.data.config import SourceConfig
from kilter.train.data.errors import DataError
from kilter.train.data.sources import Record, read_records
from kilter.train.data.stream import tokenised
from kilter.train.data.tokenise import Document, Tokeniser

# digest: of the tokens, so equal documents are known. first_target: index of the first token that
# is a target and has one before it; the length if there is none. Of a pair, the digest is of the
# prompt.
DOCUMENT = np.dtype([("start", "<i8"), ("length", "<i8"), ("first_target", "<i8"),
                     ("digest", "<u8")])
# chosen: tokens of the chosen conversation, which comes first.
PAIR = np.dtype([("chosen", "<i8"), ("margin", "<f8")])
_VERSION = 2  # of what is below a KEY
_PART = 1 << 24  # tokens after which a part ends
_BLOCK = 1 << 20  # tokens hashed at a time

Update = Callable[..., None]


class CachedFile:
    """The documents of one file: an array of DOCUMENT, and their tokens."""

    def __init__(self, folder: Path) -> None:
        self.key = folder.name  # equal for equal documents
        self._parts = [name[: -len(_DOCUMENTS)] for name in _part_names(folder)]
        self._folder = folder
        tables = [_load(folder / f"{part}{_DOCUMENTS}") for part in self._parts]
        self.documents = np.concatenate([np.empty(0, DOCUMENT), *tables])
        pairs = [_load(path) for part in self._parts
                 if (path := folder / f"{part}.pairs.npy").exists()]
        self.pairs: np.ndarray | None = np.concatenate(pairs) if pairs else None  # as documents
        # Whether only some of the tokens are targets.
        self.masked = any((folder / f"{part}.targets.npy").exists() for part in self._parts)
        self._ends = np.cumsum([len(table) for table in tables], dtype=np.int64)
        self._open: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, document: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray | None]:
        """(tokens, targets or None for all) of a document from `begin` up to `end` or its end."""
        part = int(np.searchsorted(self._ends, document, side="right"))
        if part not in self._open:
            self._open[part] = self._map(part)
        tokens, targets = self._open[part]
        row = self.documents[document]
        span = slice(int(row["start"]) + begin,
                     int(row["start"]) + min(end, int(row["length"])))
        return tokens[span], None if targets is None else targets[span]

    def targets(self, document: int) -> np.ndarray | None:
        """bool [length]: which tokens of a document are targets; None: all."""
        return self.read(document, 0, int(self.documents["length"][document]))[1]

    def _map(self, part: int) -> tuple[np.ndarray, np.ndarray | None]:
        name = self._parts[part]
        first = int(self._ends[part - 1]) if part else 0
        length = int(self.documents["length"][first : self._ends[part]].sum())
        tokens = _load(self._folder / f"{name}.tokens.npy", length)
        masked = self._folder / f"{name}.targets.npy"
        return tokens, _load(masked, length) if masked.exists() else None

def default_cache() -> Path:
    """Where tokenised files lie: ``$KILTER_HOME/data``, else ``~/.cache/kilter/data``."""
    return home() / "data"


def cached_files(
    files: list[tuple[SourceConfig, Path]], tokeniser: Tokeniser, root: Path
) -> list[CachedFile]:
    """The tokenised files, of which those missing are made first.

    Raises DataError, with file and line, for what cannot be read or tokenised.
    """
    prints = {chat: tokeniser.fingerprint(chat) for chat in {s.chat or s.pairs for s, _ in files}}
    stamps = [_stamp(path) for _, path in files]
    folders = [root / _key(source, path, stamp, prints[source.chat or source.pairs], root)
               for (source, path), stamp in zip(files, stamps, strict=True)]
    missing = [(folder, *file, stamp) for folder, file, stamp
               in zip(folders, files, stamps, strict=True) if not (folder / _WHOLE).exists()]
    with progress("Tokenising", in_bytes=True) as update:
        for wait in (False, True):  # first what nobody else works on
            for folder, source, path, stamp in missing:
                with _lock(folder, wait) as mine:
                    if mine and not (folder / _WHOLE).exists():
                        _build(folder, source, path, stamp, tokeniser, update)
    return [CachedFile(folder) for folder in folders]


_WHOLE = "whole.json"
_DOCUMENTS = ".documents.npy"


def _build(folder: Path, source: SourceConfig, path: Path, stamp: str, tokeniser: Tokeniser,
           update: Update) -> None:
    """Tokenise what no whole part has yet."""
    for left in folder.glob(".*"):  # half-written by one that was killed
        with _writing(folder):
            left.unlink()
    part, done = 0, 0
    for name in _part_names(folder):
        part, done = part + 1, done + len(_load(folder / name))
    size = path.stat().st_size
    documents: list[Document] = []
    pending = 0
    records = read_records(source, path, skip=done)

    def watched() -> Iterator[Record]:
        for record in records:
            update(record.position, size, f"Tokenising {path.name}")
            yield record

    for _, document in tokenised(watched(), tokeniser):
        documents.append(document)
        pending += len(document.tokens_N)
        if pending >= _PART:
            _check_unchanged(path, stamp)
            _write_part(folder, part, documents)
            part, done, pending, documents = part + 1, done + len(documents), 0, []
    _check_unchanged(path, stamp)
    if documents:
        _write_part(folder, part, documents)
    about = {"file": str(path), "documents": done + len(documents)}
    _replace(folder / _WHOLE, lambda new: new.write_text(json.dumps(about) + "\n", "utf-8"))


def _load(path: Path, length: int | None = None) -> np.ndarray:
    """An array; one of a known length is mapped, not read."""
    try:
        array: np.ndarray = np.load(path, "r" if length is not None else None, allow_pickle=False)
        if length is not None and len(array) != length:
            raise ValueError(f"it has {len(array)} elements instead of {length}")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} in the cache is damaged: {error}. Delete its folder; the data is "
                        "then tokenised anew.") from error
    return array


def _write_part(folder: Path, part: int, documents: list[Document]) -> None:
    table = np.zeros(len(documents), DOCUMENT)
    table["length"] = [len(document.tokens_N) for document in documents]
    table["start"] = np.cumsum(table["length"]) - table["length"]
    table["first_target"] = [_first_target(document) for document in documents]
    table["digest"] = [_digest(document.tokens_N[: first] if document.chosen else document.tokens_N)
                       for document, first in zip(documents, table["first_target"], strict=True)]
    base = folder / f"{part:05d}"
    arrays = {".tokens.npy": np.concatenate([d.tokens_N for d in documents])}
    targets = [d.targets_N for d in documents if d.targets_N is not None]
    if targets:
        arrays[".targets.npy"] = np.concatenate(targets)
    if any(document.chosen for document in documents):
        arrays[".pairs.npy"] = np.array([(d.chosen, d.margin) for d in documents], PAIR)
    for suffix, array in {**arrays, _DOCUMENTS: table}.items():
        _replace(Path(f"{base}{suffix}"), partial(_save, array=array))


def _first_target(document: Document) -> int:
    length = len(document.tokens_N)
    if document.targets_N is None:
        return min(1, length)
    found = np.flatnonzero(document.targets_N[1:])
    return int(found[0]) + 1 if len(found) else length


def _digest(tokens_N: np.ndarray) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for begin in range(0, len(tokens_N), _BLOCK):
        digest.update(tokens_N[begin : begin + _BLOCK].astype("<u4").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _part_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"[0-9]*{_DOCUMENTS}"))


def _key(source: SourceConfig, path: Path, stamp: str, fingerprint: str, root: Path) -> str:
    """The name of a file's folder: equal only for files that give the same documents."""
    facts = [_VERSION, _content(path, stamp, root), fingerprint, source.format_of(str(path)),
             source.chat, source.pairs, source.field, source.shape, source.separator]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _content(path: Path, stamp: str, root: Path) -> str:
    """sha256 of the file; of one that has not changed since, it is remembered."""
    note = root / "contents" / hashlib.sha256(stamp.encode()).hexdigest()[:32]
    try:
        if note.exists():
            return note.read_text("utf-8")
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            changed = os.fstat(file.fileno()).st_ctime
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    # A file written just now could change again within the clock's resolution.
    if time.time() - changed > 2:
        with suppress(DataError):  # then it is read again next time
            _make_folder(note.parent)
            _replace(note, lambda new: new.write_text(found, "utf-8"))
    return found


def _stamp(path: Path) -> str:
    """Of a file that has not changed it is the same."""
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _check_unchanged(path: Path, stamp: str) -> None:
    if _stamp(path) != stamp:
        raise DataError(f"{path} changed while it was tokenised. Wait until it is written, and "
                        "start again.")


@contextmanager
def _lock(folder: Path, wait: bool) -> Iterator[bool]:
    """Whether this process alone may write to the folder while the block runs."""
    _make_folder(folder)
    with _writing(folder):
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(file):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _make_folder(folder: Path) -> None:
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"The cache of tokenised data cannot be written: {place}: "
                        f"{error.strerror or error}. Make room there, or name another folder in "
                        "the environment variable KILTER_HOME.") from error


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    with _writing(path):
        try:
            write(new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
