"""The two modules that own large matrices: `Linear` and `Embedding`.

Each holds its weight either as a parameter (training) or packed for inference; the op that uses
it takes both and gives the same bits for the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilter.ops import Ops
from kilter.ops.packed import PackedWeight


class Linear(nn.Module):
    """y = x W^T + bias, W [N, K]. ``gated`` marks a [gate; up] matrix used by `gated_linear`."""

    weight: Tensor | PackedWeight
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool, ops: Ops,
                 gated: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.ops = ops
        self.gated = gated
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None

    def use_packed(self, weight: PackedWeight) -> None:
        """Replaces the weight by a packed one (inference only)."""
        del self.weight
        self.weight = weight

    def forward(self, x_TK: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, N]; with ``residual`` [T, N], residual + y."""
        return self.ops.linear(x_TK, self.weight, self.bias, residual)

    def forward_gated(self, x_TK: Tensor, activation: str) -> Tensor:
        """[T, N/2]: activation(gate) * up."""
        return self.ops.gated_linear(x_TK, self.weight, self.bias, activation)


class Embedding(nn.Module):
    """Rows of a [V, D] matrix times a constant; also the output head when tied."""

    weight: Tensor | PackedWeight

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, ops: Ops,
                 dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.ops = ops
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype))

    def use_packed(self, weight: PackedWeight) -> None:
        """Replaces the weight by a packed one (inference only)."""
        del self.weight
        self.weight = weight

    def forward(self, tokens_T: Tensor) -> Tensor:
        """[T, D]. Raises ValueError for a token id outside the vocabulary."""
        return self.ops.embed(tokens_T, self.weight, self.scale)

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, V]: x times this matrix transposed (a tied head)."""
        return self.ops.linear(x_TD, self.weight, None, None)
