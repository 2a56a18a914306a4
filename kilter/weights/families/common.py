"""The fields that Llama, Mistral and Qwen share: one rope, pre-norms, SwiGLU."""

from __future__ import annotations

from typing import Any

from kilter.models.spec import LayerSpec, ModelSpec
from kilter.weights.families.config import Config, rope_to_config
from kilter.weights.families.family import sizes

_ACTIVATION_NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def plain_spec(config: Config, *, windows: list[int | None], max_positions: int,
               kv_heads: int | None = None, head_dim: int | None = None,
               **features: bool) -> ModelSpec:
    """`ModelSpec` from the shared fields.

    ``windows`` has one entry per layer; ``max_positions``, ``kv_heads`` (None: as many as query
    heads) and ``head_dim`` (None: hidden / heads) are the family's defaults, `features` the
    spec's flags. Raises `WeightsError` with every problem the config has.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if head_dim is None and config.raw.get("head_dim") is None and hidden % heads:
        config.problems.append(f"hidden_size ({hidden}) is not a multiple of num_attention_heads "
                               f"({heads}) and there is no head_dim.")
    if "num_key_value_heads" in config.raw:  # null means one per query head in every family
        kv_heads = None
    rope = config.rope()
    fields: dict[str, Any] = dict(
        architecture=config.architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        ffn_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", kv_heads or heads),
        head_dim=config.integer("head_dim", head_dim or max(hidden // heads, 1)),
        layers=tuple(LayerSpec(rope, window) for window in windows),
        max_positions=config.integer("max_position_embeddings", max_positions),
        activation=config.activation("hidden_act", "silu"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings"),
        **features)
    config.finish()
    return ModelSpec(**fields)


def plain_config(spec: ModelSpec) -> dict[str, Any]:
    """The shared fields of config.json."""
    rope = spec.layers[0].rope
    return sizes(spec) | {
        "hidden_act": _ACTIVATION_NAMES[spec.activation],
        "rope_theta": rope.theta,
        "rope_scaling": rope_to_config(rope),
    }
