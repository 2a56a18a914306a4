"""Proof that a token's log-probability does not depend on how it was computed.

The same text is scored in one pass without a cache (as a trainer does), in chunks through the
cache (as prefill does), token by token (as decode does) and in a batch with other texts. On the
exact path all of these are the same bits. `kilter doctor` runs `self_test`; the tests run it on
real models.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.linear import Embedding, Linear
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.ops.cpu import library
from kilter.ops.packed import pack
from kilter.serve.executor import Chunk, Executor
from kilter.serve.pages import PagePool
from kilter.serve.request import Request


@torch.inference_mode()
def score_without_cache(model: Decoder, texts: SequenceOf[list[int]]) -> list[Tensor]:
    """Log-probability of every token after the first, fp32 [len - 1] per text, all texts as one
    flat batch in one forward."""
    logits = model(Batch.of(texts))
    scores, start = [], 0
    for text in texts:
        rows = logits[start:start + len(text) - 1]
        scores.append(model.ops.token_logprobs(rows, torch.tensor(text[1:])))
        start += len(text)
    return scores


def score_with_cache(executor: Executor, texts: SequenceOf[list[int]], chunk: int
                     ) -> list[Tensor]:
    """The same through the paged cache, up to ``chunk`` tokens of every text per step."""
    ops = executor.model.ops
    requests = [Request(i, list(text), len(text)) for i, text in enumerate(texts)]
    scores: list[list[Tensor]] = [[] for _ in texts]
    while unfinished := [r for r in requests if r.computed < r.length]:
        work = [next_chunk(executor.pool, r, chunk) for r in unfinished]
        rows = executor.run(work).split([c.rows for c in work])
        for (request, count, *_), logits in zip(work, rows, strict=True):
            request.computed += count
            targets = torch.tensor(request.tokens[request.computed - count + 1:
                                                  request.computed + 1], dtype=torch.int64)
            scores[request.id].append(ops.token_logprobs(logits[:len(targets)], targets))
    for request in requests:
        executor.pool.release(request.pages)
    executor.pool.check_integrity()
    return [torch.cat(parts) for parts in scores]


def next_chunk(pool: PagePool, request: Request, count: int) -> Chunk:
    """A request's next tokens, at most ``count``, with pages for them, all logits wanted."""
    count = min(count, request.length - request.computed)
    pool.grow(request.pages, request.computed, request.computed + count)
    return Chunk(request, count, count)


def make_executor(model: Decoder, tokens: int, page_size: int = 16) -> Executor:
    """An executor with a pool for ``tokens`` tokens, partly filled pages allowed for."""
    pool = PagePool(model.spec, num_pages=tokens // page_size + 64, page_size=page_size,
                    dtype=model.kv_dtype)
    return Executor(model, pool, max_context=model.max_positions)


@torch.no_grad()
def random_model(spec: ModelSpec, storage: str, seed: int = 0, products: str = "fp32") -> Decoder:
    """A decoder with random weights, packed for inference."""
    model = init_weights(Decoder(spec, products=products), seed, std=0.05)
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            assert isinstance(module.weight, Tensor)
            gated = isinstance(module, Linear) and module.gated
            if library.available():
                module.use_packed(pack(module.weight.detach(), storage, gated=gated))
            elif storage == "bf16":
                module.weight.copy_(module.weight.to(torch.bfloat16))
    return model.eval().requires_grad_(False)


def self_test(length: int = 70) -> list[tuple[str, float]]:
    """(what was compared, largest difference of a log-probability): all 0.0 on the exact path."""
    rope = RopeSpec(theta=10000.0)
    spec = ModelSpec(
        architecture="self-test", vocab_size=203, hidden_size=96, ffn_size=160, num_heads=4,
        num_kv_heads=2, head_dim=24, layers=(LayerSpec(rope, window=17), LayerSpec(rope)),
        max_positions=length, qk_norm=True, qkv_bias=True, tied_head=True)
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(spec.vocab_size, (n,), generator=generator).tolist()
             for n in (length, 5, 33, 18)]
    results = []
    # Without the compiled kernels weights are plain tensors, and there is no int8.
    kinds = [(storage, "fp32") for storage in ("fp32", "bf16", "int8")[:3 if library.available()
                                                                        else 2]]
    for storage, products in [*kinds, ("fp32", "bf16")]:
        model = random_model(spec, storage, products=products)
        executor = make_executor(model, tokens=sum(map(len, texts)))
        alone = score_without_cache(model, texts[:1])[0]

        label = storage if products == "fp32" else f"{products} products"

        def compare(name: str, other: Tensor, alone: Tensor = alone, label: str = label) -> None:
            results.append((f"{label}: {name}", float((alone - other).abs().max())))

        for chunk in (1, 7, 64):
            compare(f"chunks of {chunk} through the cache",
                    score_with_cache(executor, texts[:1], chunk)[0])
        compare("one pass in a batch of 4", score_without_cache(model, texts[::-1])[-1])
        compare("decoded in a batch of 4", score_with_cache(executor, texts[::-1], 1)[-1])
    return results
