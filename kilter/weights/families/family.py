"""What one model family tells the bridge: how to read its config, how to write it, its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kilter.models.spec import ModelSpec

RawConfig = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One entry of the registry.

    `to_config` gives what `to_spec` reads, in the spelling of transformers 4, which 5 reads too.
    `reward` is the architecture of the family's reward models: the same decoder under a head of
    one row, ``score``.
    """

    architecture: str
    reward: str
    model_type: str
    to_spec: Callable[[RawConfig], ModelSpec]
    to_config: Callable[[ModelSpec], dict[str, Any]]


def sizes(spec: ModelSpec) -> dict[str, Any]:
    """The config fields that every family spells alike."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_head,
    }
