"""RMS norm: values against the formula, the bits of a row alone, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import norm as module
from kilter.ops.norm import rms_norm
from tests.ops import runnable_isas, use_library

EPS = 1e-5


def expected(x: Tensor, weight: Tensor, zero_centred: bool, residual: Tensor | None) -> Tensor:
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y * (1 + weight.double() if zero_centred else weight.double())
    return y if residual is None else residual.double() + y


@pytest.mark.parametrize("dim", [1, 7, 16, 64, 100, 576, 1000])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_values(side: str, dim: int, zero_centred: bool, with_residual: bool) -> None:
    torch.manual_seed(dim)
    x, weight, residual = torch.randn(5, dim) * 3, torch.randn(dim), torch.randn(5, dim)
    got = rms_norm(x, weight, EPS, zero_centred, residual if with_residual else None)
    want = expected(x, weight, zero_centred, residual if with_residual else None)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_a_row_alone_has_the_same_bits(dim: int, rows: int, data: st.DataObject) -> None:
    x, weight = torch.randn(rows, dim), torch.randn(dim)
    i = data.draw(st.integers(0, rows - 1))
    batch = rms_norm(x, weight, EPS)
    assert torch.equal(rms_norm(x[i:i + 1].clone(), weight, EPS), batch[i:i + 1])
    x[:i] = torch.nan
    assert torch.equal(rms_norm(x, weight, EPS)[i:], batch[i:])


def test_pure_torch_rows_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: False)
    test_a_row_alone_has_the_same_bits()


def test_rows_may_be_strided(side: str) -> None:
    wide, weight = torch.randn(6, 300), torch.randn(100)
    x = wide[:, 100:200]
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x.contiguous(), weight, EPS))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("threads", [1, 2])
def test_every_instruction_set(monkeypatch: pytest.MonkeyPatch, isa: str, threads: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 213), torch.randn(213)
    use_library(monkeypatch, runnable_isas()[0])
    want = rms_norm(x, weight, EPS, True, x)
    use_library(monkeypatch, isa, threads)
    assert torch.equal(rms_norm(x, weight, EPS, True, x), want)


@pytest.mark.parametrize("zero_centred", [False, True])
def test_gradients(side: str, zero_centred: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(4, 37), torch.randn(37), torch.randn(4, 37)]
    plain = rms_norm(leaves[0], leaves[1], EPS, zero_centred, leaves[2])
    exact = [x.double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    out = rms_norm(leaves[0], leaves[1], EPS, zero_centred, leaves[2])
    assert torch.equal(out, plain)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected(exact[0], exact[1], zero_centred, exact[2]) * weight).sum().backward()
    for got, want in zip(leaves, exact, strict=True):
        assert got.grad is not None and want.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-5, rtol=1e-5)


def test_operator_is_well_behaved() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.library.opcheck(module._rms_norm_op, (x, weight, EPS, True, x.detach()))
    with FakeTensorMode():
        assert rms_norm(torch.empty(3, 8), torch.empty(8), EPS).shape == (3, 8)
    assert rms_norm(torch.empty(2, 8, device="meta"), torch.empty(8, device="meta"),
                    EPS).is_meta


def test_no_rows(side: str) -> None:
    assert rms_norm(torch.empty(0, 8), torch.empty(8), EPS).shape == (0, 8)


def test_errors() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    for args, words in (
        ((x, torch.randn(7)), r"x \[T, D\]"),
        ((x.double(), weight), "float32"),
        ((torch.randn(8, 3).T, weight), "contiguous"),
        ((x[0], weight), r"x \[T, D\]"),
    ):
        with pytest.raises(ValueError, match=words):
            rms_norm(*args, EPS)
