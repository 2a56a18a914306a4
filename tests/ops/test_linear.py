"""The linear kernels: one order of summation, whatever is around a row."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import linear as module
from kilter.ops.activation import gated_activation
from kilter.ops.cpu.tape import Tape
from kilter.ops.linear import (
    gated_linear,
    linear,
    linear_grad_input,
    tree_add,
    tree_shares,
)
from kilter.ops.packed import PackedWeight, pack
from tests.ops import runnable_isas, use_library
from tests.ops.test_packed import KINDS, quantised

STORAGES = ["fp32", "bf16", "fp16", "int8", "int4"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def fma_chain(x: Tensor, w: Tensor) -> float:
    """Sum of x[k] * w[k] in order of k, each step rounded once to fp32, by exact rationals."""
    total = 0.0
    for a, b in zip(x.tolist(), w.tolist(), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(total)
        total = torch.tensor(float(exact), dtype=torch.float64).float().item()
    return total


def test_the_order_of_summation_is_one_fma_chain_then_bias_then_residual() -> None:
    x, weight = torch.randn(3, 70), torch.randn(20, 70)
    bias, residual = torch.randn(20), torch.randn(3, 20)
    chain = torch.tensor([[fma_chain(row, w) for w in weight] for row in x])
    for w in (weight, pack(weight)):
        assert torch.equal(linear(x, w), chain)
        assert torch.equal(linear(x, w, bias), chain + bias)
        assert torch.equal(linear(x, w, bias, residual), residual + (chain + bias))
        assert torch.equal(linear(x, w, None, residual), residual + chain)


@pytest.mark.parametrize("splits", [2, 3, 6, 8])
@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8", "int4"])
def test_splits_are_chains_added_in_a_balanced_tree(splits: int, storage: str) -> None:
    k = 24 * 10  # parts that do not fall on groups of 32, and (for 3, 6) on words of 8
    x, packed = torch.randn(9, k), pack(torch.randn(35, k), storage)
    weight, part = packed.dequantize(), k // splits

    def tree(lo: int, hi: int) -> Tensor:
        if hi - lo == 1:
            return linear(x[:, lo * part:hi * part], weight[:, lo * part:hi * part])
        mid = (lo + hi + 1) // 2
        return tree(lo, mid) + tree(mid, hi)

    bias, residual = torch.randn(35), torch.randn(9, 35)
    assert torch.equal(linear(x, packed, bias, residual, splits=splits),
                       residual + (tree(0, splits) + bias))
    for rows in (1, 2, 5):
        assert torch.equal(linear(x[:rows], packed, splits=splits), tree(0, splits)[:rows])


@pytest.mark.parametrize("splits", range(1, 9))
@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8", "int4"])
def test_ranks_that_hold_subtrees_agree_with_one(splits: int, storage: str) -> None:
    """Cut K between ranks where the tree is cut, sum each side's parts, add the ranks' results."""
    x, weight = torch.randn(7, 32 * splits), torch.randn(18, 32 * splits)
    whole = linear(x, pack(weight, storage), splits=splits)
    for ranks in range(1, splits + 1):
        shares = tree_shares(splits, ranks)
        assert len(shares) == ranks and sum(shares) == splits and min(shares) > 0
        sides = [slice(32 * sum(shares[:r]), 32 * sum(shares[:r + 1])) for r in range(ranks)]
        parts = [linear(x[:, side], pack(weight[:, side], storage), splits=share)
                 for side, share in zip(sides, shares, strict=True)]
        assert torch.equal(tree_add(parts), whole), (splits, ranks)


def test_what_cannot_be_spread_is_refused() -> None:
    for splits, ranks in ((3, 4), (3, 0), (0, 1)):
        with pytest.raises(ValueError, match="cannot be spread"):
            tree_shares(splits, ranks)
    with pytest.raises(ValueError, match="nothing to add"):
        tree_add([])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 30), n=st.integers(1, 150), k=st.integers(0, 200),
       storage=st.sampled_from(STORAGES), with_bias=st.booleans(), transposed=st.booleans())
def test_any_shape_is_the_float64_product(rows: int, n: int, k: int, storage: str, with_bias: bool,
                                          transposed: bool) -> None:
    x, weight = torch.randn(rows, k), torch.randn(n, k)
    bias = torch.randn(n) if with_bias else None
    packed = pack(weight, storage)
    dense = packed.dequantize()
    y = linear(x, packed, bias)
    exact = x.double() @ dense.double().t() + (0 if bias is None else bias.double())
    assert y.shape == (rows, n)
    assert torch.allclose(y.double(), exact, rtol=0, atol=1e-6 * (k + 1))
    plain = dense.t().contiguous().t() if transposed else dense
    assert torch.equal(linear(x, plain, bias), y)


def weights(n: int, k: int) -> list[PackedWeight]:
    assert k % 32 == 0
    made = [pack(torch.randn(n, k), s) for s in STORAGES]
    return made + [pack(quantised(n, k // g, b, g, m, digits)) for b, g, m in KINDS
                   for digits in (11, 16)]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_everywhere(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each storage: every number of rows, place, thread count and instruction set gives the
    bits of the plain fp32 weight and one row."""
    x = torch.randn(40, 96)
    for packed in weights(150, 96):
        use_library(monkeypatch, runnable_isas()[0])
        dense = packed.dequantize()
        alone = torch.cat([linear(row[None], dense) for row in x])
        for isa in runnable_isas():
            use_library(monkeypatch, isa, threads)
            for rows in range(1, 41) if isa != "generic" else (1, 2, 3, 7, 20):
                start = (rows * 7) % (41 - rows)
                assert torch.equal(linear(x[start:start + rows], packed),
                                   alone[start:start + rows]), (packed.storage, isa, rows)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_and_strided_views_have_the_bits_of_few(weight: torch.dtype) -> None:
    wide = torch.randn(520, 3 * 320)
    x, w = wide[5:517, 320:640], torch.randn(200, 320).to(weight)
    y = linear(x, w)
    assert torch.equal(y, linear(x, pack(w)))
    for t in (0, 1, 170, 171, 511):
        assert torch.equal(linear(x[t:t + 1], pack(w))[0], y[t])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("splits", [1, 3])
