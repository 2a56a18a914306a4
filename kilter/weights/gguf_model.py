"""A `ModelSpec` from a GGUF header: metadata keys and the presence of tensors.

GGUF names computations by `general.architecture`, not by Hugging Face class. Its keys leave some
facts to the reader's code; those are written here, with the value that llama.cpp computes with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.ops.packed import QuantTensor
from kilter.weights.decoder import Names
from kilter.weights.decoder import gguf as gguf_names
from kilter.weights.errors import raise_all
from kilter.weights.families import gemma3
from kilter.weights.gguf import GGUFFile

ROPE_FREQS = "rope_freqs.weight"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                  "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
# Keys under {arch}. that change the computation, and the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0), "attention.scale": (0.0,), "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,), "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,), "attention.causal": (True,),
    "rope.scaling.yarn_log_multiplier": (0.0,), "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
}


def gguf_names_of(file: GGUFFile, spec: ModelSpec) -> Names:
    """The name table of the file; llama's q and k rows are stored for a rope over neighbours."""
    return gguf_names(spec, interleaved_qk=file.metadata["general.architecture"] == "llama")


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """The model a GGUF file describes.

    Raises:
        WeightsError: an architecture that Kilter does not know, or a list of everything in the
            header that is missing or that changes the computation in an unsupported way.
    """
    return _Header(file).spec()


