"""Random tiny models of every family, with odd shapes, made by `transformers` (the oracle)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
         "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def _sizes(**other: Any) -> dict[str, Any]:
    return {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1,
            "eos_token_id": 2, "rope_parameters": dict(_PLAIN), **other}


_GEMMA_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
               "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


def _gemma(**other: Any) -> dict[str, Any]:
    return _sizes(head_dim=32, sliding_window=9, query_pre_attn_scalar=24,
                  rope_parameters=_GEMMA_ROPE, **other)


# name -> (config class, arguments)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-plain": ("LlamaConfig", _sizes()),
    "llama-mqa-wide-head": ("LlamaConfig", _sizes(num_key_value_heads=1, head_dim=20)),
    "llama-llama3-tied": ("LlamaConfig", _sizes(rope_parameters=_LLAMA3, tie_word_embeddings=True,
                                                vocab_size=67)),
    "llama-linear-biases": ("LlamaConfig", _sizes(rope_parameters=_LINEAR, attention_bias=True,
                                                  mlp_bias=True, num_attention_heads=6,
                                                  num_key_value_heads=6)),
    "llama-yarn": ("LlamaConfig", _sizes(rope_parameters=_YARN, head_dim=36)),
    "llama-yarn-mscale": ("LlamaConfig", _sizes(rope_parameters={
        **_YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 20.0, "beta_slow": 2.0},
        head_dim=24)),
    "llama-smollm2-like": ("LlamaConfig", _sizes(
        hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5})),
    "mistral-window": ("MistralConfig", _sizes(sliding_window=7)),
    "mistral-no-window": ("MistralConfig", _sizes(sliding_window=None, head_dim=10)),
    "mistral-mqa-window-1": ("MistralConfig", _sizes(sliding_window=1, num_key_value_heads=1)),
    "mistral-yarn-tied": ("MistralConfig", _sizes(sliding_window=23, rope_parameters=_YARN,
                                                  tie_word_embeddings=True, vocab_size=99)),
    "qwen2-plain": ("Qwen2Config", _sizes()),
    "qwen2-tied-mqa": ("Qwen2Config", _sizes(num_key_value_heads=1, tie_word_embeddings=True)),
    "qwen2-window-some-layers": ("Qwen2Config", _sizes(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, vocab_size=77)),
    "qwen2-yarn": ("Qwen2Config", _sizes(rope_parameters=_YARN)),
    "qwen3-plain": ("Qwen3Config", _sizes(head_dim=32)),
    "qwen3-tied-mqa": ("Qwen3Config", _sizes(head_dim=12, num_key_value_heads=1,
                                             tie_word_embeddings=True, vocab_size=101)),
    "qwen3-bias-linear": ("Qwen3Config", _sizes(head_dim=16, attention_bias=True,
                                                rope_parameters=_LINEAR)),
    "qwen3-yarn-window": ("Qwen3Config", _sizes(
        head_dim=24, rope_parameters=_YARN, use_sliding_window=True, sliding_window=6,
        max_window_layers=2)),
    "gemma3-plain": ("Gemma3TextConfig", _gemma(
        layer_types=["sliding_attention", "sliding_attention", "full_attention"])),
    "gemma3-mqa-tied": ("Gemma3TextConfig", {**_gemma(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma3-linear-global": ("Gemma3TextConfig", {**_gemma(
        layer_types=["full_attention", "sliding_attention", "full_attention"]),
        "rope_parameters": {**_GEMMA_ROPE, "full_attention": {
            "rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}, "vocab_size": 59}),
    "gemma3-query-scale": ("Gemma3TextConfig", {**_gemma(
        layer_types=["sliding_attention"] * 3), "query_pre_attn_scalar": 168, "head_dim": 12,
        "sliding_window": 3}),
}


def make(name: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32
         ) -> transformers.PreTrainedModel:
    """Writes the case's checkpoint into ``folder`` and returns the oracle (eager, fp32)."""
    kind, arguments = CASES[name]
    config = getattr(transformers, kind)(**arguments)
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Norm weights and biases start at constants that would hide a mix-up.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "embed" in key else 0.15))
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model.float().eval()
