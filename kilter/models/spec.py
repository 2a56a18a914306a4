"""`ModelSpec`: the facts of an architecture, and nothing about where or how it runs.

A bridge (`kilter.weights`) makes one from a Hugging Face config or a GGUF header; the model
definition, the engine, the trainer and the planner all read the same object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer.

    The rotation is the "half-split" form: element ``j`` pairs with ``j + head_dim/2``.
    ``linear`` is position interpolation (arXiv 2306.15595), ``yarn`` is arXiv 2309.00071,
    ``llama3`` is the frequency-dependent scaling published with Llama 3.1.
    """

    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn: context length before extension, tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dims
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by this


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: its attention window and which rope it uses."""

    rope: RopeSpec
    window: int | None = None  # a token sees itself and the window-1 before it; None: all


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and kinds of one decoder-only model. Immutable; every field is a fact of the config.

    Raises:
        ValueError: at construction, listing every inconsistency at once.
    """

    architecture: str  # Hugging Face `architectures[0]`, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_positions: int  # longest context the config promises, tokens
    activation: Activation = "silu"
    norm_eps: float = 1e-5
    norm_zero_centred: bool = False  # weight is stored as w, applied as (1 + w) (Gemma)
    qk_norm: bool = False  # RMSNorm on each head's q and k before rope (Qwen3, Gemma 3)
    post_norms: bool = False  # RMSNorm on each block's output before the residual add (Gemma)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False  # the output head is the embedding
    embed_scale: float = 1.0  # embeddings are multiplied by this (Gemma: sqrt(hidden))
    query_scale: float = field(default=0.0)  # softmax scale; 0 means head_dim ** -0.5

    def __post_init__(self) -> None:
        if self.query_scale == 0.0:
            object.__setattr__(self, "query_scale", 1.0 / math.sqrt(self.head_dim))
        problems = []
        for name in ("vocab_size", "hidden_size", "ffn_size", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions"):
            if getattr(self, name) <= 0:
                problems.append(f"{name} is {getattr(self, name)} but must be positive")
        if not self.layers:
            problems.append("the model has no layers")
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads "
                            f"({self.num_kv_heads})")
        if self.head_dim % 2:
            problems.append(f"head_dim ({self.head_dim}) is odd, so rope cannot pair its halves")
        for i, layer in enumerate(self.layers):
            if layer.window is not None and layer.window <= 0:
                problems.append(f"layer {i} has window {layer.window}; it must be positive")
        if problems:
            raise ValueError(f"This {self.architecture} config is inconsistent: "
                             + "; ".join(problems) + ".")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head (R in tensor names)."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused qkv weight: per KV group ``[q…q, k, v]``, each ``head_dim`` rows."""
        return self.num_kv_heads * (self.queries_per_kv + 2) * self.head_dim

    @property
    def virtual_shards(self) -> int:
        """Parts in which every sum over heads or over the feed-forward width is cut, however many
        ranks share it: the most, up to 8, that whole KV groups (or equal shares of a group's
        queries) and equal shares of the feed-forward width make. A forward's bits are then the
        same for every number of ranks that does not exceed it."""
        return max(v for v in range(1, 9) if self.ffn_size % v == 0 and (
            self.num_kv_heads % v == 0
            or (v % self.num_kv_heads == 0 and self.num_heads % v == 0)))

    @property
    def kv_elements_per_token(self) -> int:
        """Elements (not bytes) the KV cache holds per token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