class _Header:
    def __init__(self, file: GGUFFile) -> None:
        self.file, self.meta = file, file.metadata
        self.problems: list[str] = []
        self.arch = str(self.meta.get("general.architecture"))
        if self.arch not in _ARCHITECTURES:
            raise_all([f"general.architecture is {self.arch!r}; Kilter supports "
                       f"{', '.join(_ARCHITECTURES)} in GGUF files."],
                      f"{file.path} cannot be used.")

    def spec(self) -> ModelSpec:
        self._refuse_unsupported()
        layers, heads = self.integer("block_count"), self.integer("attention.head_count")
        hidden = self.integer("embedding_length")
        head_dim = self.integer("attention.key_length", hidden // max(heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.integer(key, head_dim) != head_dim:
                self.problems.append(f"{self.arch}.{key} is {self.integer(key)} but heads have "
                                     f"{head_dim} dimensions; Kilter needs them equal.")
        window, local = self._windows(layers)
        rope = self._rope(head_dim)
        gemma = self.arch == "gemma3"
        architecture = _ARCHITECTURES[self.arch]
        if self.arch == "llama" and window is not None:
            architecture = "MistralForCausalLM"
        local_rope = RopeSpec(theta=self.number("rope.freq_base_swa", gemma3.LOCAL_THETA)
                              ) if gemma else rope
        fields: dict[str, Any] = dict(
            architecture=architecture,
            vocab_size=self._vocab_size(),
            hidden_size=hidden,
            ffn_size=self.integer("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=self.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            layers=tuple(LayerSpec(local_rope, window) if slides else LayerSpec(rope)
                         for slides in local),
            max_positions=self.integer("context_length"),
            norm_eps=self.number("attention.layer_norm_rms_epsilon", 1e-6),
            qk_norm=gemma or self.arch == "qwen3",
            qkv_bias=self.has("blk.0.attn_q.bias"),
            out_bias=self.has("blk.0.attn_output.bias"),
            mlp_bias=self.has("blk.0.ffn_gate.bias"),
            tied_head=not self.has("output.weight"))
        if gemma:
            # llama.cpp knows the 27B model, which scales queries otherwise, by its depth.
            scaled_by = hidden // max(heads, 1) if layers == 62 else head_dim
            fields |= dict(activation="gelu_tanh", norm_zero_centred=True, post_norms=True,
                           embed_scale=math.sqrt(hidden), query_scale=1 / math.sqrt(scaled_by))
        raise_all(self.problems, f"The GGUF file {self.file.path} cannot be used.")
        return ModelSpec(**fields)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def get(self, key: str) -> Any:
        return self.meta.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a per-layer array counts when all its entries agree."""
        value = self.get(key)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is None:
            value = default
        if value is None:
            self.problems.append(f"the key {self.arch}.{key} is missing.")
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.problems.append(f"{self.arch}.{key} is {str(value)[:80]}; it must be one positive "
                                 "whole number for all layers.")
            return 1
        return value

    def number(self, key: str, default: float | None) -> float:
        """A number; float32 metadata is taken as the shortest decimal that it stands for."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"{self.arch}.{key} is "
                                 f"{'missing' if value is None else repr(value)}; it must be a "
                                 "number.")
            return 1.0
        return float(str(np.float32(value)))

    def _refuse_unsupported(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.get(key)
            if value is not None and value not in neutral:
                self.problems.append(f"{self.arch}.{key} is {value!r}, which Kilter does not "
                                     f"support (only {neutral[-1]!r}).")

    def _vocab_size(self) -> int:
        """Rows of the embedding; the header's own count is optional and not always right."""
        embed = self.file.tensors.get("token_embd.weight")
        return embed.shape[0] if embed is not None else self.integer("vocab_size")

    def _windows(self, layers: int) -> tuple[int | None, list[bool]]:
        """The sliding window, if any, and which layers have it."""
        if not self.get("attention.sliding_window"):
            return None, [False] * layers
        window = self.integer("attention.sliding_window")
        pattern = self.get("attention.sliding_window_pattern")
        if self.arch == "gemma3":
            if isinstance(pattern, list):
                if len(pattern) != layers:
                    self.problems.append(f"gemma3.attention.sliding_window_pattern has "
                                         f"{len(pattern)} entries for {layers} layers.")
                return window, [bool(slides) for slides in pattern]
            return window, gemma3.local_layers(
                layers, self.integer("attention.sliding_window_pattern", gemma3.PERIOD))
        if self.arch == "llama" and pattern is None:
            return window, [True] * layers  # Mistral 7B v0.1
        self.problems.append(f"{self.arch}.attention.sliding_window is {window}, but the file does "
                             "not say which layers it is for; Kilter cannot guess that.")
        return None, [False] * layers

    def _rope(self, head_dim: int) -> RopeSpec:
        """The rope of full-attention layers, with scaling from metadata or `rope_freqs.weight`."""
        theta = self.number("rope.freq_base",
                            gemma3.GLOBAL_THETA if self.arch == "gemma3" else 10000.0)
        kind = self.get("rope.scaling.type") or "none"
        if self.has(ROPE_FREQS):
            if kind != "none":
                self.problems.append(f"the file has both {ROPE_FREQS} and a {kind} rope scaling.")
            return self._llama3_rope(theta, head_dim)
        if kind == "none":
            # Files older than the type key name a linear factor alone.
            factor = self.number("rope.scale_linear", 1.0)
            return RopeSpec(theta=theta) if factor == 1.0 else RopeSpec(
                theta=theta, scaling="linear", factor=factor)
        factor = self.number("rope.scaling.factor", None)
        if kind == "linear":
            return RopeSpec(theta=theta, scaling="linear", factor=factor)
        if kind == "yarn":
            # YaRN's own 0.1 ln(s) + 1, times the extra factor that the file may ask for.
            extra = self.number("rope.scaling.attn_factor", 1.0)
            return RopeSpec(
                theta=theta, scaling="yarn", factor=factor,
                original_max_positions=self.integer("rope.scaling.original_context_length"),
                beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
                attention_factor=extra * (0.1 * math.log(max(factor, 1.0)) + 1.0))
        self.problems.append(f"{self.arch}.rope.scaling.type is {kind!r}; Kilter supports none, "
                             f"linear, yarn, and llama3 by {ROPE_FREQS}.")
        return RopeSpec(theta=theta)

    def _llama3_rope(self, theta: float, head_dim: int) -> RopeSpec:
        """Llama 3's scaling from the divisors of each frequency that the file stores.

        The parameters are not in the header, so those of the published models are tried; the one
        that gives the stored numbers is the one the file was made with.
        """
        stored = self.file.read(ROPE_FREQS)
        if isinstance(stored, QuantTensor) or stored.numel() != head_dim // 2:
            self.problems.append(f"{ROPE_FREQS} is not {head_dim // 2} plain numbers.")
            return RopeSpec(theta=theta)
        divisors = stored.to(torch.float64).flatten()
        if bool((divisors == 1).all()):
            return RopeSpec(theta=theta)
        guess = RopeSpec(theta=theta, scaling="llama3", factor=round(float(divisors.max()), 4),
                         low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
        for original in (8192, 4096, 2048, 16384, 32768):
            rope = replace(guess, original_max_positions=original)
            if torch.allclose(_llama3_divisors(rope, head_dim), divisors, rtol=1e-5, atol=0):
                return rope
        self.problems.append(f"{ROPE_FREQS} holds divisors that are not Llama 3's scaling with the "
                             "published low and high frequency factors 1 and 4; Kilter supports "
                             "no other frequency table. Use the Hugging Face checkpoint.")
        return guess


def _llama3_divisors(rope: RopeSpec, head_dim: int) -> Tensor:
    """What Llama 3.1 divides each of the d/2 frequencies by; float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = rope.original_max_positions / (2 * math.pi * rope.theta ** exponents)
    smooth = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
              ).clamp(0, 1)
    return 1 / ((1 - smooth) / rope.factor + smooth)
