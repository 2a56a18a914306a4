"""The facts that a spec works out from its sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.models import LayerSpec, ModelSpec, RopeSpec
from kilter.models.attention import Attention
from kilter.models.mlp import GatedMLP
from kilter.ops import exact_ops


def spec(heads: int, groups: int, ffn: int) -> ModelSpec:
    return ModelSpec("LlamaForCausalLM", 64, 32, ffn, heads, groups, 8, (LayerSpec(RopeSpec()),),
                     128)


@pytest.mark.parametrize(("heads", "groups", "ffn", "shards"), [
    (9, 3, 1536, 3),  # SmolLM2 135M
    (32, 8, 14336, 8),  # Llama 3.1 8B
    (4, 1, 2048, 4),  # Gemma 3 270M
    (14, 2, 4864, 2),  # Qwen 2.5 0.5B
    (12, 3, 24, 6),  # half of a group's queries
    (7, 7, 10, 1),
])
def test_virtual_shards(heads: int, groups: int, ffn: int, shards: int) -> None:
    made = spec(heads, groups, ffn)
    assert made.virtual_shards == shards
    assert GatedMLP(made, exact_ops()).down.splits == shards


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 200))
def test_every_shard_holds_whole_heads_and_equal_stretches(groups: int, per: int,
                                                           ffn: int) -> None:
    made = spec(groups * per, groups, ffn)
    shards = made.virtual_shards
    assert 1 <= shards <= 8
    assert made.num_heads % shards == 0 and ffn % shards == 0
    assert groups % shards == 0 or shards % groups == 0
    attention = Attention(made, made.layers[0], 0, exact_ops(), torch.float32)
    assert attention.out.splits == shards
