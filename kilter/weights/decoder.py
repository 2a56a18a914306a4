"""Where our decoder's parameters are found: one list of mappings, and a name table per format.

The computation is the same for every family, so one function lists the parameters of a
`ModelSpec`; what differs between Hugging Face folders and GGUF files is names, and two storage
conventions of GGUF (neighbour-pair rope rows in llama, norm weights plus one in Gemma).
"""

from __future__ import annotations

from dataclasses import dataclass

from kilter.models.spec import ModelSpec
from kilter.weights.mappings import (
    FusedQKV,
    GatedMLP,
    ParameterMap,
    PlusOne,
    Rename,
    TiedHead,
)


@dataclass(frozen=True)
class Names:
    """Tensor names of a format, without ``.weight`` and ``.bias``; ``{i}`` is the layer."""

    embed: str
    norm: str
    head: str
    attn_norm: str
    q: str
    k: str
    v: str
    out: str
    q_norm: str
    k_norm: str
    attn_post_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    mlp_post_norm: str
    interleaved_qk: bool = False  # rows of q and k for a rope over neighbours (GGUF's llama)
    norms_plus_one: bool = False  # zero-centred norm weights are stored as 1 + w (GGUF)


def hugging_face(spec: ModelSpec, base: str = "model.", head: str = "lm_head") -> Names:
    """Names in a Hugging Face checkpoint; ``base`` stands before the decoder's names.

    Families with norms after their blocks call the norm between attention and MLP
    ``pre_feedforward_layernorm``; the others call that one ``post_attention_layernorm``.
    """
    layer = base + "layers.{i}."
    mlp_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    return Names(
        embed=base + "embed_tokens", norm=base + "norm", head=head,
        attn_norm=layer + "input_layernorm",
        q=layer + "self_attn.q_proj", k=layer + "self_attn.k_proj", v=layer + "self_attn.v_proj",
        out=layer + "self_attn.o_proj",
        q_norm=layer + "self_attn.q_norm", k_norm=layer + "self_attn.k_norm",
        attn_post_norm=layer + "post_attention_layernorm", mlp_norm=layer + mlp_norm,
        gate=layer + "mlp.gate_proj", up=layer + "mlp.up_proj", down=layer + "mlp.down_proj",
        mlp_post_norm=layer + "post_feedforward_layernorm")


def gguf(spec: ModelSpec, interleaved_qk: bool) -> Names:
    """Names in a GGUF file."""
    layer = "blk.{i}."
    return Names(
        embed="token_embd", norm="output_norm", head="output",
        attn_norm=layer + "attn_norm",
        q=layer + "attn_q", k=layer + "attn_k", v=layer + "attn_v", out=layer + "attn_output",
        q_norm=layer + "attn_q_norm", k_norm=layer + "attn_k_norm",
        attn_post_norm=layer + "post_attention_norm", mlp_norm=layer + "ffn_norm",
        gate=layer + "ffn_gate", up=layer + "ffn_up", down=layer + "ffn_down",
        mlp_post_norm=layer + "post_ffw_norm",
        interleaved_qk=interleaved_qk, norms_plus_one=spec.norm_zero_centred)


def decoder_mappings(spec: ModelSpec, names: Names, reward: bool = False) -> list[ParameterMap]:
    """A mapping for every parameter of ``Decoder(spec)``, in the order of the computation; of a
    reward model, which has ``value.weight`` [1, D] under the head's name."""
    table = (spec.vocab_size, spec.hidden_size)
    embed, head = names.embed + ".weight", names.head + ".weight"
    maps: list[ParameterMap] = [
        TiedHead("embed.weight", embed, head, table) if spec.tied_head and not reward
        else Rename("embed.weight", embed, table)]
    for i in range(spec.num_layers):
        maps += _layer_mappings(spec, names, i)
    maps.append(_norm(names)("norm.weight", names.norm + ".weight", (spec.hidden_size,)))
    if reward:
        maps.append(Rename("value.weight", head, (1, spec.hidden_size)))
    elif not spec.tied_head:
        maps.append(Rename("head.weight", head, table))
    return maps


def _norm(names: Names) -> type[Rename]:
    return PlusOne if names.norms_plus_one else Rename


def _layer_mappings(spec: ModelSpec, names: Names, i: int) -> list[ParameterMap]:
    width, ffn, d = spec.hidden_size, spec.ffn_size, spec.head_dim
    maps: list[ParameterMap] = []

    def norm(ours: str, theirs: str, size: int) -> None:
        maps.append(_norm(names)(f"layers.{i}.{ours}.weight", f"{theirs.format(i=i)}.weight",
                                 (size,)))

    def kinds(bias: bool, columns: int) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors of a linear with the shapes behind their rows."""
        return [("weight", (columns,)), ("bias", ())] if bias else [("weight", (columns,))]

    def linear(ours: str, theirs: str, rows: int, columns: int, bias: bool) -> None:
        for kind, tail in kinds(bias, columns):
            maps.append(Rename(f"layers.{i}.{ours}.{kind}", f"{theirs.format(i=i)}.{kind}",
                               (rows, *tail)))

    norm("attn_norm", names.attn_norm, width)
    for kind, tail in kinds(spec.qkv_bias, width):
        q, k, v = (f"{name.format(i=i)}.{kind}" for name in (names.q, names.k, names.v))
        maps.append(FusedQKV(f"layers.{i}.attn.qkv.{kind}", q, k, v, groups=spec.num_kv_heads,
                             queries=spec.queries_per_kv, head_dim=d, tail=tail,
                             interleaved=names.interleaved_qk))
    if spec.qk_norm:
        norm("attn.q_norm", names.q_norm, d)
        norm("attn.k_norm", names.k_norm, d)
    linear("attn.out", names.out, width, spec.num_heads * d, spec.out_bias)
    if spec.post_norms:
        norm("attn_post_norm", names.attn_post_norm, width)
    norm("mlp_norm", names.mlp_norm, width)
    for kind, tail in kinds(spec.mlp_bias, width):
        gate, up = (f"{name.format(i=i)}.{kind}" for name in (names.gate, names.up))
        maps.append(GatedMLP(f"layers.{i}.mlp.gate_up.{kind}", gate, up, ffn=ffn, tail=tail))
    linear("mlp.down", names.down, width, ffn, spec.mlp_bias)
    if spec.post_norms:
        norm("mlp_post_norm", names.mlp_post_norm, width)
    return maps
