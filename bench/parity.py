"""`python -m bench.parity`: the parity matrix. Any layout computes what one device computes.

A small model is trained for three AdamW steps with clipping from the same initial weights and the
same data, on one device and under every layout on up to 8 gloo ranks; losses, global gradient norms
and every parameter afterwards are compared. The tests run a part of this list.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.apply import Spread, apply
from kilter.parallel.context.plan import ContextConfig
from kilter.parallel.pipeline.executor import PipelineConfig
from kilter.parallel.recompute import Recompute
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import train_step

TOLERANCE = 1e-5
GLOBAL_MICRO_BATCHES = 8
TOKENS = 48  # of a micro-batch


@dataclass(frozen=True)
class Case:
    """One line of the matrix."""

    name: str
    layout: Layout
    model: str = "tied"
    recompute: Recompute = field(default_factory=Recompute)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3, eps=1e-6))

    @property
    def accumulation(self) -> int:
        return GLOBAL_MICRO_BATCHES // self.layout.dp


def tiny(tied: bool, layers: int = 4) -> ModelSpec:
    """A Llama-like model with grouped queries: 4 layers, 8 query and 4 KV heads."""
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=331, hidden_size=32, ffn_size=64, num_heads=8,
        num_kv_heads=4, head_dim=8, layers=(LayerSpec(RopeSpec()),) * layers, max_positions=64,
        tied_head=tied)


def everything() -> ModelSpec:
    """Biases, q and k norms, post norms, windows, one KV head: the Gemma and Qwen side."""
    rope = RopeSpec()
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=200, hidden_size=32, ffn_size=48, num_heads=4,
        num_kv_heads=1, head_dim=8, layers=(LayerSpec(rope, window=6), LayerSpec(rope)) * 2,
        max_positions=64, activation="gelu_tanh", norm_zero_centred=True, qk_norm=True,
        post_norms=True, qkv_bias=True, out_bias=True, mlp_bias=True, tied_head=True,
        embed_scale=3.0)


def smollm2() -> ModelSpec:
    """Four layers of SmolLM2-135M: 9 query and 3 KV heads, so virtual shards come in threes."""
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=49152, hidden_size=576, ffn_size=1536,
        num_heads=9, num_kv_heads=3, head_dim=64, layers=(LayerSpec(RopeSpec(theta=1e5)),) * 4,
        max_positions=8192, tied_head=True)


MODELS = {"tied": lambda: tiny(True), "untied": lambda: tiny(False), "everything": everything,
          "smollm2": smollm2, "deep": lambda: tiny(True, layers=9)}


def cases() -> list[Case]:
    """The whole matrix."""
    full, selective = Recompute("full"), Recompute("selective", parts=("attention", "norms"))
    found = [
        Case("ddp2", Layout(dp=2)),
        Case("ddp4", Layout(dp=4), "untied"),
        Case("ddp8", Layout(dp=8)),
        Case("zero1-2", Layout(dp=2, zero=1)),
        Case("zero1-4", Layout(dp=4, zero=1), "untied"),
        Case("zero2-2", Layout(dp=2, zero=2)),
        Case("zero2-8", Layout(dp=8, zero=2)),
        Case("zero3-2", Layout(dp=2, zero=3)),
        Case("zero3-4", Layout(dp=4, zero=3), "untied"),
        Case("zero3-8", Layout(dp=8, zero=3)),
        Case("hsdp 2x2 zero1", Layout(dp=4, replicate=2, zero=1)),
        Case("hsdp 2x2 zero2", Layout(dp=4, replicate=2, zero=2)),
        Case("hsdp 2x2 zero3", Layout(dp=4, replicate=2, zero=3)),
        Case("hsdp 2x4 zero3", Layout(dp=8, replicate=2, zero=3), "untied"),
        Case("tp2", Layout(tp=2, sequence_parallel=False)),
        Case("tp2+sp", Layout(tp=2)),
        Case("tp3+sp", Layout(tp=3)),
        Case("tp4", Layout(tp=4, sequence_parallel=False), "untied"),
        Case("tp4+sp", Layout(tp=4)),
        Case("tp8+sp", Layout(tp=8)),
        Case("tp8", Layout(tp=8, sequence_parallel=False), "untied"),
        Case("tp2+sp overlap", Layout(tp=2, overlap_tp=True)),
        Case("tp4+sp overlap", Layout(tp=4, overlap_tp=True), "untied"),
        Case("tp8+sp overlap", Layout(tp=8, overlap_tp=True)),
        Case("tp2 ddp2", Layout(tp=2, dp=2)),
        Case("tp2 zero1-2", Layout(tp=2, dp=2, zero=1)),
        Case("tp2+sp zero2-2", Layout(tp=2, dp=2, zero=2), "untied"),
        Case("tp2+sp zero3-2", Layout(tp=2, dp=2, zero=3)),
        Case("tp2 zero3-2", Layout(tp=2, dp=2, zero=3, sequence_parallel=False)),
        Case("tp4+sp zero3-2", Layout(tp=4, dp=2, zero=3)),
        Case("tp4+sp overlap zero3-2", Layout(tp=4, dp=2, zero=3, overlap_tp=True)),
        Case("tp2+sp hsdp 2x2", Layout(tp=2, dp=4, replicate=2, zero=3), "untied"),
        Case("recompute full", Layout(), recompute=full),
        Case("recompute every 2nd zero3-2", Layout(dp=2, zero=3),
             recompute=Recompute("full", every=2)),
        Case("recompute selective tp2+sp", Layout(tp=2), recompute=selective),
        Case("recompute full tp2+sp zero3-2", Layout(tp=2, dp=2, zero=3), recompute=full),
        Case("recompute full tp2+sp overlap zero2-2",
             Layout(tp=2, dp=2, zero=2, overlap_tp=True), recompute=full),
        Case("recompute mlp ddp2", Layout(dp=2), recompute=Recompute("selective", parts=("mlp",))),
        Case("muon zero3-2", Layout(dp=2, zero=3),
             optimizer=OptimizerConfig("muon", lr=1e-3, eps=1e-6)),
        Case("muon tp2+sp zero1-2", Layout(tp=2, dp=2, zero=1),
             optimizer=OptimizerConfig("muon", lr=1e-3, eps=1e-6)),
        Case("offload zero3-2", Layout(dp=2, zero=3),
             optimizer=OptimizerConfig(lr=1e-3, eps=1e-6, offload=True)),
        Case("everything tp2", Layout(tp=2, sequence_parallel=False), "everything"),
        Case("everything tp2+sp", Layout(tp=2), "everything"),
        Case("everything tp4+sp", Layout(tp=4), "everything"),
        Case("everything tp4+sp overlap", Layout(tp=4, overlap_tp=True), "everything"),
        Case("everything tp4 zero3-2", Layout(tp=4, dp=2, zero=3), "everything"),
        Case("everything zero3-4", Layout(dp=4, zero=3), "everything"),
        Case("pp2 naive", Layout(pp=2), pipeline=PipelineConfig("naive")),
        Case("pp2 gpipe", Layout(pp=2), "untied", pipeline=PipelineConfig("gpipe")),
        Case("pp4 1f1b", Layout(pp=4)),
        Case("pp3 1f1b uneven", Layout(pp=3), "deep", pipeline=PipelineConfig(layers=(2, 5, 2))),
        Case("pp2 interleaved", Layout(pp=2), pipeline=PipelineConfig("interleaved")),
        Case("pp4 interleaved", Layout(pp=4), "deep", pipeline=PipelineConfig("interleaved")),
        Case("pp4 zb-h1", Layout(pp=4), "untied", pipeline=PipelineConfig("zb-h1")),
        Case("pp2 zb-v", Layout(pp=2), pipeline=PipelineConfig("zb-v")),
        Case("pp4 zb-v", Layout(pp=4), "deep", pipeline=PipelineConfig("zb-v")),
        Case("pp2 dualpipe-v", Layout(pp=2), pipeline=PipelineConfig("dualpipe-v")),
        Case("pp4 dualpipe-v", Layout(pp=4), "deep", pipeline=PipelineConfig("dualpipe-v")),
        Case("pp2 1f1b ddp2", Layout(pp=2, dp=2)),
        Case("pp2 zb-h1 zero1-2", Layout(pp=2, dp=2, zero=1), pipeline=PipelineConfig("zb-h1")),
        Case("pp2 1f1b zero2-2", Layout(pp=2, dp=2, zero=2)),
        Case("pp2 zb-v zero2-2", Layout(pp=2, dp=2, zero=2), pipeline=PipelineConfig("zb-v")),
        Case("pp2 1f1b zero3-2", Layout(pp=2, dp=2, zero=3)),
        Case("pp2 zb-h1 zero3-2", Layout(pp=2, dp=2, zero=3), pipeline=PipelineConfig("zb-h1")),
        Case("pp2 zb-v hsdp 2x2", Layout(pp=2, dp=4, replicate=2, zero=3),
             pipeline=PipelineConfig("zb-v")),
        Case("pp2 interleaved tp2+sp", Layout(pp=2, tp=2), pipeline=PipelineConfig("interleaved")),
        Case("pp2 zb-v tp2+sp", Layout(pp=2, tp=2), "untied", pipeline=PipelineConfig("zb-v")),
        Case("pp2 zb-v tp2+sp overlap recompute selective", Layout(pp=2, tp=2, overlap_tp=True),
             "untied", pipeline=PipelineConfig("zb-v"), recompute=selective),
        Case("pp2 1f1b tp2+sp zero3-2", Layout(pp=2, tp=2, dp=2, zero=3)),
        Case("pp2 zb-h1 tp2+sp overlap zero3-2", Layout(pp=2, tp=2, dp=2, zero=3, overlap_tp=True),
             pipeline=PipelineConfig("zb-h1")),
        Case("pp2 zb-h1 tp2 zero1-2",
             Layout(pp=2, tp=2, dp=2, zero=1, sequence_parallel=False),
             pipeline=PipelineConfig("zb-h1")),
        Case("pp2 1f1b recompute full", Layout(pp=2), recompute=full),
        Case("pp2 zb-v recompute selective", Layout(pp=2), recompute=selective,
             pipeline=PipelineConfig("zb-v")),
        Case("everything pp2 zb-h1 tp4+sp", Layout(pp=2, tp=4), "everything",
             pipeline=PipelineConfig("zb-h1")),
        Case("everything pp4 dualpipe-v", Layout(pp=2, dp=2, zero=3), "everything",
             pipeline=PipelineConfig("dualpipe-v")),
        Case("cp2 ring contiguous", Layout(cp=2), context=ContextConfig("ring", "contiguous")),
        Case("cp4 ring zigzag", Layout(cp=4), "untied"),
        Case("cp3 ring striped", Layout(cp=3), context=ContextConfig("ring", "striped")),
        Case("cp4 ulysses", Layout(cp=4), context=ContextConfig("ulysses", "contiguous")),
        Case("cp2 all-gather zigzag", Layout(cp=2), "untied",
             context=ContextConfig("all_gather", "zigzag")),
        Case("cp4 all-gather balanced", Layout(cp=4),
             context=ContextConfig("all_gather", "balanced", block=8)),
        Case("cp2 ring ddp2", Layout(cp=2, dp=2)),
        Case("cp2 striped zero1-2", Layout(cp=2, dp=2, zero=1),
             context=ContextConfig("ring", "striped")),
        Case("cp2 ulysses zero2-2", Layout(cp=2, dp=2, zero=2),
             context=ContextConfig("ulysses", "contiguous")),
        Case("cp2 ring zero3-2", Layout(cp=2, dp=2, zero=3)),
        Case("cp4 ring zero3 over cp", Layout(cp=4, zero=3)),
        Case("cp2 ring hsdp 2x2", Layout(cp=2, dp=4, replicate=2, zero=3), "untied"),
        Case("cp2 ring tp2+sp", Layout(cp=2, tp=2)),
        Case("cp2 ring tp4+sp overlap", Layout(cp=2, tp=4, overlap_tp=True)),
        Case("cp2 ulysses tp2+sp", Layout(cp=2, tp=2),
             context=ContextConfig("ulysses", "contiguous")),
        Case("cp2 all-gather tp4", Layout(cp=2, tp=4, sequence_parallel=False), "untied",
             context=ContextConfig("all_gather", "zigzag")),
        Case("cp2 ring pp2 1f1b", Layout(cp=2, pp=2)),
        Case("cp2 ulysses pp2 zb-v", Layout(cp=2, pp=2),
             context=ContextConfig("ulysses", "contiguous"), pipeline=PipelineConfig("zb-v")),
        Case("cp2 striped pp2 tp2+sp", Layout(cp=2, pp=2, tp=2),
             context=ContextConfig("ring", "striped")),
        Case("cp2 ring pp2 tp2+sp zero3 over cp", Layout(cp=2, pp=2, tp=2, zero=3), "untied",
             pipeline=PipelineConfig("interleaved"), recompute=selective),
        Case("cp2 ring pp2 zero3-2", Layout(cp=2, pp=2, dp=2, zero=3)),
        Case("cp2 ring tp2+sp zero3-2", Layout(cp=2, tp=2, dp=2, zero=3)),
        Case("cp2 all-gather pp2 zero1-2", Layout(cp=2, pp=2, dp=2, zero=1),
             context=ContextConfig("all_gather", "balanced", block=8),
             pipeline=PipelineConfig("zb-h1")),
        Case("cp2 ring recompute full", Layout(cp=2), recompute=full),
        Case("everything cp2 ring", Layout(cp=2), "everything"),
        Case("everything cp4 ulysses", Layout(cp=4), "everything",
             context=ContextConfig("ulysses", "contiguous")),
        Case("everything cp2 all-gather tp2+sp", Layout(cp=2, tp=2), "everything",
             context=ContextConfig("all_gather", "striped")),
        Case("smollm2 cp3 ulysses zero3", Layout(cp=3, zero=3), "smollm2",
             context=ContextConfig("ulysses", "contiguous")),
        Case("smollm2 cp2 ring tp3+sp", Layout(cp=2, tp=3), "smollm2"),
        Case("muon pp2 zero3-2", Layout(pp=2, dp=2, zero=3),
             optimizer=OptimizerConfig("muon", lr=1e-3, eps=1e-6)),
        Case("smollm2 pp2 1f1b", Layout(pp=2), "smollm2"),
        Case("smollm2 pp2 zb-v tp3+sp", Layout(pp=2, tp=3), "smollm2",
             pipeline=PipelineConfig("zb-v")),
        Case("smollm2 zero3-2", Layout(dp=2, zero=3), "smollm2"),
        Case("smollm2 tp3+sp", Layout(tp=3), "smollm2"),
        Case("smollm2 tp3+sp overlap", Layout(tp=3, overlap_tp=True), "smollm2"),
        Case("smollm2 tp2+sp zero2-2", Layout(tp=2, dp=2, zero=2), "smollm2"),
    ]
    return found


@dataclass(frozen=True)
class Rows:
    """A micro-batch made of given sequences."""

    sequences: list[list[int]]
    targets_T: Tensor

    @property
    def valid(self) -> int:
        return int((self.targets_T >= 0).sum())

    def batch(self, device: torch.device) -> Batch:
        return Batch.of(self.sequences, device)


def data(vocab: int, seed: int = 5) -> list[list[Rows]]:
    """Three steps of micro-batches: documents of different lengths, very different numbers of
    valid targets."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(3):
        micro_batches = []
        for m in range(GLOBAL_MICRO_BATCHES):
            cuts = sorted(torch.randperm(TOKENS - 1, generator=generator)[:m % 3].add(1).tolist())
            tokens = torch.randint(vocab, (TOKENS,), generator=generator)
            targets = torch.full((TOKENS,), -100)
            for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True):
                targets[a:b - 1] = tokens[a + 1:b]
            targets[torch.rand(TOKENS, generator=generator) < m / 9] = -100
            micro_batches.append(Rows(
                [tokens[a:b].tolist() for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)],
                targets))
        steps.append(micro_batches)
    return steps


