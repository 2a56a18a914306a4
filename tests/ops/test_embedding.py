"""Embedding rows are exact, and a wrong token id touches nothing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import embedding as module
from kilter.ops.embedding import embed
from kilter.ops.packed import pack
from tests.ops import runnable_isas, use_library


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("shape", [(50, 24), (16, 300), (1, 1)])
def test_rows_are_the_weights_times_the_scale(storage: str, shape: tuple[int, int],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.randn(shape), storage)
    table = packed.dequantize()
    tokens = torch.randint(0, shape[0], (33,))
    for isa in runnable_isas():
        use_library(monkeypatch, isa, threads=2)
        for scale in (1.0, 33.94112549695428):
            expected = table[tokens] * scale
            assert torch.equal(embed(tokens, packed, scale), expected)
            assert torch.equal(embed(tokens, table, scale), expected)
    assert embed(tokens[:0], packed).shape == (0, shape[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_plain_table_of_two_bytes_is_widened(dtype: torch.dtype) -> None:
    table = torch.randn(300, 500).to(dtype)
    tokens = torch.randint(0, 300, (200,))  # enough for several threads
    assert torch.equal(embed(tokens, table, 0.3), table[tokens].float() * 0.3)
    assert torch.equal(embed(tokens, table.t().contiguous().t()), table[tokens].float())


@pytest.mark.parametrize("bad", [-1, 50, 1 << 62])
def test_an_unknown_id_is_named(bad: int) -> None:
    table = torch.randn(50, 8)
    for weight in (table, pack(table)):
        with pytest.raises(ValueError, match=rf"{bad} \(place 1\).*50 tokens"):
            embed(torch.tensor([0, bad, 3]), weight)


def test_gradient_is_torchs() -> None:
    table = torch.randn(20, 6, requires_grad=True)
    tokens = torch.tensor([3, 3, 19, 0, 3])
    cotangent = torch.randn(5, 6)
    embed(tokens, table, 2.5).backward(cotangent)
    other = table.detach().clone().requires_grad_()
    (torch.nn.functional.embedding(tokens, other) * 2.5).backward(cotangent)
    assert table.grad is not None and other.grad is not None
    assert torch.allclose(table.grad, other.grad, atol=1e-6)


def test_fake_tensors_and_the_operators_contract() -> None:
    packed = pack(torch.randn(20, 6), "bf16")
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens = torch.zeros(5, dtype=torch.int64)
        assert embed(tokens, torch.empty(20, 6)).shape == (5, 6)
        assert embed(tokens, packed).shape == (5, 6)
    table = torch.randn(20, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.kilter.embed.default, (torch.tensor([1, 4]), table, 2.0, []))


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table, tokens = torch.randn(20, 6), torch.tensor([3, 19])
    monkeypatch.setattr(module, "available", lambda: False)
    assert torch.equal(embed(tokens, table, 2.0), table[tokens] * 2.0)
    with pytest.raises(ValueError, match="20"):
        embed(torch.tensor([20]), table)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="int64 tokens"):
        embed(torch.zeros(2, 2, dtype=torch.int64), torch.randn(4, 4))
    with pytest.raises(ValueError, match="int64 tokens"):
        embed(torch.zeros(2, dtype=torch.int32), torch.randn(4, 4))
