"""The tokenizers of real models, from their GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from transformers import AutoTokenizer

from kilter.tokens import Detokenizer, Tokenizer
from kilter.weights.gguf import GGUFFile
from tests.tokens.test_gguf import sentencepiece_by_hand
from tests.tokens.texts import texts


def gguf_of(folder: Path) -> Path:
    """The one GGUF file of a pulled model."""
    (path,) = folder.glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GGUFFile(gguf_of(smollm2)).metadata)


def test_smollm2_ids(smollm2_tokenizer: Tokenizer) -> None:
    """Ids as the original model gives them: digits one by one, no BOS."""
    encode = smollm2_tokenizer.encode
    assert encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert encode("<|im_start|>user\nHi<|im_end|>")[-1:] == [2]
    assert (smollm2_tokenizer.vocab_size, smollm2_tokenizer.eos_token_ids) == (49152, [2])


def test_smollm2_beside_transformers(
    smollm2: Path, smollm2_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2_tokenizer.save(folder)
    saved = AutoTokenizer.from_pretrained(folder)
    direct = AutoTokenizer.from_pretrained(smollm2, gguf_file=gguf_of(smollm2).name)
    pieces = map(smollm2_tokenizer.token_bytes, range(smollm2_tokenizer.vocab_size))
    known = {piece[0] for piece in pieces if len(piece) == 1}  # its vocabulary lacks a few bytes

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        ids = smollm2_tokenizer.encode(text)
        assert ids == saved.encode(text)
        if not any(character.isnumeric() for character in text):
            assert ids == direct.encode(text)  # it does not split digits
        assert smollm2_tokenizer.decode(ids, False) == saved.decode(ids)
        if set(text.encode()) <= known:
            stream = Detokenizer(smollm2_tokenizer, skip_special_tokens=False)
            assert "".join(map(stream.push, ids)) + stream.finish() == text

    check()
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of 2 others? 🙂"},
    ]
    theirs = saved.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert smollm2_tokenizer.encode_chat(messages) == theirs


def test_gemma3_by_the_definition(gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """262144 tokens, scores only, no merges."""
    metadata = GGUFFile(gguf_of(gemma3)).metadata
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    probes = ["The capital of France is", "naïve café 你好 e\u0301 🙂\x00", "x\n\n\n  y\t<table>12"]
    for text in probes:
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id == 2
        assert [tokens[i] for i in ids[1:]] == sentencepiece_by_hand(metadata, text)
        assert tokenizer.decode(ids) == text
    folder = tmp_path_factory.mktemp("gemma3")
    tokenizer.save(folder)
    theirs = AutoTokenizer.from_pretrained(folder)

    @settings(max_examples=100, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids, False) == theirs.decode(ids)

    check()
