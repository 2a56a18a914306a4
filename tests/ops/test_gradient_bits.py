"""The kernels of the backward pass: the same bits on every instruction set, whatever the threads,
and in every repetition. (Their values are held to float64 in the tests of each op.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kilter.ops.activation import ACTIVATIONS, gated_activation
from kilter.ops.attention import attention
from kilter.ops.cpu import library
from kilter.ops.logprob import token_logprobs
from kilter.ops.norm import rms_norm
from kilter.ops.rope import rope_qkv
from tests.ops import runnable_isas, use_library

pytestmark = pytest.mark.skipif(not library.available(), reason="no compiler")


def gradients(fn: Callable[..., Tensor | tuple[Tensor, ...]], *shapes: tuple[int, ...]
              ) -> list[Tensor]:
    """Of a fixed weighting of fn's results by its arguments, random tensors of these shapes."""
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = fn(*leaves)
    outputs = (out,) if isinstance(out, Tensor) else out
    return list(torch.autograd.grad(outputs, leaves, [torch.randn(x.shape) for x in outputs]))


def everything() -> list[Tensor]:
    ints = torch.tensor([0, 130, 131, 400], dtype=torch.int32)
    angles = torch.outer(torch.arange(200.0), torch.linspace(0.1, 1.0, 10))
    positions = torch.arange(100, dtype=torch.int32)
    found = []
    for window in (None, 70):
        found += gradients(lambda q, k, v, window=window: attention(
            q, k, v, ints, scale=0.3, window=window), (400, 6, 20), (400, 2, 20), (400, 2, 20))
    found += gradients(lambda x, w: rms_norm(x, w, 1e-5, True), (200, 37), (37,))
    found += gradients(lambda qkv, a, b: rope_qkv(qkv, positions, angles.cos(), angles.sin(),
                                                  q_norm=a, k_norm=b),
                       (100, 2, 5, 20), (20,), (20,))
    for name in ACTIVATIONS:
        found += gradients(lambda x, name=name: gated_activation(x, name), (50, 2 * 45))
    found += gradients(lambda x: token_logprobs(x, torch.arange(7)), (7, 5003))
    return found


@pytest.mark.parametrize("isa", runnable_isas())
def test_every_instruction_set_and_thread_count(monkeypatch: pytest.MonkeyPatch,
                                                isa: str) -> None:
    use_library(monkeypatch, runnable_isas()[0])
    want = everything()
    for threads in (1, 2, 5):
        use_library(monkeypatch, isa, threads)
        assert all(map(torch.equal, everything(), want))
