"""Mistral: Llama's computation with a sliding window on every layer, or on none."""

from __future__ import annotations

from typing import Any

from kilter.models.spec import ModelSpec
from kilter.weights.families.common import plain_config, plain_spec
from kilter.weights.families.config import Config
from kilter.weights.families.family import Family, RawConfig

ARCHITECTURE = "MistralForCausalLM"


def to_spec(raw: RawConfig) -> ModelSpec:
    """config.json -> `ModelSpec`. A missing ``sliding_window`` means 4096, null means none."""
    config = Config(raw, ARCHITECTURE)
    layers = config.integer("num_hidden_layers")
    window = None
    if raw.get("sliding_window", 4096) is not None:
        window = config.integer("sliding_window", 4096)
    sliding = config.layer_types(layers, [window is not None] * layers)
    if sliding != [window is not None] * layers:
        config.problems.append("layer_types differs between layers or from sliding_window "
                               f"({window}); a MistralForCausalLM has one window for all layers.")
    return plain_spec(config, windows=[window] * layers, max_positions=4096 * 32, kv_heads=8)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    return plain_config(spec) | {"sliding_window": spec.layers[0].window}


FAMILY = Family(ARCHITECTURE, "MistralForSequenceClassification", "mistral", to_spec, to_config)
