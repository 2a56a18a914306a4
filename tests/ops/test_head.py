"""The head in blocks of tokens: the bits of the separate ops, and the gradients of a dense head."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import exact_ops, stock_ops
from kilter.ops import head as module
from kilter.ops.head import head_logprobs, head_loss
from kilter.ops.linear import linear
from kilter.ops.logprob import token_logprobs
from kilter.ops.packed import pack


def case(tokens: int, dim: int = 24, vocab: int = 131,
         dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + vocab)
    return (torch.randn(tokens, dim, requires_grad=True),
            torch.randn(vocab, dim).to(dtype).requires_grad_(), torch.randint(vocab, (tokens,)),
            torch.rand(tokens))


def dense(x: Tensor, weight: Tensor, targets: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities and the gradients of their weighted sum, in float64."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    out = (x @ weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return out, *torch.autograd.grad(out, (x, weight), grad.double())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 150), st.one_of(st.none(), st.integers(1, 50)))
def test_blocks_change_neither_bits_nor_gradients(tokens: int, vocab: int,
                                                  block: int | None) -> None:
    x, weight, targets, grad = case(tokens, vocab=vocab)
    out = head_logprobs(x, weight, targets, block=block)
    with torch.no_grad():
        assert torch.equal(out, token_logprobs(linear(x, weight), targets))
        assert torch.equal(out, head_logprobs(x, weight, targets, block=block))
    loss, logprobs = head_loss(x, weight, targets, grad, block=block)
    assert torch.equal(logprobs, out) and not logprobs.requires_grad
    want, *want_grads = dense(x, weight, targets, grad)
    torch.testing.assert_close(loss.double(), -(want * grad).sum(), atol=1e-4, rtol=1e-5)
    for got, factor in (
            (torch.autograd.grad(out, (x, weight), grad, retain_graph=True), 1),
            (torch.autograd.grad(out, (x, weight), 3 * grad), 3),
            (torch.autograd.grad(loss, (x, weight), torch.tensor(-2.0)), 2)):
        for a, b in zip(got, want_grads, strict=True):
            torch.testing.assert_close(a.double(), factor * b, atol=1e-4, rtol=1e-4)


def test_the_gradient_is_the_same_bits_every_time() -> None:
    x, weight, targets, grad = case(50)
    runs = []
    for _ in range(3):
        out = head_logprobs(x, weight, targets, block=20)
        runs.append((*torch.autograd.grad(out, (x, weight), grad),
                     *torch.autograd.grad(head_loss(x, weight, targets, grad, block=20)[0],
                                          (x, weight))))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize("op", ["logprobs", "loss"])
def test_a_gradient_that_nobody_wants_is_not_made(op: str) -> None:
    x, weight, targets, grad = case(9)
    for wanted, other in ((x, weight.detach()), (weight, x.detach())):
        args = (wanted, other) if wanted is x else (other, wanted)
        loss = ((head_logprobs(*args, targets) * -grad).sum() if op == "logprobs"
                else head_loss(*args, targets, grad)[0])
        (got,) = torch.autograd.grad(loss, wanted)
        want = -dense(x, weight, targets, grad)[1 if wanted is x else 2]
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_narrow_and_packed_weights() -> None:
    x, weight, targets, grad = case(9, dtype=torch.bfloat16)
    got = torch.autograd.grad(head_logprobs(x, weight, targets), (x, weight), grad)
    want = dense(x, weight, targets, grad)[1:]
    assert got[1].dtype == torch.bfloat16
    torch.testing.assert_close(got[0].double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-2, rtol=1e-2)
    packed = pack(weight.detach())
    assert torch.equal(head_logprobs(x, packed, targets), head_logprobs(x, weight, targets))
    (dx,) = torch.autograd.grad(head_logprobs(x, packed, targets), x, grad)
    torch.testing.assert_close(dx.double(), want[0], atol=1e-5, rtol=1e-5)


def test_a_token_that_does_not_count_may_be_impossible() -> None:
    x, weight, targets, _ = case(3)
    counts = torch.tensor([0.5, 0.0, 0.5])
    with torch.no_grad():
        x[1] = weight[0] * 1e4
        targets[1] = int((x[1] @ weight.t()).argmin())
    loss, _ = head_loss(x, weight, targets, counts)
    loss.backward()
    assert math.isfinite(loss.item()) and x.grad is not None and weight.grad is not None
    assert x.grad[1].eq(0).all() and weight.grad.isfinite().all()


def test_a_loss_hands_its_gradient_over_once() -> None:
    x, weight, targets, grad = case(3)
    loss, _ = head_loss(x, weight, targets, grad)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed over already"):
        loss.backward()


def test_no_tokens() -> None:
    x, weight, targets, grad = case(0)
    assert head_logprobs(x, weight, targets).shape == (0,)
    loss, _ = head_loss(x, weight, targets, grad)
    loss.backward()
    assert loss.item() == 0.0 and weight.grad is not None
    assert weight.grad.shape == weight.shape and weight.grad.eq(0).all()


def test_the_stock_head_is_close() -> None:
    x, weight, targets, grad = case(30)
    exact, stock = (ops().head_logprobs(x, weight, targets) for ops in (exact_ops, stock_ops))
    torch.testing.assert_close(exact, stock, atol=1e-5, rtol=1e-5)
    losses = [ops().head_loss(x, weight, targets, grad)[0] for ops in (exact_ops, stock_ops)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)


def test_operators_are_well_behaved() -> None:
    x, weight, targets, grad = case(5)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(module._head_logprobs_op, (x, weight, targets, 2, True, []),
                          test_utils=utils)
    torch.library.opcheck(module._head_loss_op,
                          (x, weight, targets, grad, 2, True, True, True), test_utils=utils)
    with FakeTensorMode():
        x, weight = torch.empty(5, 8, requires_grad=True), torch.empty(20, 8, requires_grad=True)
        targets = torch.empty(5, dtype=torch.int64)
        head_logprobs(x, weight, targets).sum().backward()
        assert weight.grad is not None and weight.grad.shape == (20, 8)
        loss, logprobs = head_loss(x, weight, targets, torch.empty(5))
        loss.backward()
        assert loss.shape == () and logprobs.shape == (5,)


def test_errors() -> None:
    x, weight, targets, grad = case(3)
    for args, words in (((x[:, :5], weight, targets), r"x \[T, D\] and a weight \[V, D\]"),
                        ((x, weight, targets[:2]), "int64 targets")):
        with pytest.raises(ValueError, match=words):
            head_logprobs(*args)
    with pytest.raises(ValueError, match="the block must"):
        head_logprobs(x, weight, targets, block=0)
    with pytest.raises(ValueError, match="float32 counts"):
        head_loss(x, weight, targets, grad.double())
    with pytest.raises(ValueError, match="outside the vocabulary"):
        head_logprobs(x, weight, torch.tensor([0, 1, 131]))
