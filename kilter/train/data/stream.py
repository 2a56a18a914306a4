"""Records to documents, as a stream: tokenised in batches on all cores, with bounded memory.

A text of any length goes through in pieces. It is cut only where its tokens end in any case, so
that the pieces have the tokens of the whole:

    encode("… the end") + encode(" of the day …")  =  encode("… the end of the day …")

That is seen by trying, with some hundred characters on either side of the cut. A tokenizer that
writes a space before each text gives no such place; there the cut takes the text's own space out:

    encode("… the end") + encode("of the day …")  =  encode("… the end of the day …")
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from kilter.train.data.sources import Record
from kilter.train.data.tokenise import Document, Tokeniser

_PIECE = 1 << 18  # characters of a text that are tokenised alone
_BATCH = 1 << 20  # characters of a batch, about
_RECORDS = 256  # of a batch at most
_AROUND = 256  # characters on either side of a cut that are looked at
_BEGINNINGS = 3  # of what is looked at before a cut
_TRIES = 32  # cuts that are tried before a piece becomes longer
_WORKERS = 2  # one renders templates while the other tokenises on all cores
_SPACE = re.compile(r"(?<=\S) (?=\S)")


def tokenised(records: Iterable[Record], tokeniser: Tokeniser) -> Iterator[tuple[Record, Document]]:
    """Each document, with the record that it ends in.

    Raises DataError as `Tokeniser.documents`.
    """
    parts: list[np.ndarray] = []
    for record, document in _in_batches(_in_pieces(records, tokeniser), tokeniser):
        parts.append(document.tokens_N)
        if record.ends:
            if len(parts) > 1:
                document = replace(document, tokens_N=np.concatenate(parts))
            parts = []
            yield record, document


def _in_pieces(records: Iterable[Record], tokeniser: Tokeniser) -> Iterator[Record]:
    """The records, none with much more than `_PIECE` characters of text if they can be cut."""
    rest, begins, enough = "", True, _PIECE
    for record in records:
        if not isinstance(record.value, str):
            yield record
            continue
        rest += record.value
        while len(rest) > enough + _AROUND:
            cut = _cut(rest, enough, tokeniser)
            if cut is None:
                enough *= 2
                continue
            yield replace(record, value=rest[: cut[0]], begins=begins, ends=False)
            rest, begins, enough = rest[cut[1] :], False, _PIECE
        if record.ends:
            yield replace(record, value=rest, begins=begins)
            rest, begins, enough = "", True, _PIECE


def _cut(text: str, end: int, tokeniser: Tokeniser) -> tuple[int, int] | None:
    """(end of a piece, start of the next) at or before `end`; None if there is no such place."""
    start = max(_AROUND, end - 16 * _AROUND)
    spaces = [match.start() for match in _SPACE.finditer(text, start, end)][: -_TRIES : -1]
    for place in spaces or range(end, max(_AROUND, end - _TRIES), -1):
        after = text[place : place + _AROUND]
        # With several beginnings: among many equal characters, which go together by twos or
        # threes from the first one on, a place may look right by chance.
        before = [text[place - _AROUND + i : place] for i in range(_BEGINNINGS)]
        whole = tokeniser.encode([some + after for some in before])
        first = tokeniser.encode(before)
        for skip in (0, 1) if after.startswith(" ") else (0,):
            [second] = tokeniser.encode([after[skip:]])
            if all(a + second == b for a, b in zip(first, whole, strict=True)):
                return place, place + skip
    return None


def _in_batches(records: Iterable[Record], tokeniser: Tokeniser
                ) -> Iterator[tuple[Record, Document]]:
    """Each record with what it becomes, in their order."""
    ahead: deque[tuple[Sequence[Record], Future[list[Document]]]] = deque()
    with ThreadPoolExecutor(_WORKERS) as workers:
        for batch in _batches(records):
            ahead.append((batch, workers.submit(tokeniser.documents, batch)))
            if len(ahead) > _WORKERS:
                yield from _done(*ahead.popleft())
        while ahead:
            yield from _done(*ahead.popleft())


def _done(batch: Sequence[Record], made: Future[list[Document]]
          ) -> Iterator[tuple[Record, Document]]:
    return zip(batch, made.result(), strict=True)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += record.size
        if size >= _BATCH or len(batch) >= _RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
