"""The documents of a run as units: what is trained on as one sequence of at most seq_len tokens.

    document    t0 t1 t2 t3 t4 t5 t6          seq_len 3, split
    units       t0 t1 t2 | t3 t4 t5
    labels      t1 t2 t3 | t4 t5 t6           every target once, also across the cut

A token's label is the next token of its document, wherever the unit ends; the last token of a
document has none. A unit without any label is left out, so every pack has something to learn. In
memory are some 50 bytes per document; tokens stay on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kilter.tokens import Tokenizer
from kilter.train.data.cache import CachedFile, cached_files, default_cache
from kilter.train.data.config import DataConfig
from kilter.train.data.errors import DataError
from kilter.train.data.sources import files_of
from kilter.train.data.tokenise import Tokeniser

IGNORE = -100  # the label of a token whose next one is no target


class SampleId(NamedTuple):
    """What a unit is: the record it comes from, and the token of it that it begins with."""

    source: int
    file: int
    record: int
    begin: int


@dataclass(frozen=True)
class Sample:
    """One unit. tokens_N, labels_N: int64 [N], N ≤ seq_len; labels may be IGNORE.

    chosen: of a pair, tokens of the chosen conversation; the rest is the rejected one. 0: no pair.
    margin: of a pair.
    """

    id: SampleId
    tokens_N: np.ndarray
    labels_N: np.ndarray
    chosen: int = 0
    margin: float = 0.0


@dataclass(frozen=True)
class Counts:
    """What became of the documents, in documents but for `units` and what is of units: `tokens` and
    `dropped_units`."""

    documents: int = 0
    units: int = 0
    tokens: int = 0
    truncated: int = 0
    dropped_too_long: int = 0
    dropped_without_targets: int = 0  # too short, or nothing to learn within seq_len
    dropped_units: int = 0  # of split conversations, those without a target
    held_out: int = 0  # left out of training, as evaluation sources have the same

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(),
                                              strict=True)))


class Corpus:
    """All units of some sources, numbered per source from 0 in the order of files and records.

    key: equal for corpora of the same units.
    """

    def __init__(self, sources: Sequence[_Source], key: str) -> None:
        self.key = key
        self._sources = sources
        self.sizes = [source.size for source in sources]
        self.counts = sum((source.counts for source in sources), Counts())

    def lengths(self, sources_N: np.ndarray, units_N: np.ndarray) -> np.ndarray:
        """int64 [N] tokens of each unit."""
        lengths_N = np.empty_like(units_N)
        for number in np.unique(sources_N):
            mine = np.flatnonzero(sources_N == number)
            lengths_N[mine] = self._sources[number].lengths(units_N[mine])
        return lengths_N

    def number(self, id: SampleId) -> int:
        """The unit's number in a count through all sources."""
        return sum(self.sizes[: id.source]) + self._sources[id.source].number(id)

    def read(self, source: int, unit: int) -> Sample:
        """One unit with its labels."""
        return self._sources[source].read(source, unit)


@dataclass(frozen=True)
class Data:
    """What a run trains on, and what it is evaluated on (None without a held-out part).

    key: equal for data that give the same packs in the same order.
    """

    config: DataConfig
    train: Corpus
    held_out: Corpus | None
    key: str

    def __str__(self) -> str:
        """What is trained on, and what is not, as a sentence."""
        counts, found = self.train.counts, []
        for count, what in (
            (counts.held_out, "also in the evaluation sources"),
            (counts.truncated, "truncated"), (counts.dropped_too_long, "dropped as too long"),
            (counts.dropped_without_targets, "dropped without anything to learn"),
            (counts.dropped_units, "pieces dropped without anything to learn"),
        ):
            found += [f"{count:,} {what}"] if count else []
        held = "" if self.held_out is None else (
            f"; {self.held_out.counts.documents:,} documents held out for evaluation")
        aside = f" ({', '.join(found)})" if found else ""
        return (f"{counts.documents:,} documents{aside} in {counts.units:,} sequences of "
                f"{counts.tokens:,} tokens{held}.")


