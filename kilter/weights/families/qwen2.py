"""Qwen 2 and 2.5: biases on q, k and v; a sliding window on the upper layers when switched on."""

from __future__ import annotations

from typing import Any

from kilter.models.spec import ModelSpec
from kilter.weights.families.common import plain_config, plain_spec
from kilter.weights.families.config import Config
from kilter.weights.families.family import Family, RawConfig

ARCHITECTURE = "Qwen2ForCausalLM"


def to_spec(raw: RawConfig) -> ModelSpec:
    config = Config(raw, ARCHITECTURE)
    return plain_spec(config, windows=windows(config), max_positions=32768, kv_heads=32,
                      qkv_bias=True)


def windows(config: Config) -> list[int | None]:
    """Each layer's window: ``sliding_window`` from layer ``max_window_layers`` on, or where
    ``layer_types`` says so; nowhere unless ``use_sliding_window``."""
    layers = config.integer("num_hidden_layers")
    window = None
    if config.flag("use_sliding_window") and config.raw.get("sliding_window", 4096) is not None:
        window = config.integer("sliding_window", 4096)
    first = config.raw.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        config.problems.append(f"max_window_layers is {first!r}; it must be a whole number.")
        first = 0
    sliding = config.layer_types(layers, [window is not None and i >= first
                                          for i in range(layers)])
    if window is None and any(sliding):
        config.problems.append("layer_types names sliding_attention layers but sliding_window or "
                               "use_sliding_window is off.")
    return [window if slides else None for slides in sliding]


def window_config(spec: ModelSpec) -> dict[str, Any]:
    """The window fields of a Qwen config."""
    found = [layer.window for layer in spec.layers if layer.window is not None]
    return {
        "use_sliding_window": bool(found),
        "sliding_window": found[0] if found else None,
        "max_window_layers": next((i for i, layer in enumerate(spec.layers) if layer.window),
                                  spec.num_layers),
        "layer_types": ["sliding_attention" if layer.window else "full_attention"
                        for layer in spec.layers],
    }


def to_config(spec: ModelSpec) -> dict[str, Any]:
    return plain_config(spec) | window_config(spec)


FAMILY = Family(ARCHITECTURE, "Qwen2ForSequenceClassification", "qwen2", to_spec, to_config)
