"""The decoder, written once: embed → layers → norm → head, over a flat `Batch`.

There are no ranks here and no phases: a training pack, a prefill chunk and a decode step all run
this forward. Which arithmetic it runs (`exact`: row-invariant kernels, the default; or stock torch
kernels) is chosen at construction and handed to every module as an `Ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilter.models.attention import Attention
from kilter.models.batch import Batch
from kilter.models.linear import Embedding, Linear
from kilter.models.mlp import GatedMLP
from kilter.models.norm import RMSNorm
from kilter.models.rope import cos_sin_tables
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.ops import Ops, exact_ops, stock_ops


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream; with
    ``spec.post_norms`` (Gemma) each block's output is normed before it is added."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, index: int, ops: Ops,
                 kv_dtype: torch.dtype) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.norm_eps, spec.norm_zero_centred, ops)

        self.attn_norm = norm()
        self.attn = Attention(spec, layer, index, ops, kv_dtype)
        self.mlp_norm = norm()
        self.mlp = GatedMLP(spec, ops)
        self.attn_post_norm = norm() if spec.post_norms else None
        self.mlp_post_norm = norm() if spec.post_norms else None

    def forward(self, x_TD: Tensor, batch: Batch, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        if self.attn_post_norm is None or self.mlp_post_norm is None:
            x_TD = self.attn(self.attn_norm(x_TD), batch, cos_sin, residual=x_TD)
            return self.mlp(self.mlp_norm(x_TD), residual=x_TD)
        x_TD = self.attn_post_norm(self.attn(self.attn_norm(x_TD), batch, cos_sin), residual=x_TD)
        return self.mlp_post_norm(self.mlp(self.mlp_norm(x_TD)), residual=x_TD)


class Decoder(nn.Module):
    """A decoder-only language model of any supported `ModelSpec`.

    Args:
        spec: what to build. Parameters are created uninitialised (build under
            ``torch.device("meta")`` to allocate nothing) and named as in docs/architecture.md.
        exact: row-invariant arithmetic; False takes torch's own kernels (any order of sums).
        products: ``"bf16"`` rounds the factors of every matrix product to bfloat16
            (`kilter.ops.linear`); part of the model's numerics, and only for exact arithmetic.
        kv_dtype: the format keys and values are rounded to before attention, in every forward,
            cached or not: it is part of the model's numerics.
        max_positions: positions the rope tables cover; default the spec's whole context.
    """

    def __init__(self, spec: ModelSpec, *, exact: bool = True,
                 kv_dtype: torch.dtype = torch.float32, max_positions: int | None = None,
                 products: str = "fp32") -> None:
        super().__init__()
        if not exact and products != "fp32":
            raise ValueError(f"products is {products}, which only exact arithmetic knows; leave it "
                             "at fp32, or leave the exact kernels on.")
        ops = exact_ops(products) if exact else stock_ops()
        self.spec = spec
        self.exact = exact
        self.products = products
        self.ops = ops
        self.kv_dtype = kv_dtype
        self.max_positions = max_positions or spec.max_positions
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, spec.embed_scale, ops)
        self.layers: nn.ModuleList | nn.ModuleDict = nn.ModuleList(
            DecoderLayer(spec, layer, i, ops, kv_dtype) for i, layer in enumerate(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, spec.norm_zero_centred, ops)
        self.head = None if spec.tied_head else Linear(
            spec.hidden_size, spec.vocab_size, False, ops)
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}

    def rope_tables(self, device: torch.device) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """cos and sin of every rope the layers use, made on first use."""
        if not self._tables or next(iter(self._tables.values()))[0].device != device:
            self._tables = {
                rope: cos_sin_tables(rope, self.spec.head_dim, self.max_positions, device)
                for rope in {layer.rope for layer in self.spec.layers}}
        return self._tables

    def hidden(self, batch: Batch, x_TD: Tensor | None = None) -> Tensor:
        """[T, D] after the last norm.

        Args:
            x_TD: [T, D], what comes into the first of ``layers`` where that is not the embedding:
                a stage of a pipeline has some of the layers only, under their own names.
        """
        tables = self.rope_tables(batch.tokens_T.device)
        if x_TD is None:
            x_TD = self.embed(batch.tokens_T)
        for name, layer in self.layers.named_children():
            x_TD = layer(x_TD, batch, tables[self.spec.layers[int(name)].rope])
        return self.norm(x_TD)

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, V] of hidden rows from `hidden`."""
        return self.embed.logits(x_TD) if self.head is None else self.head(x_TD)

    def forward(self, batch: Batch) -> Tensor:
        """Logits of every token, [T, V].

        Raises:
            ValueError: for a token id outside the vocabulary or a position past the rope tables.
        """
        return self.logits(self.hidden(batch))
