"""Small tokenizers trained on the spot, and the GGUF metadata that describes them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't mind; they're friends, I'm told.",
    "In 2024 there were 1234567 foxes, 3.14159 of them lazy.\n\nNew paragraph:\tindented    text.",
    "naïve café, Übermut, 你好世界, こんにちは, привет мир, 안녕하세요 🙂🙃 👩‍👩‍👧",
    "def f(x):\n    return [x for x in range(10)]\r\n    # comment\n\n\n",
    "'Tis WE'LL CamelCase HTTPServer aaaa aaa bbbbbb",
] * 3

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>"]


def train_byte_level(pre_tokenizer: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    """A byte-level BPE behind the given pre-tokenizer.

    It is trained on whole lines and lacks every third merge, so that a wrong cut of the text, or a
    word merged that should be taken whole, shows in the ids.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(" ".join(CORPUS).split(" "), trainer)
    trained = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for index, pair in enumerate(trained["merges"]) if index % 3]
    backend = Tokenizer(models.BPE(vocab=trained["vocab"], merges=merges, **model))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    backend.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    return backend


def byte_level_metadata(backend: Tokenizer, pre: str) -> dict[str, Any]:
    """What a GGUF writer stores of such a tokenizer."""
    state = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {**dict.fromkeys(CONTROL, 3), **dict.fromkeys(USER_DEFINED, 4)}
    return {
        "general.architecture": "llama",
        "llama.context_length": 2048,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }


def smollm_pre_tokenizer() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )


@pytest.fixture(scope="session")
def byte_level_backend() -> Tokenizer:
    return train_byte_level(smollm_pre_tokenizer())


@pytest.fixture(scope="session")
def byte_level_gguf(byte_level_backend: Tokenizer) -> dict[str, Any]:
    return byte_level_metadata(byte_level_backend, "smollm")


@pytest.fixture(scope="session")
def sentencepiece_gguf() -> dict[str, Any]:
    """A sentencepiece BPE as GGUF files hold it: scores, byte tokens, characters last."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    # Of characters that are equally frequent the trainer would take any, each time others.
    counts = Counter("".join(CORPUS).replace(" ", "▁"))
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        limit_alphabet=60,
        initial_alphabet=sorted(counts, key=lambda c: (-counts[c], c))[:60],
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    vocab = backend.get_vocab()
    learned = sorted(vocab, key=vocab.__getitem__)
    pieces = [t for t in learned if len(t) > 1] + [t for t in learned if len(t) == 1]
    head = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    runs = ["\n" * n for n in range(1, 4)] + [" " * n for n in range(2, 5)] + ["<table>"]
    pieces = [t for t in pieces if t.replace("▁", " ") not in runs]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = head + raw + runs + pieces
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(head + raw)
        + [-1000.0] * len(runs)
        + [float(-n) for n in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, 3] + [6] * 256 + [4] * len(runs) + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
