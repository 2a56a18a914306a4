"""Attention on the CPU: values and gradients against float64, and the same bits for a row however
its text is cut, cached, batched or computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import attention as module
from kilter.ops import band_attention, reference
from kilter.ops.attention import attention
from kilter.ops.cpu import library
from kilter.ops.cpu.tape import Tape
from tests.ops import runnable_isas, use_library

pytestmark = pytest.mark.skipif(not library.available(), reason="no compiler")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def expected(q: Tensor, k: Tensor, v: Tensor, scale: float,
             window: int | None) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of one sequence in float64, by the definition."""
    n, per = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(per, 1), v.double().repeat_interleave(per, 1)
    score = torch.einsum("thd,shd->hts", q.double(), k) * scale
    distance = torch.arange(n)[:, None] - torch.arange(n)
    score = score.masked_fill((distance < 0) | (distance >= (window or n)), -math.inf)
    return torch.einsum("hts,shd->thd", score.softmax(-1), v), score.logsumexp(-1).T


@dataclass
class Text:
    """One sequence's queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: int | None = None

    @staticmethod
    def of(length: int, heads: int = 3, groups: int = 1, dim: int = 16, window: int | None = None,
           dtype: torch.dtype = torch.float32, seed: int = 0) -> Text:
        torch.manual_seed(seed)
        return Text(torch.randn(length, heads, dim), torch.randn(length, groups, dim).to(dtype),
                    torch.randn(length, groups, dim).to(dtype), window)

    def __len__(self) -> int:
        return self.q.shape[0]

    def whole(self) -> Tensor:
        return attention(self.q, self.k, self.v, ints(0, len(self)), scale=0.3,
                         window=self.window, max_seqlen=len(self))

    def pages(self, page_size: int) -> int:
        return -(-len(self) // page_size)


def store(texts: list[Text], page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(key cache, value cache, page table): pages in random order, two spare ones, all else NaN
    or, in the table, nonsense."""
    counts = [t.pages(page_size) for t in texts]
    order = torch.randperm(sum(counts) + 2).int()
    table = torch.full((len(texts), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    shape = (len(order), page_size, *texts[0].k.shape[1:])
    keys = torch.full(shape, math.nan, dtype=texts[0].k.dtype)
    values = keys.clone()
    at = 0
    for s, (text, count) in enumerate(zip(texts, counts, strict=True)):
        table[s, :count] = order[at:at + count]
        at += count
        for i in range(len(text)):
            keys[table[s, i // page_size], i % page_size] = text.k[i]
            values[table[s, i // page_size], i % page_size] = text.v[i]
    return keys.flatten(0, 1), values.flatten(0, 1), table


def cached(texts: list[Text], spans: list[tuple[int, int]], page_size: int) -> list[Tensor]:
    """Each text's rows [start, end) computed in one batch from a paged cache."""
    keys, values, table = store(texts, page_size)
    lengths = torch.tensor([end - start for start, end in spans])
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    q = torch.cat([t.q[start:end] for t, (start, end) in zip(texts, spans, strict=True)])
    out = attention(q, keys, values, cu, context_S=ints(*(end for _, end in spans)),
                    page_table_SP=table, page_size=page_size, scale=0.3, window=texts[0].window,
                    max_seqlen=int(lengths.max()))
    return list(out.split(lengths.tolist()))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.sampled_from((2, 8, 16, 24, 40, 64, 80, 256)),
       st.lists(st.integers(0, 90), min_size=1, max_size=4),
       st.one_of(st.none(), st.integers(1, 100)), st.integers(0, 999))
def test_values_against_float64(groups: int, per: int, dim: int, lengths: list[int],
                                window: int | None, seed: int) -> None:
    text = Text.of(sum(lengths), groups * per, groups, dim, seed=seed)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    out, lse = attention(text.q, text.k, text.v, cu, scale=dim ** -0.5, window=window,
                         max_seqlen=max(lengths), return_lse=True)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        want, want_lse = expected(text.q[start:end], text.k[start:end], text.v[start:end],
                                  dim ** -0.5, window)
        torch.testing.assert_close(out[start:end].double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[start:end].double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
def test_values_against_sdpa_over_several_chunks(window: int | None) -> None:
    text = Text.of(1100, heads=6, groups=2, dim=64, window=window)
    row, column = torch.arange(1100)[:, None], torch.arange(1100)
    mask = (column <= row) & (column > row - (window or 1100))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().movedim(1, 0) for x in (text.q, text.k, text.v)), attn_mask=mask, scale=0.3,
        enable_gqa=True).movedim(0, 1)
    torch.testing.assert_close(text.whole().double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "groups", "dim", "window"), [
    (3, 1, 16, None), (4, 4, 24, None), (6, 2, 64, 100), (7, 1, 40, 3), (8, 1, 80, 257)])
def test_chunks_and_decode_have_the_bits_of_the_whole(heads: int, groups: int, dim: int,
                                                      window: int | None) -> None:
    text = Text.of(550, heads, groups, dim, window)
    whole = text.whole()
    for step in (7, 64, 300):
        for start in range(0, len(text), step if step != 7 else 49):
            end = min(start + step, len(text))
            page_size = 16 if step == 7 else 3  # pages that do and do not divide a chunk
            assert torch.equal(cached([text], [(start, end)], page_size)[0], whole[start:end])
    for i in (0, 1, 15, 16, 63, 64, 254, 255, 256, 257, 511, 512, 513, 549):
        assert torch.equal(cached([text], [(i, i + 1)], 3)[0], whole[i:i + 1])


def test_every_token_of_a_long_text() -> None:
    text = Text.of(3000, heads=2, groups=1, dim=8)
    whole = text.whole()
    keys, values, table = store([text], 64)
    for i in range(0, 3000, 17):
        row = attention(text.q[i:i + 1], keys, values, ints(0, 1), context_S=ints(i + 1),
                        page_table_SP=table, page_size=64, scale=0.3)
        assert torch.equal(row, whole[i:i + 1])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_neighbours_pages_and_cuts_change_nothing(data: st.DataObject) -> None:
    """Any batch of any spans of texts, in any order, with any page size and thread count."""
    page_size = data.draw(st.sampled_from((1, 3, 16, 64)))
    window = data.draw(st.sampled_from((None, 1, 5, 260)))
    groups, per = data.draw(st.sampled_from(((1, 1), (1, 3), (2, 2), (3, 7))))
    dim = data.draw(st.sampled_from((8, 24, 64)))
    texts, spans = [], []
    for i in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.one_of(st.integers(1, 40), st.integers(200, 600)))
        start = data.draw(st.one_of(st.just(length - 1), st.integers(0, length - 1)))
        texts.append(Text.of(length, groups * per, groups, dim, window, seed=i))
        spans.append((start, length))
    for threads in (1, 2):
        library.load().kt_set_num_threads(threads)
        rows = cached(texts, spans, page_size)
        library.load().kt_set_num_threads(1)
        for text, (start, end), got in zip(texts, spans, rows, strict=True):
            assert torch.equal(got, text.whole()[start:end])


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set_and_thread_count(monkeypatch: pytest.MonkeyPatch, isa: str,
                                                dtype: torch.dtype) -> None:
    cases = [Text.of(n, heads, groups, dim, window, dtype) for n, heads, groups, dim, window in (
        (530, 3, 1, 64, None), (300, 4, 2, 40, 33), (270, 14, 2, 80, 300))]

    def run() -> list[Tensor]:
        return [x for text in cases
                for x in (text.whole(), *cached([text], [(len(text) - 2, len(text))], 16))]

    use_library(monkeypatch, runnable_isas()[0], threads=1)
    want = run()
    for threads in (1, 2, 5):
        use_library(monkeypatch, isa, threads)
        assert all(map(torch.equal, run(), want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [8, 48, 64])
def test_narrow_keys_are_widened_exactly(dtype: torch.dtype, dim: int) -> None:
    text = Text.of(300, 4, 2, dim, dtype=dtype)
    wide = Text(text.q, text.k.float(), text.v.float())
    assert torch.equal(text.whole(), wide.whole())
    assert torch.equal(cached([text], [(299, 300)], 16)[0], cached([wide], [(299, 300)], 16)[0])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("heads", [1, 6])
def test_nothing_outside_a_row_reaches_it(window: int | None, heads: int) -> None:
    """NaN in later tokens, in tokens below the window, and in another sequence."""
    text = Text.of(200, heads, 1, 24, window)
    clean = text.whole()
    for x in (text.q, text.k, text.v):
        x[120:] = math.nan
        if window:
            x[:60] = math.nan
    poisoned = text.whole()
    first = 60 + window - 1 if window else 0
    assert torch.equal(poisoned[first:120], clean[first:120])
    assert poisoned[120:].isnan().all()
    other = Text.of(30, heads, 1, 24, window)
    both = attention(*(torch.cat((getattr(text, n), getattr(other, n))) for n in "qkv"),
                     ints(0, 200, 230), scale=0.3, window=window)
    assert torch.equal(both[200:], other.whole())


def test_huge_scores_do_not_overflow() -> None:
    text = Text.of(600, 2, 1, 16)
    text.q.mul_(1e4)
    want, _ = expected(text.q, text.k, text.v, 0.3, None)
    torch.testing.assert_close(text.whole().double(), want, atol=1e-3, rtol=1e-3)


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 4, 16)
    assert attention(empty, empty, empty, ints(0), scale=1.0).shape == (0, 4, 16)
    assert attention(empty, empty, empty, ints(0, 0, 0), scale=1.0).shape == (0, 4, 16)


def test_a_tape_follows_contexts_and_pages() -> None:
    """Everything but shapes is read when the tape plays."""
    text = Text.of(600, 3, 1, 16)
    whole = text.whole()
    keys, values, table = store([text], 16)
    q, context = text.q[:1].clone(), ints(1)
    tape = Tape()
    with tape.record():
        out = attention(q, keys, values, ints(0, 1), context_S=context, page_table_SP=table,
                        page_size=16, scale=0.3)
    for i in (599, 3, 256):
        q.copy_(text.q[i:i + 1])
        context.fill_(i + 1)
        tape.replay()
        assert torch.equal(out, whole[i:i + 1])
    table[0, 1] = 10**6
    tape.replay()
    assert out.isnan().all()


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(window: int | None, dtype: torch.dtype) -> None:
    text = Text.of(70, 6, 2, 24, window, dtype)
    cu = ints(0, 1, 1, 41, 70)
    leaves = [x.clone().requires_grad_() for x in (text.q, text.k, text.v)]
    out = attention(*leaves, cu, scale=0.3, window=window, max_seqlen=40)
    assert torch.equal(out, attention(text.q, text.k, text.v, cu, scale=0.3, window=window))
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    exact = [x.double().requires_grad_() for x in (text.q, text.k, text.v)]
    want = torch.cat([expected(*(x[a:b] for x in exact), 0.3, window)[0]
                      for a, b in ((0, 1), (1, 41), (41, 70))])
    (want * weight).sum().backward()
    for got, x in zip(leaves, exact, strict=True):
        assert got.grad is not None and x.grad is not None and got.grad.dtype == got.dtype
        close = 1e-4 if got.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got.grad.double(), x.grad, atol=close, rtol=close)


@pytest.mark.parametrize(("heads", "groups", "dim", "window"), [
    (9, 3, 64, None), (4, 1, 256, 100), (3, 3, 10, None), (14, 2, 20, 33), (100, 1, 6, None)])
def test_gradients_over_several_blocks(heads: int, groups: int, dim: int,
                                       window: int | None) -> None:
    text = Text.of(330, heads, groups, dim, window)
    leaves = [x.clone().requires_grad_() for x in (text.q, text.k, text.v)]
    exact = [x.double().requires_grad_() for x in (text.q, text.k, text.v)]
    out = attention(*leaves, ints(0, 300, 330), scale=dim ** -0.5, window=window)
    weight = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, weight)
    want = torch.autograd.grad(
        torch.cat([expected(*(x[a:b] for x in exact), dim ** -0.5, window)[0]
                   for a, b in ((0, 300), (300, 330))]), exact, weight.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5 * float(b.abs().max()), rtol=1e-5)


