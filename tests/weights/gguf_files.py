"""GGUF files written with the gguf library from transformers models, as llama.cpp's converter
would: its tensor names, its order of q and k rows, its norm weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCH = {"llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA,
        "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
        "gemma3_text": gguf.MODEL_ARCH.GEMMA3}


def neighbours(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) order to pairs of both."""
    d = w.shape[0] // heads
    return w.reshape(heads, 2, d // 2, -1).swapaxes(1, 2).reshape(w.shape)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What Llama 3.1's published code makes of the frequencies, as divisors; loops on purpose."""
    out = []
    for j in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * j / head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength
                      - rope["low_freq_factor"]) / (
                          rope["high_freq_factor"] - rope["low_freq_factor"])
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, np.float32)


def write(model: PreTrainedModel, path: Path, *, quant: str = "F32",
          extra: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Writes the model; matrices whose rows allow it as `quant`. Returns, under Hugging Face
    names, the values that the file holds (dequantised by the gguf library)."""
    config = model.config
    arch = ARCH[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if arch == gguf.MODEL_ARCH.GEMMA3:
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type in ("gemma3_text", "mistral") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_token_list(["<unk>", "a", "é"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quant]
    held: dict[str, np.ndarray] = {}
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, tensor in state.items():
        values = tensor.to(torch.float32).numpy()
        stored = values
        if arch == gguf.MODEL_ARCH.GEMMA3 and "norm" in name:
            stored = values + np.float32(1)
        if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            stored = neighbours(values, config.num_attention_heads)
        if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            stored = neighbours(values, config.num_key_value_heads)
        stem, _, leaf = name.rpartition(".")
        target = f"{names.get_name(stem)}.{leaf}"
        held[name] = values
        if stored.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            packed = gguf.quants.quantize(stored, kind)
            writer.add_tensor(target, packed, raw_dtype=kind)
            # The permutation moves whole rows, so it commutes with quantising rows.
            held[name] = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        else:
            writer.add_tensor(target, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
