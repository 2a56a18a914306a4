"""The gated feed-forward block: down(activation(gate(x)) * up(x)) (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from kilter.models.linear import Linear
from kilter.models.spec import ModelSpec
from kilter.ops import Ops


class GatedMLP(nn.Module):
    """`gate_up` holds [gate; up] as one [2F, D] matrix."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate_up = Linear(spec.hidden_size, 2 * spec.ffn_size, spec.mlp_bias, ops, gated=True)
        self.down = Linear(spec.ffn_size, spec.hidden_size, spec.mlp_bias, ops,
                           splits=spec.virtual_shards)

    def forward(self, x_TD: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, D]; with ``residual``, residual + the block's output."""
        return self.down(self.gate_up.forward_gated(x_TD, self.activation), residual)