@dataclass(frozen=True)
class Outcome:
    """What a run came to; parameters are of the rank that owns them, as (slices, values)."""

    losses: list[float]
    norms: list[float]
    parts: dict[str, list[tuple[tuple[slice, ...], Tensor]]]


def train(case: Case, steps: int = 3) -> Outcome:
    """Runs a case in this rank (alone if no process group is there)."""
    torch.manual_seed(0)
    spec = MODELS[case.model]()
    mesh = Mesh(case.layout) if case.layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        model = Decoder(spec)
    spread = apply(model, mesh, recompute=case.recompute, pipeline=case.pipeline,
                   context=case.context)
    spread.initialise(seed=1)
    optimizer = Optimizer(spread.held, case.optimizer, mesh.axis("dp_cp_tp"))
    losses, norms = [], []
    for micro_batches in data(spec.vocab_size)[:steps]:
        mine = micro_batches[mesh.axis("dp").index::mesh.axis("dp").size]
        result = train_step(spread, optimizer, mine, max_norm=0.5)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return Outcome(losses, norms, owned_parts(spread))


def owned_parts(spread: Spread) -> dict[str, list[tuple[tuple[slice, ...], Tensor]]]:
    """The elements this rank owns of every trained parameter, with their place in the whole."""
    return {h.name: [(box.slices, part.detach().clone())
                     for box, own, part in h.shard.parts(h.tensor) if own] for h in spread.held}


