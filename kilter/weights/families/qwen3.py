"""Qwen 3: an RMSNorm on each head's query and key, its own head_dim, no biases by default."""

from __future__ import annotations

from typing import Any

from kilter.models.spec import ModelSpec
from kilter.weights.families.common import plain_config, plain_spec
from kilter.weights.families.config import Config
from kilter.weights.families.family import Family, RawConfig
from kilter.weights.families.qwen2 import window_config, windows

ARCHITECTURE = "Qwen3ForCausalLM"


def to_spec(raw: RawConfig) -> ModelSpec:
    config = Config(raw, ARCHITECTURE)
    bias = config.flag("attention_bias")
    return plain_spec(config, windows=windows(config), max_positions=32768, kv_heads=32,
                      head_dim=128, qk_norm=True, qkv_bias=bias, out_bias=bias)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    return plain_config(spec) | window_config(spec) | {"attention_bias": spec.qkv_bias}


FAMILY = Family(ARCHITECTURE, "Qwen3ForSequenceClassification", "qwen3", to_spec, to_config)
