"""Products of bf16 numbers: one chain written out, on every instruction set, for every storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kilter.ops import linear as module
from kilter.ops.activation import gated_activation
from kilter.ops.head import head_logprobs, head_loss
from kilter.ops.linear import gated_linear, linear, tree_add, weight_grad
from kilter.ops.packed import PackedWeight, pack
from tests.ops import runnable_isas, use_library

# tokens, outputs, K, splits: few rows and many, whole panels and not, odd K and parts
SHAPES = [(1, 40, 64, 1), (5, 64, 192, 3), (13, 48, 96, 1), (30, 80, 130, 2), (200, 100, 256, 8),
          (7, 16, 31, 1), (9, 50, 75, 5), (100, 64, 33, 1)]


def chain(x_TK: Tensor, weight_NK: Tensor, splits: int) -> Tensor:
    """The definition: factors in bf16, the odd k of each pair first, one rounding a step. Exact in
    double for the numbers of `numbers`."""
    x_TK, weight_NK = x_TK.bfloat16().double(), weight_NK.bfloat16().double()
    size = x_TK.shape[1] // splits
    parts = []
    for start in range(0, x_TK.shape[1], size):
        y_TN = torch.zeros(len(x_TK), len(weight_NK))
        for even in range(start, start + size, 2):
            for k in (even + 1, even) if even + 1 < start + size else (even,):
                y_TN = (y_TN.double() + x_TK[:, k, None] * weight_NK[:, k]).float()
        parts.append(y_TN)
    return tree_add(parts)


def numbers(*shape: int) -> Tensor:
    """Of 12 bits, so that rounding to bf16's 8 shows, and sums of products fit in a double."""
    return torch.randint(-2048, 2048, shape) / 512


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_chain_written_out(shape: tuple[int, int, int, int],
                               monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tokens, outputs, k, splits = shape
    x_TK, weight, bias = numbers(tokens, k), numbers(outputs, k), numbers(outputs)
    residual = numbers(tokens, outputs)
    weights: list[Tensor | PackedWeight] = [weight, weight.t().contiguous().t(), weight.bfloat16(),
                                            *(pack(weight, s) for s in ("fp32", "bf16", "fp16"))]
    if k % 32 == 0:
        weights += [pack(weight, "int8"), pack(weight, "int4")]
    for each in weights:
        dense = each.float() if isinstance(each, Tensor) else each.dequantize()
        expected = residual + (chain(x_TK, dense, splits) + bias)
        for isa in runnable_isas():
            use_library(monkeypatch, isa, threads=2)
            got = linear(x_TK, each, bias, residual, splits=splits, products="bf16")
            assert torch.equal(got, expected), (isa, each)
            few = linear(x_TK[-1:], each, bias, residual[-1:], splits=splits, products="bf16")
            assert torch.equal(few, expected[-1:]), (isa, each)
            half = linear(x_TK.bfloat16(), each, bias, residual, splits=splits, products="bf16")
            assert torch.equal(half, expected), (isa, each)


@pytest.mark.parametrize("isa", runnable_isas())
def test_gated(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch, isa)
    x_TK, weight = torch.randn(19, 48), torch.randn(64, 48)
    for each in (weight, pack(weight, "bf16", gated=True)):
        both = gated_linear(x_TK, each, None, "silu", products="bf16")
        y_TN = linear(x_TK, weight, products="bf16")
        if not isinstance(each, Tensor):
            y_TN = linear(x_TK, each.dequantize(), products="bf16")
        assert torch.equal(both, gated_activation(y_TN, "silu"))


def test_tiny_numbers_are_zero_on_every_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TK = torch.tensor([[1e-39, 2.0, 1e-20, 3e-20, 1.0, -1e-39]])
    weight = torch.tensor([[1e30, 1e-39, 1e-20, 1e-20, 1.5e-38, 1e38]])
    for isa in runnable_isas():
        if isa == "generic":  # the compiler's own arithmetic: all of fp32
            continue
        use_library(monkeypatch, isa)
        for each in (weight, pack(weight, "fp32")):
            got = linear(x_TK, each, products="bf16")
            assert got.item() == weight[0, 4].bfloat16().item(), isa


@pytest.mark.usefixtures("side")
def test_gradients_are_products_of_rounded_numbers() -> None:
    torch.manual_seed(1)
    x_TK, weight, dy_TN = torch.randn(37, 96), torch.randn(50, 96), torch.randn(37, 50)
    x_TK.requires_grad_()
    weight.requires_grad_()
    linear(x_TK, weight, products="bf16").backward(dy_TN)

    def rounded(x: Tensor) -> Tensor:
        return x.detach().bfloat16().float()

    assert x_TK.grad is not None and weight.grad is not None
    torch.testing.assert_close(x_TK.grad, rounded(dy_TN) @ rounded(weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, rounded(dy_TN).t() @ rounded(x_TK), rtol=1e-5,
                               atol=1e-5)
    # What a pipeline makes later is the same.
    assert torch.equal(weight.grad, weight_grad(x_TK.detach().bfloat16(), dy_TN))


def test_the_head() -> None:
    torch.manual_seed(2)
    x_TD, weight = torch.randn(23, 64), torch.randn(90, 64, requires_grad=True)
    x_TD.requires_grad_()
    targets_T, counts_T = torch.randint(90, (23,)), torch.rand(23)
    logits_TV = linear(x_TD, weight, products="bf16")
    logprobs_T = torch.log_softmax(logits_TV, -1).gather(1, targets_T[:, None])[:, 0]
    (-(logprobs_T * counts_T).sum()).backward()
    expected = x_TD.grad, weight.grad
    for block in (7, 100):
        x_TD.grad = weight.grad = None
        got_T = head_logprobs(x_TD, weight, targets_T, block=block, products="bf16")
        torch.testing.assert_close(got_T, logprobs_T, rtol=1e-5, atol=1e-5)
        (-(got_T * counts_T).sum()).backward()
        for got, want in zip((x_TD.grad, weight.grad), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-3)
        x_TD.grad = weight.grad = None
        loss, beside_T = head_loss(x_TD, weight, targets_T, counts_T, block=block, products="bf16")
        assert torch.equal(beside_T, got_T)
        loss.backward()
        for got, want in zip((x_TD.grad, weight.grad), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-3)


def test_what_it_refuses() -> None:
    x_TK, weight = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match="products is 'fp8'; it must be one"):
        linear(x_TK, weight, products="fp8")
    with pytest.raises(ValueError, match=r"x is torch.bfloat16; it must be torch.float32"):
        linear(x_TK.bfloat16(), weight)
    with pytest.raises(ValueError, match=r"x is torch.float16"):
        linear(x_TK.half(), weight, products="bf16")
    assert module.PRODUCTS == ("fp32", "bf16")
