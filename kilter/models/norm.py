"""RMSNorm (arXiv 1910.07467), plain or zero-centred, optionally adding a residual after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilter.models.linear import Use, through
from kilter.ops import Ops


class RMSNorm(nn.Module):
    """x / rms(x) * w, or * (1 + w) when ``zero_centred``; ``uses`` as in `kilter.models.linear`."""

    uses: tuple[Use, ...] = ()

    def __init__(self, size: int, eps: float, zero_centred: bool, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = nn.Parameter(torch.empty(size))

    @property
    def scale(self) -> Tensor:
        """The weight as it is used."""
        return through(self.uses, self.weight)

    def forward(self, x_TD: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, D]; with ``residual`` [T, D], residual + norm(x)."""
        return self.ops.rms_norm(x_TD, self.scale, self.eps, self.zero_centred, residual)
