"""Our decoder computes what `transformers` computes, for every family and odd shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kilter.models import Batch
from kilter.serve.exactness import next_chunk
from kilter.serve.executor import Executor
from kilter.serve.pages import PagePool
from kilter.serve.request import Request
from kilter.weights.bridge import open_model
from kilter.weights.load import load_decoder
from tests.models import tiny

LENGTHS = (45, 1, 18)  # longer than every window in the cases


@pytest.mark.parametrize("name", tiny.CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = tiny.make(name, tmp_path)
    vocab = oracle.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.inference_mode():
        expected = torch.cat([oracle(torch.tensor([text])).logits[0] for text in texts])
    assert expected.abs().max() > 0.5  # else the tolerance below would say nothing
    for exact in (True, False):
        model = load_decoder(open_model(tmp_path), exact=exact)
        with torch.inference_mode():
            logits = model(Batch.of(texts))
        assert (logits - expected).abs().max() <= 1e-4, "one pass without a cache"
        executor = Executor(model, PagePool(model.spec, 64, page_size=5), max_context=64)
        requests = [Request(i, text, len(text)) for i, text in enumerate(texts)]
        parts: list[list[torch.Tensor]] = [[] for _ in texts]
        while unfinished := [r for r in requests if r.computed < r.length]:
            work = [next_chunk(executor.pool, r, 11) for r in unfinished]
            for chunk, rows in zip(work, executor.run(work).split([c.rows for c in work]),
                                   strict=True):
                parts[chunk.request.id].append(rows.clone())
                chunk.request.computed += chunk.size
        cached = torch.cat([row for part in parts for row in part])
        assert (cached - expected).abs().max() <= 1e-4, "chunks through the cache"


def test_tiny_cases_cover_every_family() -> None:
    families = {name.split("-")[0] for name in tiny.CASES}
    assert families == {"llama", "mistral", "qwen2", "qwen3", "gemma3"}
    assert all(sum(name.startswith(f) for name in tiny.CASES) >= 4 for f in families)
