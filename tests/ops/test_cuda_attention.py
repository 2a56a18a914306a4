"""Attention on CUDA, in Triton's interpreter where there is no GPU: values against float64, and the
same bits for a row however its text is cut, cached, batched or split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kilter.ops.cuda import attention as cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS, DIM = 2, 24
SCALE = 0.3


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def expected(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of one sequence whose queries are the last of its tokens, in float64."""
    new, total, per = q.shape[0], keys.shape[0], q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(per, 1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * SCALE
    distance = (torch.arange(total - new, total)[:, None] - torch.arange(total)).to(q.device)
    seen = (distance >= 0) & (distance < (window or total))
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1).T


@dataclass
class Text:
    """Queries, keys and values of one text, cut and cached as each test likes."""

    q: Tensor
    keys: Tensor
    values: Tensor

    @staticmethod
    def of(length: int, heads: int = 4, dtype: torch.dtype = torch.float32,
           kv_dtype: torch.dtype | None = None, dim: int = DIM) -> Text:
        def randn(n: int, t: torch.dtype) -> Tensor:
            return torch.randn(length, n, dim).to(t).to(DEVICE)

        return Text(randn(heads, dtype), randn(GROUPS, kv_dtype or dtype),
                    randn(GROUPS, kv_dtype or dtype))

    def whole(self, window: int | None = None) -> Tensor:
        n = self.q.shape[0]
        return cuda.attention(self.q, self.keys, self.values, ints(0, n), scale=SCALE,
                              window=window, max_seqlen=n)

    def cached(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(key cache, value cache, page row): pages in random order, all else NaN."""
        pages = -(-self.q.shape[0] // page_size)
        order = torch.randperm(pages + 2)[:pages]
        caches = []
        for x in (self.keys, self.values):
            cache = x.new_full(((pages + 2) * page_size, *x.shape[1:]), float("nan"))
            j = torch.arange(x.shape[0])
            cache[order[j // page_size] * page_size + j % page_size] = x
            caches.append(cache)
        return caches[0], caches[1], order.to(torch.int32).to(DEVICE)

    def piece(self, start: int, end: int, page_size: int = 16, window: int | None = None) -> Tensor:
        """Rows start..end-1 over a cache."""
        keys, values, pages = self.cached(page_size)
        return cuda.attention(self.q[start:end], keys, values, ints(0, end - start),
                              context_S=ints(end), page_table_SP=pages[None], page_size=page_size,
                              scale=SCALE, window=window, max_seqlen=end - start)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


CASES = [(torch.float32, torch.float32, None), (torch.float32, torch.float32, 40),
         (torch.float32, torch.bfloat16, 1), (torch.bfloat16, torch.bfloat16, None),
         (torch.bfloat16, torch.bfloat16, 40), (torch.float16, torch.float16, 70)]


@pytest.mark.parametrize("dtype, kv_dtype, window", CASES)
def test_packed_sequences(dtype: torch.dtype, kv_dtype: torch.dtype, window: int | None) -> None:
    text, bounds = Text.of(92, dtype=dtype, kv_dtype=kv_dtype), [0, 75, 76, 92]
    out, lse = cuda.attention(text.q, text.keys, text.values, ints(*bounds), scale=SCALE,
                              window=window, max_seqlen=75, return_lse=True)
    for a, b in pairwise(bounds):
        values, sums = expected(text.q[a:b], text.keys[a:b], text.values[a:b], window)
        limit = 1e-6 if dtype == torch.float32 else 1e-2
        assert (out[a:b].double() - values).norm() / values.norm() < limit
        assert (lse[a:b] - sums).abs().max() < 1e-5
    assert torch.equal(out, cuda.attention(text.q, text.keys, text.values, ints(*bounds),
                                           scale=SCALE, window=window))


@pytest.mark.parametrize("heads, dim", [(2, 16), (6, 80), (4, 256)])
def test_head_counts_and_sizes(heads: int, dim: int) -> None:
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        text = Text.of(35, heads=heads, dtype=dtype, dim=dim)
        values, _ = expected(text.q, text.keys, text.values, None)
        assert (text.whole().double() - values).norm() / values.norm() < limit


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_pages_do_not_change_a_bit(dtype: torch.dtype, window: int | None) -> None:
    text = Text.of(70, dtype=dtype)
    whole = text.whole(window)
    for page_size, chunk in [(1, 64), (16, 7), (5, 70)]:
        pieces = [text.piece(a, min(a + chunk, 70), page_size, window)
                  for a in range(0, 70, chunk)]
        assert torch.equal(torch.cat(pieces), whole), (page_size, chunk)
    for t in (0, 31, 32, 63, 64, 69):
        assert torch.equal(text.piece(t, t + 1, 16, window), whole[t:t + 1]), t


def test_a_batch_of_chunks_and_decodes_is_each_alone() -> None:
    texts = [Text.of(n, dtype=torch.bfloat16) for n in (70, 33, 5)]
    starts, page_size = [69, 3, 0], 8
    views = [t.cached(page_size) for t in texts]
    table = torch.full((3, 12), -1, dtype=torch.int32, device=DEVICE)
    base = 0
    for row, (keys, _, pages) in zip(table, views, strict=True):
        row[:len(pages)] = pages + base
        base += keys.shape[0] // page_size
    lengths = [t.q.shape[0] - s for t, s in zip(texts, starts, strict=True)]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    out = cuda.attention(
        torch.cat([t.q[s:] for t, s in zip(texts, starts, strict=True)]),
        torch.cat([v[0] for v in views]), torch.cat([v[1] for v in views]), ints(*bounds),
        context_S=ints(70, 33, 5), page_table_SP=table, page_size=page_size, scale=SCALE,
        max_seqlen=max(lengths))
    whole = torch.cat([t.whole()[s:] for t, s in zip(texts, starts, strict=True)])
    assert torch.equal(out, whole)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_side_by_side_merge_to_the_same_bits(dtype: torch.dtype,
                                                      window: int | None) -> None:
    text = Text.of(200, dtype=dtype)
    keys, values, pages = text.cached(16)
    tile = replace(cuda.choose(dtype, DIM, text.q.device), segment=1)
    results = []
    for parts in (0, -(-200 // tile.keys), 20):
        results.append(cuda.launch(text.q[197:], keys, values, ints(0, 3), ints(200), pages[None],
                                   16, SCALE, window, 3, tile, parts))
    exact, sums = expected(text.q[197:], text.keys, text.values, window)
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
        assert (lse - sums).abs().max() < 1e-5
        assert (out - exact).norm() / exact.norm() < 1e-2


def test_long_contexts_are_split_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text.of(1100, heads=2)
    whole = text.piece(1099, 1100)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 100)
    parts: list[int] = []
    launch = cuda.launch
    monkeypatch.setattr(cuda, "launch", lambda *args: parts.append(args[-1]) or launch(*args))
    assert torch.equal(text.piece(1099, 1100), whole)
    assert parts == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_later_keys_reach_no_earlier_row(dtype: torch.dtype, poison: float) -> None:
    text = Text.of(50, heads=2, dtype=dtype)
    whole, windowed = text.whole(), text.whole(window=10)
    text.keys[35] = poison
    text.values[35] = poison
    assert torch.equal(text.whole()[:35], whole[:35])
    assert not text.whole()[35:].isfinite().any()
    text.keys[35] = 0.0
    assert not text.whole()[35:].isfinite().any()
    again = text.whole(window=10)
    assert torch.equal(again[:35], windowed[:35]) and torch.equal(again[45:], windowed[45:])


def test_bad_calls_name_every_problem() -> None:
    text = Text.of(4)
    with pytest.raises(ValueError, match=r"window is 0.*cu_seqlens is torch.int64"):
        cuda.attention(text.q, text.keys, text.values, ints(0, 4).long(), scale=1.0, window=0)
    with pytest.raises(ValueError, match="4 queries and 3 keys"):
        cuda.attention(text.q, text.keys[:3], text.values[:3], ints(0, 4), scale=1.0)
    with pytest.raises(ValueError, match="one of context_S and page_table_SP is missing"):
        cuda.attention(text.q, text.keys, text.values, ints(0, 4), scale=1.0, context_S=ints(4))
    with pytest.raises(ValueError, match="head_dim is 300"):
        cuda.attention(*(torch.zeros(1, 1, 300, device=DEVICE) for _ in "qkv"), ints(0, 1),
                       scale=1.0)
