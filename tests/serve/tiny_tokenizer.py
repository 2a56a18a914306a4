"""A byte-level tokenizer for tiny models: a token per byte, as far as the vocabulary reaches."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kilter.tokens import Tokenizer as KilterTokenizer


def save_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token 0 is <pad>, 2 is <eos>; the others are the first characters of the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", alphabet[0], "<eos>", *alphabet[1:]][:vocab_size]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>"])
    KilterTokenizer(backend, {"eos_token": "<eos>", "pad_token": "<pad>"}).save(folder)
