"""Gemma 3 text: norms around both blocks, zero-centred norm weights, scaled embeddings,
local layers with their own rope between global ones.

A `Gemma3ForConditionalGeneration` is this model under ``text_config`` beside a vision tower;
its text half is read, the vision half is left out (the bridge says so).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.weights.families.config import Config, rope_to_config
from kilter.weights.families.family import Family, RawConfig, sizes

ARCHITECTURE = "Gemma3ForCausalLM"
MULTIMODAL = "Gemma3ForConditionalGeneration"
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PERIOD = 6  # every sixth layer is global, the default of both file formats


def to_spec(raw: RawConfig) -> ModelSpec:
    """config.json -> `ModelSpec`; fields that published configs leave out have defaults."""
    config = Config(raw, ARCHITECTURE)
    layers = config.integer("num_hidden_layers", 26)
    hidden = config.integer("hidden_size", 2304)
    bias = config.flag("attention_bias")
    window = config.integer("sliding_window", 4096)
    period = config.integer("sliding_window_pattern", PERIOD)
    sliding = config.layer_types(layers, local_layers(layers, period))
    local, everywhere = _ropes(config)
    fields: dict[str, Any] = dict(
        architecture=ARCHITECTURE,
        vocab_size=config.integer("vocab_size", 262_208),
        hidden_size=hidden,
        ffn_size=config.integer("intermediate_size", 9216),
        num_heads=config.integer("num_attention_heads", 8),
        num_kv_heads=config.integer("num_key_value_heads", 4),
        head_dim=config.integer("head_dim", 256),
        layers=tuple(LayerSpec(local, window) if slides else LayerSpec(everywhere)
                     for slides in sliding),
        max_positions=config.integer("max_position_embeddings", 131_072),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        norm_zero_centred=True, qk_norm=True, post_norms=True,
        qkv_bias=bias, out_bias=bias,
        tied_head=config.flag("tie_word_embeddings", True),
        embed_scale=math.sqrt(hidden),
        query_scale=1.0 / math.sqrt(config.integer("query_pre_attn_scalar", 256)))
    config.finish()
    return ModelSpec(**fields)


def local_layers(layers: int, period: int) -> list[bool]:
    """True for each local layer: all but every ``period``-th."""
    return [(i + 1) % period != 0 for i in range(layers)]


def to_config(spec: ModelSpec) -> dict[str, Any]:
    local = [layer for layer in spec.layers if layer.window is not None]
    everywhere = [layer for layer in spec.layers if layer.window is None]
    rope = everywhere[0].rope if everywhere else RopeSpec(theta=GLOBAL_THETA)
    return sizes(spec) | {
        "hidden_activation": "gelu_pytorch_tanh" if spec.activation == "gelu_tanh" else "silu",
        "attention_bias": spec.qkv_bias,
        "query_pre_attn_scalar": round(spec.query_scale ** -2),
        "rope_theta": rope.theta,
        "rope_scaling": rope_to_config(rope),
        "rope_local_base_freq": local[0].rope.theta if local else LOCAL_THETA,
        "sliding_window": local[0].window if local else spec.max_positions,
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention"
                        for layer in spec.layers],
    }


def text_config(raw: RawConfig) -> RawConfig:
    """The text section of a multimodal config, as a config of its own."""
    section = raw.get("text_config")
    if not isinstance(section, Mapping):
        config = Config({}, MULTIMODAL)
        config.problems.append("text_config is missing.")
        config.finish()
        section = {}
    shared = ("tie_word_embeddings", "torch_dtype", "dtype", "bos_token_id", "eos_token_id",
              "pad_token_id")
    inherited = {key: raw[key] for key in shared if key in raw and key not in section}
    return {**section, **inherited}


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """(local, global). transformers 5 nests ``rope_parameters`` by layer type; 4 has a base for
    each, and ``rope_scaling`` for the global layers only."""
    nested = config.raw.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not all(
            value is None or isinstance(value, Mapping) for value in nested.values()):
        config.problems.append("rope_parameters must hold one object for sliding_attention and "
                               "one for full_attention.")
        nested = {}
    scaled = {**(nested.get("full_attention") or {}), **(config.raw.get("rope_scaling") or {})}
    return (config.rope_from(nested.get("sliding_attention") or {},
                             config.number("rope_local_base_freq", LOCAL_THETA)),
            config.rope_from(scaled, config.number("rope_theta", GLOBAL_THETA)))


FAMILY = Family(ARCHITECTURE, "Gemma3TextForSequenceClassification", "gemma3_text", to_spec,
                to_config)
