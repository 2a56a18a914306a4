"""What an update of the rollout's weights sends, by plan, beside a gather of whole parameters.

    python -m bench.reshard [--model 8b] [--format fp32] [--write]

For each training layout and tensor parallelism of rollouts: the bytes that the busiest and the
average rank receive and send, and what is alive at once above shards. *Least* is Kilter's plan, for
replicas of neighbouring ranks and for those that fit the shards best; *whole* is a gather of whole
parameters. These are sums over plans' messages; that they are what ranks really send is a test
(tests/rl/test_reshard.py). ``--write`` puts the table into docs/resharding.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from bench.page import DOCS, write_section
from kilter.mesh.layout import Layout
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.rl.reshard_layout import (
    Groups,
    consecutive_groups,
    nested_groups,
    rollout_formats,
    rollout_needs,
    rollout_parts,
    trainer_shards,
)
from kilter.rl.reshard_plan import Plan, full_gather, make_plan

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES: list[tuple[Layout, tuple[int, ...]]] = [
    (Layout(dp=8), (1, 2, 4)),
    (Layout(dp=8, zero=2), (2,)),
    (Layout(dp=8, zero=3), (1, 2, 4, 8)),
    (Layout(dp=8, replicate=2, zero=3), (1, 2, 4)),
    (Layout(dp=4, tp=2, zero=3), (1, 2, 4)),
    (Layout(dp=2, tp=4, zero=3), (1, 2, 4)),
    (Layout(dp=2, tp=4), (1, 2, 4)),
    (Layout(pp=2, dp=2, tp=2), (1, 2, 4)),
    (Layout(dp=2, tp=8), (2,)),
]


def _model(layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> ModelSpec:
    return ModelSpec("Qwen3ForCausalLM", vocab, hidden, ffn, heads, 8, 128,
                     (LayerSpec(RopeSpec()),) * layers, 4096, qk_norm=True)


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "8b": lambda: _model(36, 4096, 12288, 32, 151936),  # the sizes of Qwen3 8B
    "32b": lambda: _model(64, 5120, 25600, 64, 151936),  # and 32B
}


def stage_of(layers: int, stages: int) -> Callable[[str], int]:
    """Equal runs of layers; the embedding with the first, norm and head with the last."""
    def stage(name: str) -> int:
        first, *rest = name.split(".")
        if first == "layers":
            return int(rest[0]) * stages // layers
        return 0 if first == "embed" else stages - 1

    return stage


def mean_and_most(values: list[int]) -> str:
    mean, most = sum(values) / len(values), max(values)
    return f"{mean / 1e9:.2f}" if most <= 1.005 * mean else f"{mean / 1e9:.2f} ({most / 1e9:.2f})"


def rows(spec: ModelSpec, dtype: torch.dtype) -> list[list[str]]:
    with torch.device("meta"):
        model = Decoder(spec)
    formats = rollout_formats(model, dtype)
    found = []
    for layout, degrees in CASES:
        held = trainer_shards(model, layout, stage_of(spec.num_layers, layout.pp))
        ranks = range(layout.world)
        whole = full_gather(held, formats)
        for degree in degrees:
            parts = rollout_parts(model, degree)

            def plan(groups: Groups, parts=parts, held=held) -> Plan:  # type: ignore[no-untyped-def]
                return make_plan(held, rollout_needs(parts, groups), formats)

            near = plan(consecutive_groups(layout.world, degree))
            nested = nested_groups(held, parts)
            best = plan(nested)
            same = nested == consecutive_groups(layout.world, degree)
            found.append([
                str(layout), str(degree),
                mean_and_most([near.received_bytes(r) for r in ranks]),
                "the same" if same else mean_and_most([best.received_bytes(r) for r in ranks]),
                mean_and_most([best.sent_bytes(r) for r in ranks]),
                mean_and_most([whole.received_bytes(r) for r in ranks]),
                f"{max(best.peak_bytes(r) for r in ranks) / 1e9:.2f}",
                f"{max(whole.needed_bytes(r) for r in ranks) / 1e9:.2f}"])
    return found


HEADINGS = ["training", "rollout tp", "received, least", "with nested groups", "sent",
            "received, whole", "alive, least", "alive, whole"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--format", choices=FORMATS, default="fp32")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|" + "---:|" * (len(HEADINGS) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows(MODELS[args.model](), FORMATS[args.format])]
    print("\n".join(lines))
    print(f"GB per rank, mean (most); {time.perf_counter() - start:.1f} s of planning")
    if args.write:
        write_section("reshard", "\n".join(lines), DOCS / "resharding.md")


if __name__ == "__main__":
    main()
