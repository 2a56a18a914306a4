"""Gated activations: values against torch in float64, the bits of an element, gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import activation as module
from kilter.ops.activation import gated_activation
from tests.ops import runnable_isas, use_library


def expected(gate_up: Tensor, kind: str) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 15, 16, 37, 1536])
def test_values(side: str, kind: str, width: int) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(6, 2 * width) * 6
    got = gated_activation(gate_up, kind)
    torch.testing.assert_close(got.double(), expected(gate_up, kind), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_far_out(side: str, kind: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -100.0, -0.0, 0.0, 100.0, 1e4, math.nan])
    got = gated_activation(torch.cat((gate, torch.ones(8)))[None], kind)[0]
    torch.testing.assert_close(got, torch.tensor([0, 0, 0, 0, 0, 100, 1e4, math.nan]),
                               equal_nan=True, atol=1e-37, rtol=0)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_an_element_has_the_same_bits_anywhere(side: str, kind: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(61), torch.randn(61)
    row = gated_activation(torch.cat((gate, up))[None], kind)[0]
    for i in range(61):
        alone = gated_activation(torch.stack((gate[i], up[i]))[None], kind)
        assert torch.equal(alone[0, 0], row[i])
    many = torch.randn(300, 122)
    many[77] = torch.cat((gate, up))
    assert torch.equal(gated_activation(many, kind)[77], row)


def test_rows_may_be_strided(side: str) -> None:
    wide = torch.randn(5, 100)
    assert torch.equal(gated_activation(wide[:, 10:50], "silu"),
                       gated_activation(wide[:, 10:50].contiguous(), "silu"))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_every_instruction_set(monkeypatch: pytest.MonkeyPatch, isa: str, kind: str) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(50, 2 * 333) * 20
    use_library(monkeypatch, runnable_isas()[0])
    want = gated_activation(gate_up, kind)
    for threads in (1, 2):
        use_library(monkeypatch, isa, threads)
        assert torch.equal(gated_activation(gate_up, kind), want)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gradients(side: str, kind: str) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(4, 42) * 3).requires_grad_()
    exact = gate_up.detach().double().requires_grad_()
    out = gated_activation(gate_up, kind)
    assert torch.equal(out, gated_activation(gate_up.detach(), kind))
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected(exact, kind) * weight).sum().backward()
    assert gate_up.grad is not None and exact.grad is not None
    torch.testing.assert_close(gate_up.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_operator_is_well_behaved() -> None:
    torch.library.opcheck(module._gated_activation_op,
                          (torch.randn(3, 8, requires_grad=True), "silu"))
    with FakeTensorMode():
        assert gated_activation(torch.empty(3, 8), "gelu_tanh").shape == (3, 4)


def test_no_rows(side: str) -> None:
    assert gated_activation(torch.empty(0, 8), "silu").shape == (0, 4)


def test_errors() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="'relu'; it must be one of silu, gelu_tanh"):
        gated_activation(x, "relu")
    with pytest.raises(ValueError, match="2F"):
        gated_activation(torch.randn(3, 7), "silu")
    with pytest.raises(ValueError, match="float32"):
        gated_activation(x.double(), "silu")
    with pytest.raises(ValueError, match="contiguous"):
        gated_activation(torch.randn(8, 4).T, "silu")
