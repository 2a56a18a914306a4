"""The pure-torch ops: their building blocks, and matrix products whose rows do not know their
neighbours. (The other ops are held to their kernels' tests, in the tests of each op.)"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.ops import reference
from kilter.ops.cpu import library
from kilter.ops.packed import pack


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(0, 400))
def test_a_tree_sum_does_not_know_its_padding(n: int, more: int) -> None:
    x = torch.randn(7, n)
    total = reference.tree_sum(x)
    torch.testing.assert_close(total.double(), x.double().sum(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(reference.tree_sum(F.pad(x, (0, more), value=-0.0)), total)
    assert torch.equal(reference.tree_sum(x[3:4].clone())[0], total[3])


def test_a_sum_of_negative_zeros_keeps_its_sign() -> None:
    assert math.copysign(1.0, reference.tree_sum(torch.full((3,), -0.0)).item()) == -1.0


def test_exp() -> None:
    x = torch.cat((torch.linspace(-700, 700, 4001, dtype=torch.float64), torch.randn(1000) * 3))
    want = torch.tensor([math.exp(v) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(reference.exp(x), want, atol=0, rtol=2e-15)
    edge = reference.exp(torch.tensor([-math.inf, -1e30, math.inf, math.nan, 0.0])).float()
    assert edge[:3].tolist() == [0.0, 0.0, math.inf]
    assert edge[3].isnan() and edge[4] == 1.0


@pytest.mark.parametrize(("features", "outputs"), [(576, 192), (64, 1), (37, 51), (1536, 576),
                                                   (3, 700)])
def test_a_row_of_a_linear_has_the_same_bits_anywhere(threads: int, features: int,
                                                      outputs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, features), torch.randn(outputs, features)
    bias = torch.randn(outputs)
    whole = reference.linear(x, weight, bias)
    torch.testing.assert_close(whole.double(), F.linear(x.double(), weight.double(), bias.double()),
                               atol=1e-4, rtol=1e-4)
    for start, end in ((0, 1), (5, 6), (36, 37), (1, 3), (2, 9), (3, 20), (9, 37)):
        assert torch.equal(reference.linear(x[start:end], weight, bias), whole[start:end])
    back = reference.linear(whole, weight.T)
    assert torch.equal(reference.linear(whole[7:8], weight.T)[0], back[7])
    x[10] = math.nan
    assert torch.equal(reference.linear(x, weight, bias)[11:], whole[11:])


@pytest.mark.skipif(not library.available(), reason="packing needs the compiler")
def test_packed_weights() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64), torch.randn(48, 64).bfloat16()
    packed = pack(weight)
    assert torch.equal(reference.linear(x, packed), reference.linear(x, weight.float()))
    tokens = torch.tensor([3, 47, 0])
    assert torch.equal(reference.embed(tokens, packed, 2.0), weight.float()[tokens] * 2.0)
    assert torch.equal(reference.gated_linear(x, packed, None, "silu"),
                       reference.gated_activation(reference.linear(x, weight.float()), "silu"))


def test_embed_refuses_what_is_no_token() -> None:
    with pytest.raises(ValueError, match=r"token id is out of range: -1, .* from 0 to 4"):
        reference.embed(torch.tensor([1, -1]), torch.randn(5, 2))