def test_weights_larger_than_a_segment_have_the_bits_of_one_row(
        threads: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million weights are widened at a time where there are several blocks of rows."""
    use_library(monkeypatch, runnable_isas()[0], threads)
    x, bias = torch.randn(200, 1200), torch.randn(2 * 1013)
    residual = torch.randn(200, 2 * 1013)
    for weight in (torch.randn(2 * 1013, 1200), torch.randn(2 * 1013, 1200).bfloat16()):
        packed = pack(weight, "int8", gated=True)
        y = linear(x, weight, bias, residual, splits=splits)
        gated = gated_linear(x, weight, bias, splits=splits)
        quantised = gated_linear(x, packed, bias, splits=splits)
        for t in (0, 95, 96, 199):
            row = slice(t, t + 1)
            assert torch.equal(linear(x[row], pack(weight), bias, residual[row], splits=splits),
                               y[row])
            assert torch.equal(gated_linear(x[row], pack(weight, gated=True), bias, splits=splits),
                               gated[row])
            assert torch.equal(gated_linear(x[row], packed, bias, splits=splits), quantised[row])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [7, 32, 80, 100])
def test_the_gated_epilogue_has_the_bits_of_the_separate_op(activation: str, width: int) -> None:
    weight, bias = torch.randn(2 * width, 64), torch.randn(2 * width)
    for storage in STORAGES:
        packed = pack(weight, storage, gated=True)
        for rows in (0, 1, 2, 5, 30):
            x = torch.randn(rows, 64)
            for b in (None, bias):
                both = linear(x, packed, b)
                assert torch.equal(both, linear(x, packed.dequantize(), b))
                expected = gated_activation(both, activation)
                assert torch.equal(gated_linear(x, packed, b, activation), expected)
                assert torch.equal(gated_linear(x, packed.dequantize(), b, activation), expected)
                assert torch.equal(gated_linear(x, packed, b, activation, splits=4),
                                   gated_activation(linear(x, packed, b, splits=4), activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_torchs_and_the_forward_keeps_its_bits(dtype: torch.dtype) -> None:
    x = torch.randn(9, 48, requires_grad=True)
    weight = torch.randn(40, 48).to(dtype).requires_grad_()
    bias = torch.randn(40, requires_grad=True)
    residual = torch.randn(9, 40, requires_grad=True)
    leaves = (x, weight, bias, residual)
    y = linear(x, weight, bias, residual)
    with torch.no_grad():
        assert torch.equal(y, linear(x, weight, bias, residual))
        assert torch.equal(y, linear(x, pack(weight), bias, residual))
    cotangent = torch.randn(9, 40)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    (exact[0] @ exact[1].t() + exact[2] + exact[3]).backward(cotangent.double())
    y.backward(cotangent)
    for leaf, truth in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and truth.grad is not None and leaf.grad.dtype == leaf.dtype
        assert torch.allclose(leaf.grad.double(), truth.grad, atol=1e-4,
                              rtol=1e-2 if leaf.dtype == torch.bfloat16 else 1e-5)
    again = torch.autograd.grad(linear(x, weight, bias, residual), leaves, cotangent)
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, again, strict=True)
               if leaf.grad is not None)


def test_a_row_of_linear_grad_input_has_the_same_bits_everywhere() -> None:
    for weight in (torch.randn(40, 48), torch.randn(40, 48).bfloat16()):
        dy = torch.randn(300, 40)
        dx = linear_grad_input(dy, weight)
        assert torch.allclose(dx.double(), dy.double() @ weight.double(), atol=1e-4)
        assert torch.equal(dx, linear_grad_input(dy, pack(weight)))
        for t in (0, 95, 96, 299):
            assert torch.equal(dx[t:t + 1], linear_grad_input(dy[t:t + 1], weight))


def test_a_gradient_flows_through_packed_weights_and_gates() -> None:
    packed = pack(torch.randn(64, 96), "int4")
    x = torch.randn(5, 96, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    gate, up = (exact @ packed.dequantize().double().t()).chunk(2, dim=-1)
    (torch.nn.functional.silu(gate) * up).sum().backward()
    gated_linear(x, packed).sum().backward()
    assert x.grad is not None and exact.grad is not None
    assert torch.allclose(x.grad.double(), exact.grad, atol=1e-3, rtol=1e-4)


def test_the_operator_keeps_torchs_contract() -> None:
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(10, 32, requires_grad=True)
    torch.library.opcheck(torch.ops.kilter.linear.default,
                          (x, weight, torch.randn(10), torch.randn(4, 10), 2, []))
    torch.library.opcheck(torch.ops.kilter.linear.default,
                          (x, weight, torch.randn(10), torch.randn(4, 10), 2, [], True))
    packed = pack(weight, "int8")
    torch.library.opcheck(torch.ops.kilter.linear.default,
                          (x, packed.data, None, None, 1, packed.facts()))


def test_fake_tensors_know_the_shapes() -> None:
    packed = pack(torch.randn(64, 32), "int8")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight = torch.empty(7, 32), torch.empty(64, 32)
        residual = torch.empty(7, 64)
        assert linear(x, weight, None, residual).shape == (7, 64)
        assert linear(x, packed).shape == (7, 64)
        assert gated_linear(x, weight).shape == (7, 32)
    assert linear(torch.empty(7, 32, device="meta"), torch.empty(64, 32, device="meta")).is_meta


def test_without_a_compiler_torch_computes_the_same_within_rounding(
        monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(11, 96), torch.randn(64, 96), torch.randn(64)
    residual = torch.randn(11, 64)
    expected = [linear(x, weight, bias, residual, splits=s) for s in (1, 6)]
    gated = gated_linear(x, weight, bias, "gelu_tanh")
    monkeypatch.setattr(module, "available", lambda: False)
    for splits, y in zip((1, 6), expected, strict=True):
        assert torch.allclose(linear(x, weight, bias, residual, splits=splits), y, atol=1e-4)
    assert torch.allclose(gated_linear(x, weight, bias, "gelu_tanh"), gated, atol=1e-3)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_recorded_call_replays_on_new_numbers(splits: int) -> None:
    x, packed = torch.randn(2, 96), pack(torch.randn(20, 96), "bf16")
    tape = Tape()
    with tape.record():
        y = linear(x, packed, splits=splits)
    x.copy_(torch.randn(2, 96))
    tape.replay()
    assert torch.equal(y, linear(x, packed, splits=splits))


def test_errors_say_everything_that_is_wrong() -> None:
    weight = torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\).*needs \[T, 4\].*bias is"):
        linear(torch.randn(2, 5), weight, torch.randn(4))
    with pytest.raises(ValueError, match="x is torch"):
        linear(torch.randn(2, 4).double(), weight)
    with pytest.raises(ValueError, match="not contiguous"):
        linear(torch.randn(4, 2).t(), weight)
    with pytest.raises(ValueError, match="residual is"):
        linear(torch.randn(2, 4), weight, None, torch.randn(2, 5))
    with pytest.raises(ValueError, match="K = 4 cannot be cut in 3 equal parts"):
        linear(torch.randn(2, 4), weight, splits=3)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        gated_linear(torch.randn(2, 4), weight, None, "relu")
    with pytest.raises(ValueError, match="odd"):
        gated_linear(torch.randn(2, 4), torch.randn(5, 4))
    with pytest.raises(ValueError, match="pack it with gated=True"):
        gated_linear(torch.randn(2, 4), pack(weight))
