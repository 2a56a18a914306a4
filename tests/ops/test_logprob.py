"""Log-probabilities and argmax: values against float64, the bits of a row alone, gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import logprob as module
from kilter.ops.logprob import (
    argmax,
    chunk_sums,
    log_softmax,
    logprob_grad,
    logprobs_from_sums,
    token_logprobs,
    vocab_chunk,
)
from tests.ops import runnable_isas, use_library


@pytest.mark.parametrize("vocab", [1, 3, 17, 4095, 4096, 4097, 10_003])
def test_values(side: str, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab) * 10
    want = torch.log_softmax(logits.double(), -1)
    got = log_softmax(logits)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)
    targets = torch.randint(vocab, (4,))
    assert torch.equal(token_logprobs(logits, targets), got.gather(1, targets[:, None])[:, 0])
    assert torch.equal(argmax(logits), logits.argmax(-1))


@pytest.mark.parametrize("vocab", [5, 5000])
def test_a_row_alone_has_the_same_bits(side: str, vocab: int) -> None:
    torch.manual_seed(0)
    wide = torch.randn(9, vocab + 3)
    logits = wide[:, 1:vocab + 1]  # strided rows
    got = log_softmax(logits)
    for i in range(9):
        assert torch.equal(log_softmax(logits[i:i + 1].contiguous())[0], got[i])
    wide[:4] = math.nan
    assert torch.equal(log_softmax(logits)[4:], got[4:])


@pytest.mark.parametrize(("vocab", "chunk"), [
    (1, 1), (7, 1), (8, 1), (17, 2), (255, 16), (1023, 64), (1024, 128), (262_144, 128)])
def test_the_chunk_of_a_vocabulary(vocab: int, chunk: int) -> None:
    assert vocab_chunk(vocab) == chunk


@pytest.mark.parametrize("vocab", [1, 30, 131, 1000, 9001])
@pytest.mark.parametrize("shards", [2, 3, 8])
def test_a_vocabulary_in_shards_has_the_bits_of_the_whole(side: str, vocab: int,
                                                          shards: int) -> None:
    torch.manual_seed(vocab)
    logits, targets = torch.randn(4, vocab) * 10, torch.randint(vocab, (4,))
    chunk = vocab_chunk(vocab)
    chunks = -(-vocab // chunk)
    bounds = [min(vocab, chunks * i // shards * chunk) for i in range(shards + 1)]
    top = logits.amax(-1)
    sums = [chunk_sums(logits[:, a:b], top, chunk)
            for a, b in itertools.pairwise(bounds) if a < b]
    chosen = logits.gather(1, targets[:, None])[:, 0]
    logprobs, lse = logprobs_from_sums(chosen, top, torch.cat(sums, 1))
    assert torch.equal(logprobs, token_logprobs(logits, targets))
    torch.testing.assert_close(lse.double(), logits.double().logsumexp(-1), atol=1e-6, rtol=1e-6)


def test_the_gradient_of_a_shard_is_its_columns(side: str) -> None:
    torch.manual_seed(0)
    logits, targets, grad = torch.randn(5, 40), torch.tensor([0, 9, 10, 25, 39]), torch.randn(5)
    lse = logits.logsumexp(-1)
    whole = logprob_grad(logits, lse, targets, grad, torch.empty_like(logits))
    want = (torch.nn.functional.one_hot(targets, 40) - logits.double().softmax(-1)) * grad[:, None]
    torch.testing.assert_close(whole.double(), want, atol=1e-6, rtol=1e-5)
    for a, b in ((0, 10), (10, 26), (26, 40)):
        part = logits[:, a:b].clone()
        assert logprob_grad(part, lse, targets - a, grad, part) is part
        assert torch.equal(part, whole[:, a:b])


def test_logits_overwritten_by_their_gradient_are_missed_by_autograd(side: str) -> None:
    logits, targets = torch.randn(2, 8, requires_grad=True), torch.tensor([0, 1])
    kept = logits * 1.0
    out = token_logprobs(kept, targets) + kept.square().sum(-1)
    plain = kept.detach()
    logprob_grad(plain, plain.logsumexp(-1), targets, torch.ones(2), plain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("threads", [1, 2])
def test_every_instruction_set(monkeypatch: pytest.MonkeyPatch, isa: str, threads: int) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 9001) * 10, torch.randint(9001, (5,))
    use_library(monkeypatch, runnable_isas()[0])
    want = log_softmax(logits), token_logprobs(logits, targets), argmax(logits)
    use_library(monkeypatch, isa, threads)
    got = log_softmax(logits), token_logprobs(logits, targets), argmax(logits)
    assert all(map(torch.equal, got, want))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from((-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan)),
                min_size=1, max_size=40), st.integers(0, 2))
def test_argmax_is_torchs(row: list[float], chunks_before: int) -> None:
    logits = torch.tensor([[-2.0] * (4096 * chunks_before - 5) + row])
    assert torch.equal(argmax(logits), logits.argmax(-1))


def test_argmax_in_pure_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: False)
    test_argmax_is_torchs()


def test_masked_logits(side: str) -> None:
    """-inf marks a token that cannot be drawn."""
    logits = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf, -math.inf, 3.0]])
    torch.testing.assert_close(log_softmax(logits), torch.log_softmax(logits, -1))
    assert token_logprobs(logits, torch.tensor([1, 0])).tolist() == [-math.inf, -math.inf]


def test_gradients(side: str) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 50), torch.randint(50, (6,))
    for fn, exact in (
        (log_softmax, lambda x: torch.log_softmax(x, -1)),
        (lambda x: token_logprobs(x, targets),
         lambda x: torch.log_softmax(x, -1).gather(1, targets[:, None])[:, 0]),
    ):
        leaf = logits.clone().requires_grad_()
        wide = logits.double().requires_grad_()
        out = fn(leaf)
        assert torch.equal(out, fn(logits))
        weight = torch.randn_like(out)
        (out * weight).sum().backward()
        (exact(wide) * weight).sum().backward()
        assert leaf.grad is not None and wide.grad is not None
        torch.testing.assert_close(leaf.grad.double(), wide.grad, atol=1e-5, rtol=1e-5)


def test_operators_are_well_behaved() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(module._log_softmax_op, (logits,))
    torch.library.opcheck(module._token_logprobs_op, (logits, torch.tensor([1, 2, 3])))
    torch.library.opcheck(module._argmax_op, (logits.detach(),))
    torch.library.opcheck(module._chunk_sums_op, (logits.detach(), torch.ones(3), 2))
    torch.library.opcheck(module._from_sums_op, (torch.ones(3), torch.ones(3), torch.ones(3, 2)))
    with FakeTensorMode():
        fake = torch.empty(3, 8)
        assert log_softmax(fake).shape == (3, 8)
        assert token_logprobs(fake, torch.empty(3, dtype=torch.int64)).shape == (3,)
        assert argmax(fake).dtype == torch.int64
        assert chunk_sums(fake, torch.empty(3), 1).shape == (3, 8)
        out, lse = logprobs_from_sums(torch.empty(3), torch.empty(3), torch.empty(3, 2))
        assert out.shape == lse.shape == (3,)


def test_no_rows(side: str) -> None:
    empty = torch.empty(0, 8)
    assert log_softmax(empty).shape == (0, 8)
    assert token_logprobs(empty, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert argmax(empty).shape == (0,)


def test_errors(side: str) -> None:
    logits = torch.randn(2, 8)
    for bad in (-1, 8):
        with pytest.raises(ValueError, match="target"):
            token_logprobs(logits, torch.tensor([0, bad]))
    with pytest.raises(ValueError, match="int64 targets"):
        token_logprobs(logits, torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="float32"):
        log_softmax(logits.double())
    with pytest.raises(ValueError, match="V > 0"):
        argmax(torch.empty(2, 0))
    with pytest.raises(ValueError, match="power of two"):
        chunk_sums(logits, torch.zeros(2), 3)
    with pytest.raises(ValueError, match="contiguous float32 tops"):
        chunk_sums(logits, torch.zeros(3), 4)
    with pytest.raises(ValueError, match="the sums are"):
        logprobs_from_sums(torch.zeros(2), torch.zeros(2), torch.zeros(3, 4))
