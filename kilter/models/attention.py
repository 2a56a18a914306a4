"""Grouped-query attention (arXiv 2305.13245) over a flat `Batch`, cached or not.

The fused qkv weight keeps each KV group together, ``[q_0 … q_{R-1}, k, v]`` per group, so that a
group is a contiguous run of rows: tensor parallelism later cuts between groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilter.models.batch import Batch
from kilter.models.linear import Linear
from kilter.models.norm import RMSNorm
from kilter.models.rounding import rounded
from kilter.models.spec import LayerSpec, ModelSpec
from kilter.ops import Ops


class Attention(nn.Module):
    """Causal attention of one layer; ``layer.window`` limits how far back it looks."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, index: int, ops: Ops,
                 kv_dtype: torch.dtype) -> None:
        super().__init__()
        self.ops = ops
        self.spec = spec
        self.window = layer.window
        self.index = index
        self.kv_dtype = kv_dtype
        self.qkv = Linear(spec.hidden_size, spec.qkv_rows, spec.qkv_bias, ops)
        self.out = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, spec.out_bias, ops,
                          splits=spec.virtual_shards)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_zero_centred, ops)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_zero_centred, ops)

    def forward(self, x_TD: Tensor, batch: Batch, cos_sin: tuple[Tensor, Tensor],
                residual: Tensor | None = None) -> Tensor:
        """[T, D]. Writes this layer's keys and values into ``batch.kv`` if there is one."""
        spec, kv = self.spec, batch.kv
        qkv_TGXd = self.qkv(x_TD).view(
            -1, spec.num_kv_heads, spec.queries_per_kv + 2, spec.head_dim)
        cache = None if kv is None else (kv.keys[self.index], kv.values[self.index], kv.slots_T)
        # Between the operators a gradient has its tensor's format, so where there will be one, keys
        # and values have only the values of theirs.
        learns = kv is None and qkv_TGXd.requires_grad and torch.is_grad_enabled()
        kv_dtype = self.kv_dtype
        if learns and kv_dtype.itemsize < qkv_TGXd.dtype.itemsize:
            kv_dtype = qkv_TGXd.dtype
        q_THd, keys, values = self.ops.rope_qkv(
            qkv_TGXd, batch.positions_T, *cos_sin,
            q_norm=None if self.q_norm is None else self.q_norm.scale,
            k_norm=None if self.k_norm is None else self.k_norm.scale,
            eps=spec.norm_eps, zero_centred=spec.norm_zero_centred,
            kv=cache, kv_dtype=kv_dtype)
        if kv_dtype != self.kv_dtype:
            keys, values = rounded(keys, self.kv_dtype), rounded(values, self.kv_dtype)
        if batch.attend is not None:
            o_THd = batch.attend(self.ops, q_THd, keys, values, scale=spec.query_scale,
                                 window=self.window)
        else:
            o_THd = self.ops.attention(
                q_THd, keys, values, batch.cu_seqlens_S1,
                context_S=None if kv is None else kv.context_S,
                page_table_SP=None if kv is None else kv.page_table_SP,
                page_size=0 if kv is None else kv.page_size,
                scale=spec.query_scale, window=self.window, max_seqlen=batch.max_seqlen)
        return self.out(o_THd.view(-1, spec.num_heads * spec.head_dim), residual)
