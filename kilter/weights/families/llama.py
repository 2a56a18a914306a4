"""Llama 2 and 3.x, SmolLM2, and the many models that share their class."""

from __future__ import annotations

from typing import Any

from kilter.models.spec import ModelSpec
from kilter.weights.families.common import plain_config, plain_spec
from kilter.weights.families.config import Config
from kilter.weights.families.family import Family, RawConfig

ARCHITECTURE = "LlamaForCausalLM"


def to_spec(raw: RawConfig) -> ModelSpec:
    """config.json -> `ModelSpec`. ``attention_bias`` is on q, k, v and on the output alike."""
    config = Config(raw, ARCHITECTURE)
    layers = config.integer("num_hidden_layers")
    bias = config.flag("attention_bias")
    return plain_spec(config, windows=[None] * layers, max_positions=2048, qkv_bias=bias,
                      out_bias=bias, mlp_bias=config.flag("mlp_bias"))


def to_config(spec: ModelSpec) -> dict[str, Any]:
    return plain_config(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


FAMILY = Family(ARCHITECTURE, "LlamaForSequenceClassification", "llama", to_spec, to_config)
