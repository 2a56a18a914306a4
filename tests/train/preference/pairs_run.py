"""A small job on pairs and its inputs: of two words, the better one has the letters a to d."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from kilter.job import build
from kilter.train.config import TrainJob
from tests.train.data.tiny import chat_tokenizer, write_jsonl
from tests.train.tiny_run import MODEL, job_table


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs with prompts and answers of several lengths; every third has a margin."""
    draw = random.Random(seed)

    def word(letters: str) -> str:
        return "".join(draw.choices(letters, k=draw.randint(2, 6)))

    return [{"prompt": word("abcdefgh"), "chosen": word("abcd"), "rejected": word("efgh"),
             **({"margin": 0.5} if i % 3 == 0 else {})} for i in range(count)]


def write_inputs(folder: Path) -> None:
    """A tokenizer, a model to start from, 120 pairs to learn from and 30 held out."""
    tokenizer = chat_tokenizer()
    tokenizer.save(folder / "tokenizer")
    set_seed(0)
    # Padding that is the token that ends turns: scores of transformers would look past it.
    config = LlamaConfig(**MODEL, vocab_size=tokenizer.vocab_size, initializer_range=0.1,
                         pad_token_id=tokenizer.encode("<|im_end|>")[0])
    LlamaForCausalLM(config).save_pretrained(folder / "start")
    tokenizer.save(folder / "start")
    write_jsonl(folder / "pairs.jsonl", rows(120, 0))
    write_jsonl(folder / "held_out.jsonl", rows(30, 1))


def pairs_job(folder: Path, kind: str, **changes: Any) -> TrainJob:
    """A job that starts from the model of `write_inputs`."""
    table = job_table(folder, model=None, data=None)
    table |= {
        "kind": kind, "steps": 3, "model": {"path": str(folder / "start")},
        "data": {"sources": [{"paths": [str(folder / "pairs.jsonl")], "pairs": True}],
                 "eval_sources": [{"paths": [str(folder / "held_out.jsonl")], "pairs": True}],
                 "seq_len": 128, "lookahead": 8, "long_documents": "drop"},
        "schedule": {"name": "constant"}}
    for key, value in changes.items():
        if value is None:
            table.pop(key)
        else:
            table[key] = {**table[key], **value} if isinstance(
                value, dict) and key in table else value
    return build(TrainJob, table)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `write_inputs` writes, once for a file of tests."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture
def folder(inputs: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder of its own with these inputs."""
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    yield tmp_path
