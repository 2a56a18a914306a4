"""Tiny random models of every family, made by transformers, with awkward shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

transformers.logging.set_verbosity_error()

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0,
        "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.5}


def _base(**changes: Any) -> dict[str, Any]:
    return dict(vocab_size=99, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
                num_attention_heads=6, num_key_value_heads=2, head_dim=16,
                max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0
                ) | changes


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-biases-llama3": lambda: LlamaConfig(**_base(
        attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)),
    "llama-tied-mqa-yarn": lambda: LlamaConfig(**_base(
        num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=YARN)),
    "mistral-window": lambda: MistralConfig(**_base(sliding_window=7)),
    "mistral-no-window": lambda: MistralConfig(**_base(
        sliding_window=None, num_key_value_heads=1, rope_parameters=LINEAR,
        tie_word_embeddings=True)),
    "qwen2-plain": lambda: Qwen2Config(**_base(rope_parameters={"rope_type": "default",
                                                               "rope_theta": 1e6})),
    "qwen2-window": lambda: Qwen2Config(**_base(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, num_key_value_heads=6,
        tie_word_embeddings=True)),
    "qwen3-plain": lambda: Qwen3Config(**_base(head_dim=24, num_key_value_heads=3)),
    "qwen3-biases": lambda: Qwen3Config(**_base(
        attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False})),
    "gemma3-default-pattern": lambda: Gemma3TextConfig(**_base(
        num_hidden_layers=7, sliding_window=5, query_pre_attn_scalar=24, num_key_value_heads=1)),
    "gemma3-own-pattern": lambda: Gemma3TextConfig(**_base(
        num_hidden_layers=3, sliding_window=9, tie_word_embeddings=False, attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0,
                                            "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
}
NAMES = list(CONFIGS)

_CLASSES: dict[type, type[PreTrainedModel]] = {
    LlamaConfig: LlamaForCausalLM, MistralConfig: MistralForCausalLM, Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM, Gemma3TextConfig: Gemma3ForCausalLM}


def model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose every parameter is random, norms and biases included."""
    config = CONFIGS[name]()
    torch.manual_seed(NAMES.index(name))
    made = _CLASSES[type(config)](config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.to(dtype).eval()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32,
         shard: str = "5GB") -> PreTrainedModel:
    made = model(name, dtype)
    made.save_pretrained(folder, max_shard_size=shard)
    return made


def logits(made: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(23)[None] * 4 % 99
    with torch.no_grad():
        return made(tokens).logits
