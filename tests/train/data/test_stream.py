"""A long text in pieces has the tokens of the whole, whatever the tokenizer; and batches of records
become what each does alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kilter.tokens import Tokenizer
from kilter.train.data import DataConfig, SourceConfig
from kilter.train.data import stream as module
from kilter.train.data.sources import Record
from kilter.train.data.stream import tokenised
from kilter.train.data.tokenise import Document, Tokeniser
from tests.train.data.tiny import CHATML, chat_tokenizer


def metaspace(inside: str) -> Tokenizer:
    """A tokenizer that writes a space before each text: by its normalizer over the whole text, or
    by its pre-tokenizer over words."""
    words = ["▁he", "▁h", "he", "lo", "▁lo", "▁▁"]
    letters = ["<unk>", "</s>", "▁", *"helo.\n"]
    vocabulary = {token: i for i, token in enumerate([*letters, *words])}
    merges = [("h", "e"), ("l", "o"), ("▁", "he"), ("▁", "lo"), ("▁", "h"), ("▁", "▁")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    if inside == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return Tokenizer(backend, {"eos_token": "</s>"})


def regex_bytes() -> Tokenizer:
    """Byte-level with the usual regular expression, which looks ahead over white space."""
    tokenizer = chat_tokenizer()
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return Tokenizer(backend, tokenizer._config)


KINDS = {"bytes": chat_tokenizer(), "regex": regex_bytes(),
         "normalizer": metaspace("normalizer"), "words": metaspace("words")}


def made(tokenizer: Tokenizer, records: list[Record], **settings: Any) -> list[Document]:
    config = DataConfig((SourceConfig(("x.jsonl",)),), 8, **settings)
    return [document for _, document in tokenised(records, Tokeniser(tokenizer, config))]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.sampled_from("helo. \n"), max_size=60), min_size=1, max_size=4),
       st.integers(1, 9))
def test_pieces_have_the_tokens_of_the_whole(kind: str, blocks: list[str], piece: int) -> None:
    tokenizer = KINDS[kind]
    text = "".join(blocks)
    records = [Record("", block, 0, number == 0, number == len(blocks) - 1)
               for number, block in enumerate(blocks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        patch.setattr(module, "_AROUND", 24)
        [document, after] = made(tokenizer, [*records, Record("", "he", 0)])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert document.tokens_N.tolist() == (ids and [*ids, *tokenizer.eos_token_ids])
    assert after.tokens_N.tolist() == [*tokenizer.encode("he", add_special_tokens=False),
                                       *tokenizer.eos_token_ids]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_tokenised_in_short_pieces(kind: str, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    monkeypatch.setattr(module, "_PIECE", 200)
    monkeypatch.setattr(module, "_AROUND", 16)
    tokenizer, longest = KINDS[kind], 0
    encode = Tokenizer.encode_batch

    def watched(self: Tokenizer, texts: list[str], parse_special: bool = True) -> list[list[int]]:
        nonlocal longest
        longest = max([longest, *map(len, texts)])
        return encode(self, texts, parse_special)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    text = "hello he. lo\n" * 300
    [document] = made(tokenizer, [Record("", text, 0)], eos=False)
    assert document.tokens_N.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert longest < 500


def test_a_real_tokenizer(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 3000)
    tokenizer = Tokenizer.from_folder(smollm2)
    text = Path(module.__file__).read_text("utf-8") * 2
    [document] = made(tokenizer, [Record("", text, 0)], eos=False)
    assert document.tokens_N.tolist() == tokenizer.encode(text, parse_special=False)


@pytest.mark.parametrize("piece", range(9, 15))
def test_what_cannot_be_cut_stays_whole(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line feeds go together by twos from the first one on, which nothing near a cut tells."""
    monkeypatch.setattr(module, "_PIECE", piece)
    monkeypatch.setattr(module, "_AROUND", 8)
    text = "\n" * 41
    [document] = made(chat_tokenizer(), [Record("", text, 0)], eos=False)
    assert document.tokens_N.tolist() == chat_tokenizer().encode(text)


def test_records_keep_their_order_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECORDS", 3)
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}],
            "tools": None}
    values: list[Any] = ["he", "", "a b", *([talk] * 2), "h" * 9, talk] * 3
    tokeniser = Tokeniser(chat_tokenizer(CHATML), DataConfig((SourceConfig(("x.jsonl",)),), 8))
    records = [Record(f"{i}", value, i) for i, value in enumerate(values)]
    found = list(tokenised(records, tokeniser))
    assert [record.where for record, _ in found] == [record.where for record in records]
    for record, document in found:
        [alone] = tokeniser.documents([record])
        assert np.array_equal(alone.tokens_N, document.tokens_N)
        assert (alone.targets_N is None) == (document.targets_N is None)
    assert len(found[1][1].tokens_N) == 0  # nothing is said
