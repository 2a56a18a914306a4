"""`kilter inspect MODEL`: what a model is and what it costs, from its headers alone.

    parameters        counted from the shapes of the tensors, by part
    KV bytes          2 · layers · KV heads · head_dim · bytes of one element, per token
    FLOPs per token   2 · (elements of all matrices a token is multiplied with)
                      + Σ over layers 4 · H · d · min(context, window)

The FLOPs are of one forward pass for one token that sees `context` tokens, itself included: a
multiply-add counts 2, and q·kᵀ and p·v are 2 · H · d each per token seen. This is the count of
arXiv 2104.04473 (appendix) without its factor 3 for training, for one token in place of a batch of
whole sequences; norms, rope, softmax and the activation are left out, as there.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kilter.report.text import short, size, table

if TYPE_CHECKING:
    from kilter.models.spec import LayerSpec, ModelSpec

PARTS = ("embedding", "attention", "mlp", "norms", "head")
# As `kilter.ops.packed` holds them: int8 has a 16-bit scale per 32 weights, int4 a minimum too.
BITS_PER_WEIGHT = {"fp32": 32, "bf16": 16, "int8": 8 + 16 / 32, "int4": 4 + 2 * 16 / 32}
VALUE = "value.weight"  # what reward models have in the place of an output head
_DEFAULT_CONTEXT = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a pulled model's name, a folder or a .gguf file")
    parser.add_argument("--context", type=int, metavar="TOKENS",
                        help="tokens that the last one sees, for FLOPs and the KV cache (default: "
                             f"{_DEFAULT_CONTEXT}, or the model's longest if that is less)")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    from kilter.weights.bridge import open_model
    from kilter.weights.pull import resolve

    source = open_model(resolve(args.model), reward=True)
    spec = source.spec
    if source.is_reward:  # nothing but the first layer's input is made of the embedding
        spec = replace(spec, architecture=source.family.reward, tied_head=False)
    infos = [source.info(name) for name in source.names()]
    facts = {
        "path": str(source.path),
        "format": {"hf": "Hugging Face folder", "gguf": "GGUF file"}[source.kind],
        **spec_facts(spec, {info.name: info.shape for info in infos}, args.context),
        "notes": list(source.notes),
    }
    facts["bytes"] = {"in the file": sum(info.nbytes for info in infos), **facts["bytes"]}
    facts["stored_as"] = dict(Counter("+".join(info.types) for info in infos))
    print(json.dumps(facts, indent=2) if args.json else _page(facts))
    return 0


def spec_facts(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], context: int | None = None
               ) -> dict[str, Any]:
    """Everything that follows from a spec and the shapes of its parameters (by their names).

    Raises:
        ValueError: if `context` is not within 1 … the model's longest context.
    """
    if context is None:
        context = min(_DEFAULT_CONTEXT, spec.max_positions)
    if not 1 <= context <= spec.max_positions:
        raise ValueError(f"--context is {context}; this model takes 1 to {spec.max_positions} "
                         "tokens.")
    parts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        parts[part_of(name)] += math.prod(shape)
    total = sum(parts.values())
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    multiplied = sum(matrices.values()) - (0 if spec.tied_head else matrices["embed.weight"])
    seen = [min(context, layer.window or context) for layer in spec.layers]
    flops = {"matrices": 2 * multiplied,
             "attention": 4 * spec.num_heads * spec.head_dim * sum(seen)}
    kv_layer = 2 * spec.num_kv_heads * spec.head_dim  # elements per token
    return {
        "architecture": spec.architecture,
        "sizes": {"layers": spec.num_layers, "hidden": spec.hidden_size, "ffn": spec.ffn_size,
                  "query_heads": spec.num_heads, "kv_heads": spec.num_kv_heads,
                  "head_dim": spec.head_dim, "vocabulary": spec.vocab_size,
                  "longest_context": spec.max_positions, "tied_head": spec.tied_head,
                  "value_head": VALUE in shapes},
        "parameters": {**parts, "total": total},
        "bytes": stored_bytes(matrices, total),
        "context": context,
        "kv_bytes_per_token": {"fp32": 4 * spec.kv_elements_per_token,
                               "16-bit": 2 * spec.kv_elements_per_token},
        "kv_bytes_at_context": {"fp32": 4 * spec.kv_elements_per_token * context,
                                "16-bit": 2 * spec.kv_elements_per_token * context},
        "kv_bytes_inside_windows": {"fp32": 4 * kv_layer * sum(seen),
                                    "16-bit": 2 * kv_layer * sum(seen)},
        "flops_per_token": {**flops, "total": sum(flops.values())},
        "layer_kinds": [{"layers": layers, **asdict(kind)}
                        for kind, layers in layer_kinds(spec).items()],
    }


def part_of(name: str) -> str:
    """Which of `PARTS` a parameter of our decoder counts to; biases count with their matrix."""
    if "norm" in name:
        return "norms"
    if name.startswith("layers."):
        return "attention" if ".attn." in name else "mlp"
    return {"embed": "embedding", "head": "head", "value": "head"}[name.split(".")[0]]


def stored_bytes(matrices: Mapping[str, int], total: int) -> dict[str, int]:
    """Bytes of the whole model with its matrices held in each format; all else is fp32."""
    elements = sum(matrices.values())
    rest = 4 * (total - elements)
    return {name: rest + math.ceil(elements * bits / 8)
            for name, bits in BITS_PER_WEIGHT.items()}


def layer_kinds(spec: ModelSpec) -> dict[LayerSpec, str]:
    """Each distinct kind of layer with the layers that are of it, as in ``0-4, 6-10``."""
    kinds: dict[LayerSpec, list[list[int]]] = {}
    for i, layer in enumerate(spec.layers):
        runs = kinds.setdefault(layer, [])
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return {kind: ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
                            for run in runs) for kind, runs in kinds.items()}


def _page(facts: dict[str, Any]) -> str:
    s, parameters, context = facts["sizes"], facts["parameters"], facts["context"]
    total = parameters["total"]
    stored = ", ".join(f"{n} {kind}" for kind, n in facts["stored_as"].items())
    head = ("a value head, which scores texts" if s["value_head"] else
            "the output head is the embedding" if s["tied_head"] else "own output head")
    lines = [
        f"{facts['architecture']}, {facts['format']} {facts['path']}",
        f"  {s['layers']} layers, hidden {s['hidden']}, ffn {s['ffn']}, {s['query_heads']} query "
        f"and {s['kv_heads']} KV heads of {s['head_dim']}, vocabulary {s['vocabulary']}, "
        f"context {s['longest_context']}, {head}",
        *(f"  Note: {note}" for note in facts["notes"]),
        "", "Parameters",
        table([(part, f"{n:,}", f"{n / total:.1%}") for part, n in parameters.items()]),
        "", f"Bytes of the weights (stored as {stored})",
        table([(name, f"{n:,}", size(n)) for name, n in facts["bytes"].items()]),
        "", f"KV cache (context {context:,})",
        table([(f"{name} per token", f"{n:,}", size(n))
               for name, n in facts["kv_bytes_per_token"].items()]
              + [(f"{name} for {context:,} tokens", f"{n:,}", size(n))
                 for name, n in facts["kv_bytes_at_context"].items()]),
    ]
    if facts["kv_bytes_inside_windows"] != facts["kv_bytes_at_context"]:
        lines.append("  The next token still sees " + ", ".join(
            f"{size(n)} of it in {name}" for name, n in facts["kv_bytes_inside_windows"].items())
            + "; the rest is outside the windows.")
    lines += [
        "", f"FLOPs per token (context {context:,}): 2 x matrix elements + 4 x H x d x tokens seen",
        table([(name, f"{n:,}", short(n)) for name, n in facts["flops_per_token"].items()]),
        "", "Layers",
        table([(kind["layers"], str(kind["window"] or "all"), _rope(kind["rope"]))
               for kind in facts["layer_kinds"]], header=("layers", "window", "rope"), left=3),
    ]
    return "\n".join(lines)


def _rope(rope: dict[str, Any]) -> str:
    text = f"theta {rope['theta']:,.0f}"
    if rope["scaling"] != "none":
        text += f", {rope['scaling']} x {rope['factor']:g}"
    return text