@dataclass(frozen=True)
class Difference:
    """Largest differences to one device: losses and norms relative, parameters absolute."""

    loss: float
    norm: float
    parameter: float

    @property
    def good(self) -> bool:
        return max(self.loss, self.norm, self.parameter) <= TOLERANCE


def compare(outcomes: Sequence[Outcome], one: Outcome) -> Difference:
    """All ranks' outcomes against one device's.

    Raises:
        ValueError: if the ranks disagree about loss or norm, or do not own every element once.
    """
    first = outcomes[0]
    if any(o.losses != first.losses or o.norms != first.norms for o in outcomes):
        raise ValueError("The ranks do not agree on losses and norms.")
    largest = 0.0
    for name, parts in one.parts.items():
        ((_, whole),) = parts
        seen = torch.zeros_like(whole)
        for outcome in outcomes:
            for place, part in outcome.parts.get(name, []):
                seen[place] += 1
                if part.numel():
                    largest = max(largest, float((part - whole[place]).abs().max()))
        if not bool((seen == 1).all()):
            raise ValueError(f"The ranks own elements of {name} {int(seen.min())} to "
                             f"{int(seen.max())} times.")
    return Difference(
        max(abs(a - b) / abs(b) for a, b in zip(first.losses, one.losses, strict=True)),
        max(abs(a - b) / abs(b) for a, b in zip(first.norms, one.norms, strict=True)), largest)