def test_the_pure_torch_backward_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text.of(90, 4, 2, 24, 40)
    leaves = [x.requires_grad_() for x in (text.q, text.k, text.v)]
    out = text.whole()
    kernel = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    monkeypatch.setattr(band_attention, "available", lambda: False)
    monkeypatch.setattr(band_attention, "_ROWS", 16)
    plain = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for a, b in zip(kernel, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_operator_is_well_behaved() -> None:
    text = Text.of(20, 4, 2, 8)
    args = [x.requires_grad_() for x in (text.q, text.k, text.v)]
    torch.library.opcheck(module._attention_op,
                          (*args, ints(0, 5, 20), None, None, 0, 0.3, 0, 15),
                          test_utils=("test_schema", "test_autograd_registration",
                                      "test_faketensor"))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k = torch.empty(7, 6, 16, requires_grad=True), torch.empty(7, 2, 16, requires_grad=True)
        out, lse = attention(q, k, k, torch.empty(2, dtype=torch.int32), scale=1.0,
                             return_lse=True)
        assert out.shape == (7, 6, 16) and lse.shape == (7, 6)
        out.sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pure-torch side: close to the kernel, and as invariant."""
    text = Text.of(90, 4, 2, 24, window=40)
    kernel = text.whole()
    monkeypatch.setattr(module, "available", lambda: False)
    whole = text.whole()
    torch.testing.assert_close(whole, kernel, atol=1e-5, rtol=1e-5)
    other = Text.of(33, 4, 2, 24, window=40, seed=1)
    for start, end in ((0, 7), (7, 64), (64, 90), (89, 90)):
        mine, _ = cached([text, other], [(start, end), (30, 33)], 3)
        assert torch.equal(mine, whole[start:end])
    text.v[50:] = math.nan
    assert torch.equal(text.whole()[:50], whole[:50])


@pytest.mark.parametrize("compiled", [True, False])
def test_errors(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(module, "available", lambda: False)
    q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    paged = {"context_S": ints(4), "page_table_SP": ints(0, 1)[None], "page_size": 2}
    for cu, options, words in (
        (ints(0, 3), {}, "rise from 0 to the number of tokens, 4"),
        (ints(0, 5, 4), {}, "rise from 0"),
        (ints(0, 4), {**paged, "context_S": ints(3)}, "4 new tokens but a context of 3"),
        (ints(0, 4), {**paged, "context_S": ints(5)}, "3 pages of 2, but the page table has 2"),
        (ints(0, 4), {**paged, "page_table_SP": ints(0, 2)[None]}, "page of sequence 0"),
        (ints(0, 4), {**paged, "page_table_SP": ints(-1, 1)[None]}, "page of sequence 0"),
        (ints(0, 4), {**paged, "page_size": 0}, "page_size is 0"),
        (ints(0, 4), {"context_S": ints(4)}, "give both or neither"),
        (ints(0, 4), {"window": 0}, "window is 0"),
        (torch.tensor([0, 4]), {}, "int32"),
    ):
        with pytest.raises(ValueError, match=words):
            attention(q, kv, kv, cu, scale=1.0, **options)
    with pytest.raises(ValueError, match="multiple of"):
        attention(q[:, :3].contiguous(), kv, kv, ints(0, 4), scale=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        attention(q, kv.transpose(1, 2).contiguous().transpose(1, 2), kv, ints(0, 4), scale=1.0)
    with pytest.raises(ValueError, match="no gradient"):
        attention(q.requires_grad_(), kv, kv, ints(0, 4), scale=1.0, **paged)


def test_the_reference_sees_what_the_definition_says() -> None:
    text = Text.of(50, 6, 3, 10, window=7)
    out, lse = reference.attention(text.q, text.k, text.v, ints(0, 50), None, None, 0, 0.3, 7)
    want, want_lse = expected(text.q, text.k, text.v, 0.3, 7)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-5)
