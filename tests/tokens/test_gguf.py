"""GGUF metadata gives the tokenizer that it was written from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.tokenization_utils_base import generate_merges

from kilter.tokens import Tokenizer
from kilter.tokens.gguf import _Header, _merges_from_scores, read_gguf_tokenizer
from tests.tokens.conftest import byte_level_metadata, smollm_pre_tokenizer, train_byte_level
from tests.tokens.texts import texts


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PIPELINES: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt-2": lambda: {"pre_tokenizer": pre_tokenizers.ByteLevel(False)},
    "smollm": lambda: {"pre_tokenizer": smollm_pre_tokenizer()},
    "llama-bpe": lambda: {
        "pre_tokenizer": split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
        "ignore_merges": True,
    },
    "qwen2": lambda: {
        "pre_tokenizer": split(PRETOKENIZE_REGEX),
        "normalizer": normalizers.NFC(),
    },
    "tekken": lambda: {
        "pre_tokenizer": split(GGUF_PRE_TOKENIZER_SPLITS["tekken"]),
        "ignore_merges": True,
    },
}


@pytest.mark.parametrize("pre", PIPELINES)
def test_byte_level_vocabularies_encode_as_the_original(pre: str) -> None:
    original = train_byte_level(**PIPELINES[pre]())
    rebuilt = Tokenizer.from_gguf_metadata(byte_level_metadata(original, pre))

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        assert rebuilt.encode(text) == original.encode(text).ids

    check()


def test_pre_tokenizers_differ_from_each_other() -> None:
    """Else the test above would not notice a mix-up."""
    probe = "In 1234 we're CamelCase e\u0301\n\n  x"
    cuts = {
        pre: str(make()["pre_tokenizer"].pre_tokenize_str(probe)) for pre, make in PIPELINES.items()
    }
    assert len(set(cuts.values())) == len(cuts)


def sentencepiece_by_hand(metadata: dict[str, Any], text: str) -> list[str]:
    """The definition: take user-defined tokens out, then merge the neighbours whose union scores
    best until none is left; what is no token becomes bytes."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    entries = zip(tokens, kinds, metadata["tokenizer.ggml.scores"], strict=True)
    score = {token: score for token, kind, score in entries if kind == 1}
    whole = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 4 or t in tokens[:4]]
    whole.sort(key=len, reverse=True)

    def merge(text: str) -> list[str]:
        symbols = list(text.replace(" ", "▁"))
        while True:
            pairs = [
                (-score[left + right], -len(left), index)
                for index, (left, right) in enumerate(itertools.pairwise(symbols))
                if left + right in score
            ]
            if not pairs:
                break
            index = min(pairs)[2]
            symbols[index : index + 2] = ["".join(symbols[index : index + 2])]
        parts = []
        for symbol in symbols:
            known = symbol in score
            parts += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        return parts

    result, plain, position = [], "", 0
    while position < len(text):
        found = next((t for t in whole if text.startswith(t, position)), None)
        if found is None:
            plain += text[position]
            position += 1
        else:
            result += [*merge(plain), found]
            plain, position = "", position + len(found)
    return result + merge(plain)


def test_sentencepiece_encodes_by_the_definition(sentencepiece_gguf: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(sentencepiece_gguf)
    tokens = sentencepiece_gguf["tokenizer.ggml.tokens"]

    @settings(max_examples=400, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        text = text.replace("▁", "")  # a real one in the text and a space are the same token
        # Runs of spaces longer than the longest token may be cut anywhere: compare their text only.
        while "     " in text:
            text = text.replace("     ", " ")
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokens[i] for i in ids] == sentencepiece_by_hand(sentencepiece_gguf, text)

    check()


def test_merges_rank_as_transformers_ranks_them(sentencepiece_gguf: dict[str, Any]) -> None:
    header = _Header.read(sentencepiece_gguf)
    normal = set(header.of(1))
    scores = sentencepiece_gguf["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(header.tokens) if token in normal}
    theirs = generate_merges(vocab, {token: scores[i] for token, i in vocab.items()})
    ours = [(a, b) for a, b in _merges_from_scores(header) if {a, b} <= normal and a + b in normal]
    assert ours == theirs and len(ours) > 100


def test_a_space_prefix_is_added_and_taken_away(sentencepiece_gguf: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(
        {**sentencepiece_gguf, "tokenizer.ggml.add_space_prefix": True}
    )
    plain = Tokenizer.from_gguf_metadata(sentencepiece_gguf)
    assert tokenizer.encode("the fox") == plain.encode(" the fox")
    for text in ("the fox", " the", "", " ", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_and_ends(sentencepiece_gguf: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(sentencepiece_gguf)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == [2, 3]
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.encode("a")[0] == 1
    without = Tokenizer.from_gguf_metadata(
        {**sentencepiece_gguf, "tokenizer.ggml.add_bos_token": False}
    )
    assert without.encode("a") == tokenizer.encode("a")[1:]


def test_a_turn_end_written_by_the_template_ends_a_generation(
    byte_level_gguf: dict[str, Any],
) -> None:
    ends = Tokenizer.from_gguf_metadata({**byte_level_gguf, "tokenizer.ggml.eos_token_id": 0})
    assert ends.eos_token_ids == [0, 2]
    base = {k: v for k, v in byte_level_gguf.items() if k != "tokenizer.chat_template"}
    base["tokenizer.ggml.eos_token_id"] = 0
    assert Tokenizer.from_gguf_metadata(base).eos_token_ids == [0]


def test_llama3_adds_bos_unless_told_otherwise(byte_level_gguf: dict[str, Any]) -> None:
    quiet = {k: v for k, v in byte_level_gguf.items() if not k.endswith("add_bos_token")}
    assert Tokenizer.from_gguf_metadata(quiet).encode("a")[0] != 1
    llama = Tokenizer.from_gguf_metadata({**quiet, "tokenizer.ggml.pre": "llama-bpe"})
    assert llama.encode("a")[0] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "falcon-9"}, r"'falcon-9'.*supported are default, gpt-2, llama-bpe"),
        ({"model": "bert"}, r"'bert'; supported are 'gpt2'"),
        ({"tokens": ["a"]}, r"1 tokenizer.ggml.tokens and \d+ tokenizer.ggml.token_type"),
        ({"merges": []}, "no tokenizer.ggml.merges"),
        ({"merges": ["q zzz"]}, "do not fit its tokens"),
        ({"eos_token_id": 99999}, "eos_token_id is 99999, but the vocabulary has"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, r"more than once, such as \['a'\]"),
        ({"add_eos_token": True, "eos_token_id": None}, "asks to add eos tokens"),
    ],
)
def test_damaged_metadata(
    byte_level_gguf: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    damaged = {**byte_level_gguf, **{f"tokenizer.ggml.{k}": v for k, v in change.items()}}
    with pytest.raises(ValueError, match=message):
        read_gguf_tokenizer(damaged)


def test_scores_must_fit(sentencepiece_gguf: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has 0 tokenizer\.ggml\.scores"):
        read_gguf_tokenizer({**sentencepiece_gguf, "tokenizer.ggml.scores": []})


def test_space_runs_are_spelled_as_in_tokenizer_json(sentencepiece_gguf: dict[str, Any]) -> None:
    """GGUF writers spell them as spaces; the pipeline sees "▁" only."""
    backend = read_gguf_tokenizer(sentencepiece_gguf).backend
    stored = sentencepiece_gguf["tokenizer.ggml.tokens"].index("   ")
    assert backend.token_to_id("▁▁▁") == stored and backend.token_to_id("   ") is None