def main() -> int:
    """Prints the matrix; exit code 1 if a line is beyond the tolerance."""
    from bench.page import write_section
    from tests.ranks import RankPool

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--write", action="store_true", help="write the table to the docs page")
    args = parser.parse_args()
    chosen = [c for c in cases() if not args.names or any(n in c.name for n in args.names)]
    pool = RankPool()
    ones: dict[tuple[str, str], Outcome] = {}
    lines = ["| layout | ranks | model | loss | grad norm | parameters |",
             "|---|---|---|---|---|---|"]
    print("\n".join(lines))
    bad = 0
    for case in chosen:
        key = (case.model, case.optimizer.name)
        if key not in ones:
            ones[key] = train(Case("one", Layout(), case.model, optimizer=case.optimizer))
        if case.layout.world == 1:
            outcomes = [train(case)]
        else:
            outcomes = pool.run(case.layout.world, train, case, timeout=300)
        d = compare(outcomes, ones[key])
        bad += not d.good
        line = (f"| {case.name} | {case.layout.world} | {case.model} | {d.loss:.1e} | {d.norm:.1e} "
                f"| {d.parameter:.1e} |{'' if d.good else ' BEYOND'}")
        lines.append(line)
        print(line, flush=True)
    pool.close()
    print(f"{len(chosen) - bad} of {len(chosen)} layouts within {TOLERANCE:g} of one device.")
    if args.write and not args.names:
        write_section("parity", "\n".join(lines) + "\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