def open_data(config: DataConfig, tokenizer: Tokenizer, cache: Path | None = None) -> Data:
    """Tokenise what is not in the cache yet, and open all of it.

    cache: a folder instead of `default_cache()`.

    Raises DataError, with file and line, for data that cannot be read; and if nothing is left to
    train on, or nothing was held out though the settings ask for it.
    """
    sources = [*config.sources, *config.eval_sources]
    paths = [files_of(source) for source in sources]
    listed = [(source, path) for source, found in zip(sources, paths, strict=True)
              for path in found]
    opened = iter(cached_files(listed, Tokeniser(tokenizer, config), cache or default_cache()))
    files = [[next(opened) for _ in found] for found in paths]
    own = len(config.sources)
    fraction = config.eval_fraction
    _check_apart(files[:own], files[own:], paths)
    held_out_D = [file.documents["digest"] for of_source in files[own:] for file in of_source]
    kept_out_D = np.unique(np.concatenate([np.empty(0, np.uint64), *held_out_D]))
    train = _corpus(files[:own], config, 0.0, 1.0 - fraction, kept_out_D)
    if not sum(train.sizes):
        raise DataError(f"The data has nothing to train on: {_told(train.counts)}. Add documents, "
                        "or change seq_len or long_documents.")
    if sum(Fraction(str(source.weight)) * size
           for source, size in zip(config.sources, train.sizes, strict=True)) < 1:
        raise DataError(f"The weights of the sources leave less than one sequence for an epoch, of "
                        f"the {sum(train.sizes)} that there are. Make the weights larger.")
    held_out = None
    if fraction or config.eval_sources:
        held_out = (_corpus(files[:own], config, 1.0 - fraction, 1.0) if fraction
                    else _corpus(files[own:], config, 0.0, 1.0))
        if not sum(held_out.sizes):
            raise DataError(f"Nothing is held out for evaluation: {_told(held_out.counts)}. Add "
                            "documents, or raise eval_fraction.")
    return Data(config, train, held_out, _key(config, train))


