"""The two modules that own large matrices: `Linear` and `Embedding`.

Each holds its weight either as a parameter (training) or packed for inference; the op that uses
it takes both and gives the same bits for the same values.

Training reaches in at two places, both empty otherwise: a plain weight passes through the functions
in ``uses`` on its way into a product (rounding to a narrower format, sums of gradients over ranks),
and an ``adapter`` (LoRA) changes a product before the bias is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn

from kilter.ops import Ops
from kilter.ops.packed import PackedWeight

Use = Callable[[Tensor], Tensor]


class Linear(nn.Module):
    """y = x W^T + bias, W [N, K]. ``gated`` marks a [gate; up] matrix used by `gated_linear`;
    ``splits`` is into how many parts the sum over K is cut (see `kilter.ops.linear`)."""

    weight: Tensor | PackedWeight
    bias: Tensor | None
    uses: tuple[Use, ...] = ()
    bias_uses: tuple[Use, ...] = ()
    adapter: nn.Module | None  # (x_TK, y_TN) -> y_TN

    def __init__(self, in_features: int, out_features: int, bias: bool, ops: Ops,
                 gated: bool = False, splits: int = 1) -> None:
        super().__init__()
        self.ops = ops
        self.gated = gated
        self.splits = splits
        self.weight = nn.Parameter(torch.empty(out_features, in_features,
                                               dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=torch.float32)) if bias else None
        self.adapter = None

    def use_packed(self, weight: PackedWeight) -> None:
        """Replaces the weight by a packed one (inference only)."""
        del self.weight
        self.weight = weight

    def forward(self, x_TK: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, N]; with ``residual`` [T, N], residual + y."""
        bias = None if self.bias is None else through(self.bias_uses, self.bias)
        if self.adapter is None:
            return self.ops.linear(x_TK, through(self.uses, self.weight), bias, residual,
                                   splits=self.splits)
        y_TN = self.product(x_TK)
        y_TN = y_TN if bias is None else y_TN + bias
        return y_TN if residual is None else residual + y_TN

    def forward_gated(self, x_TK: Tensor, activation: str) -> Tensor:
        """[T, N/2]: activation(gate) * up."""
        if self.adapter is not None:
            return self.ops.gated_activation(Linear.forward(self, x_TK), activation)
        bias = None if self.bias is None else through(self.bias_uses, self.bias)
        return self.ops.gated_linear(x_TK, through(self.uses, self.weight), bias, activation,
                                     splits=self.splits)

    def product(self, x_TK: Tensor) -> Tensor:
        """[T, N]: x W^T, adapted, without the bias."""
        y_TN = self.ops.linear(x_TK, through(self.uses, self.weight), None, None,
                               splits=self.splits)
        return y_TN if self.adapter is None else self.adapter(x_TK, y_TN)


class Embedding(nn.Module):
    """Rows of a [V, D] matrix times a constant; also the output head when tied."""

    weight: Tensor | PackedWeight
    uses: tuple[Use, ...] = ()

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))

    def use_packed(self, weight: PackedWeight) -> None:
        """Replaces the weight by a packed one (inference only)."""
        del self.weight
        self.weight = weight

    def forward(self, tokens_T: Tensor) -> Tensor:
        """[T, D]. Raises ValueError for a token id outside the vocabulary."""
        return self.ops.embed(tokens_T, through(self.uses, self.weight), self.scale)

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, V]: x times this matrix transposed (a tied head)."""
        return self.ops.linear(x_TD, through(self.uses, self.weight), None, None)


@overload
def through(uses: tuple[Use, ...], weight: Tensor) -> Tensor: ...
@overload
def through(uses: tuple[Use, ...], weight: Tensor | PackedWeight) -> Tensor | PackedWeight: ...
def through(uses: tuple[Use, ...], weight: Tensor | PackedWeight) -> Tensor | PackedWeight:
    """The weight as it enters a product; a packed one is for inference and goes as it is."""
    if isinstance(weight, Tensor):
        for use in uses:
            weight = use(weight)
    return weight
