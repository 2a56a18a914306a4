"""A small tokenizer with chats, and data made of it, for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kilter.tokens import Tokenizer
from kilter.train.data import DataConfig, SourceConfig

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like templates that drop the reasoning of earlier turns.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '(thinking)' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>"]


def chat_tokenizer(template: str = CHATML, bos: bool = False) -> Tokenizer:
    """A token per byte, and one each for two line feeds, "he", "<eos>" and the turn tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*SPECIAL, *(["<bos>"] if bos else []), *alphabet, "ĊĊ", "he"]
    merges = [("Ċ", "Ċ"), ("h", "e")]
    backend = Backend(models.BPE({t: i for i, t in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL, *(["<bos>"] if bos else [])])
    config = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast",
              "clean_up_tokenization_spaces": False, **({"bos_token": "<bos>"} if bos else {})}
    return Tokenizer(backend, config, templates={"default": template})


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    return write_jsonl(path, [{"text": text} for text in texts])


def text_config(*paths: Path, **settings: Any) -> DataConfig:
    """One source per path."""
    settings.setdefault("seq_len", 16)
    return DataConfig(tuple(SourceConfig((str(path),)) for path in paths), **settings)