class _Source:
    """The units of one source. D documents, numbered through its files."""

    def __init__(self, files: Sequence[CachedFile], config: DataConfig, low: float, high: float,
                 kept_out_D: np.ndarray | None) -> None:
        self.seq_len = config.seq_len
        self._files = files
        self._ends = np.cumsum([len(file) for file in files], dtype=np.int64)
        table_D = np.concatenate([file.documents for file in files])
        self.length_D = table_D["length"].astype(np.int64)
        chosen_D = _share(table_D["digest"], low, high)
        known_D = np.zeros_like(chosen_D)
        if kept_out_D is not None and len(kept_out_D):
            known_D = chosen_D & np.isin(table_D["digest"], kept_out_D)
        chosen_D &= ~known_D
        count_D = _units(self.length_D, table_D["first_target"], config) * chosen_D
        # Pieces, of which those without a target are no units.
        self._first_piece_D1 = np.concatenate([[0], np.cumsum(count_D)])
        self._piece_U = self._with_targets(count_D)
        self.size = len(self._piece_U)
        self.counts = self._count(table_D, chosen_D, count_D, config, int(known_D.sum()))

    def place(self, units_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [N] documents, int64 [N] tokens of them before the unit."""
        pieces_N = self._piece_U[units_N]
        document = np.searchsorted(self._first_piece_D1, pieces_N, side="right") - 1
        return document, (pieces_N - self._first_piece_D1[document]) * self.seq_len

    def number(self, id: SampleId) -> int:
        """The unit that `read` gave this id."""
        document = id.record + (int(self._ends[id.file - 1]) if id.file else 0)
        piece = int(self._first_piece_D1[document]) + id.begin // self.seq_len
        return int(np.searchsorted(self._piece_U, piece))

    def lengths(self, units_N: np.ndarray) -> np.ndarray:
        """int64 [N] tokens of each unit."""
        document, begin = self.place(units_N)
        return np.minimum(self.length_D[document] - begin, self.seq_len)

    def _with_targets(self, count_D: np.ndarray) -> np.ndarray:
        """int64 [U]: the pieces that have a target."""
        kept = np.ones(int(self._first_piece_D1[-1]), bool)
        masked_D = np.repeat([file.masked for file in self._files],
                             [len(file) for file in self._files])
        for document in np.flatnonzero((count_D > 1) & masked_D):
            file, record = self._record(int(document))
            targets_N = self._files[file].targets(record)
            assert targets_N is not None
            first = int(self._first_piece_D1[document])
            # The label of token i is token i + 1.
            pieces = np.unique(np.flatnonzero(targets_N[1:]) // self.seq_len)
            kept[first : first + int(count_D[document])] = False
            kept[first + pieces] = True
        return np.flatnonzero(kept)

    def _record(self, document: int) -> tuple[int, int]:
        """(file, record of it)."""
        file = int(np.searchsorted(self._ends, document, side="right"))
        return file, document - (int(self._ends[file - 1]) if file else 0)

    def read(self, source: int, unit: int) -> Sample:
        document_1, begin_1 = self.place(np.array([unit]))
        document, begin = int(document_1[0]), int(begin_1[0])
        file, record = self._record(document)
        tokens, targets = self._files[file].read(record, begin, begin + self.seq_len + 1)
        inputs = tokens[: self.seq_len].astype(np.int64)
        labels = np.full(len(inputs), IGNORE, np.int64)
        labels[: len(tokens) - 1] = tokens[1:]
        if targets is not None:
            labels[: len(tokens) - 1][~targets[1:]] = IGNORE
        id, pairs = SampleId(source, file, record, begin), self._files[file].pairs
        if pairs is None:
            return Sample(id, inputs, labels)
        chosen = int(pairs["chosen"][record])
        labels[chosen - 1] = IGNORE
        return Sample(id, inputs, labels, chosen, float(pairs["margin"][record]))

    def _count(self, table_D: np.ndarray, chosen_D: np.ndarray, count_D: np.ndarray,
               config: DataConfig, known: int) -> Counts:
        length_D, has_targets_D = table_D["length"], table_D["first_target"] < table_D["length"]
        long_D = chosen_D & (length_D > self.seq_len) & has_targets_D
        too_long = int(long_D.sum()) if config.long_documents == "drop" else 0
        truncates = config.long_documents == "truncate"
        return Counts(
            documents=int(chosen_D.sum()),
            units=self.size,
            tokens=int(self.lengths(np.arange(self.size)).sum()),
            truncated=int((long_D & (count_D > 0)).sum()) if truncates else 0,
            dropped_too_long=too_long,
            dropped_without_targets=int((chosen_D & (count_D == 0)).sum()) - too_long,
            dropped_units=int(count_D.sum()) - self.size,
            held_out=known,
        )


def _corpus(files: Sequence[Sequence[CachedFile]], config: DataConfig, low: float, high: float,
            kept_out_D: np.ndarray | None = None) -> Corpus:
    facts = [_VERSION, [[file.key for file in of_source] for of_source in files], config.seq_len,
             config.long_documents, low, high]
    if kept_out_D is not None and len(kept_out_D):
        facts.append(hashlib.sha256(kept_out_D.tobytes()).hexdigest())
    return Corpus([_Source(of_source, config, low, high, kept_out_D) for of_source in files],
                  hashlib.sha256(json.dumps(facts).encode()).hexdigest())


_VERSION = 2  # of how documents become units


def _check_apart(files: Sequence[Sequence[CachedFile]], held_out: Sequence[Sequence[CachedFile]],
                 paths: Sequence[Sequence[Path]]) -> None:
    """Raises DataError if a file is both to train on and to evaluate with."""
    trained = {file.key for of_source in files for file in of_source}
    for of_source, found in zip(held_out, paths[len(files):], strict=True):
        for file, path in zip(of_source, found, strict=True):
            if file.key in trained:
                raise DataError(f"{path} is to be evaluated with, but is trained on too (in that "
                                "place or as a copy). Take it out of sources or eval_sources.")


def _share(digest_D: np.ndarray, low: float, high: float) -> np.ndarray:
    """bool [D]: the documents whose digest, as a number in [0, 1), is in [low, high)."""
    place_D = (digest_D >> np.uint64(11)) * 2.0**-53
    return (place_D >= low) & (place_D < high)


def _units(length_D: np.ndarray, first_target_D: np.ndarray, config: DataConfig) -> np.ndarray:
    """int64 [D]: into how many units each document goes."""
    has_targets_D = first_target_D < length_D
    if config.long_documents == "truncate":
        return (has_targets_D & (first_target_D <= config.seq_len)).astype(np.int64)
    if config.long_documents == "drop":
        return (has_targets_D & (length_D <= config.seq_len)).astype(np.int64)
    return np.where(has_targets_D, -((1 - length_D) // config.seq_len), 0)


def _told(counts: Counts) -> str:
    return (f"of {counts.documents} documents {counts.dropped_too_long} are too long and "
            f"{counts.dropped_without_targets} have no target")


def _key(config: DataConfig, train: Corpus) -> str:
    facts = [
        train.key, [str(source.weight) for source in config.sources],
        config.seq_len, config.packing, config.lookahead, config.long_documents, config.shuffle,
        config.seed, config.eval_fraction,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
