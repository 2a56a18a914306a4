"""`python -m bench.long_context [--tokens 32768] [--ranks 4]`: what a long document costs a rank.

One decoder layer with its loss, forward and backward over one document, on one rank and spread by
each method; of all ranks the largest of

    kept     bytes that autograd holds between forward and backward, parameters not among them
    peak     resident memory at its largest, over what it was before the pass
    seconds  of forward and backward; the ranks of one machine share its cores

and what a rank sends, from the closed form. Writes bench/results/long_context.json and, of the ring
with zigzag rows, a trace for ui.perfetto.dev, bench/results/ring-trace.json: per rank a track for
exchanges, from when they are posted to when they are known to be done, one for computing, and one
for waiting, which is the part of an exchange that computing did not hide.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kilter.comm.collectives import barrier
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.context.plan import ContextConfig, spread_batch, wire_bytes
from kilter.report.machine import cpu_name
from kilter.report.timeline import Span, perfetto

RESULTS = Path(__file__).parent / "results"
CONFIGS = [ContextConfig("ring", "contiguous"), ContextConfig("ring", "zigzag"),
           ContextConfig("ring", "striped"), ContextConfig("ulysses", "contiguous"),
           ContextConfig("all_gather", "zigzag"), ContextConfig("all_gather", "balanced")]


@dataclass
class Cost:
    """Of one rank."""

    kept: int = 0
    peak: int = 0
    seconds: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # (what, start, end)


def layer(tokens: int) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=512, hidden_size=128, ffn_size=256, num_heads=4,
        num_kv_heads=2, head_dim=32, layers=(LayerSpec(RopeSpec()),), max_positions=tokens,
        tied_head=True)


def measure(tokens: int, config: ContextConfig) -> Cost:
    """In each rank."""
    world = torch.distributed.get_world_size()
    axis = Mesh(Layout(cp=world) if world > 1 else Layout()).axis("cp")
    decoder = Decoder(layer(tokens))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.05)
    cost = Cost()
    batch = Batch.of([[i * 7 % 512 for i in range(tokens)]])
    local = spread_batch(batch, axis, config, recorder=lambda *span: cost.spans.append(span))
    targets_T = local.local(batch.tokens_T.roll(-1), 0)
    parameters = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    decoder.hidden(Batch.of([[1, 2, 3]])).sum().backward()  # loads kernels
    decoder.zero_grad()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    barrier(axis)
    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden_TD = decoder.hidden(local.batch)
        loss, _ = decoder.ops.head_loss(hidden_TD, decoder.embed.weight, targets_T,
                                        torch.full(targets_T.shape, 1.0 / tokens))
    loss.backward()
    cost.seconds = time.perf_counter() - start
    cost.peak = _resident("VmHWM") - before
    cost.kept = sum(storages.values())
    return cost


def _resident(which: str) -> int:
    """Bytes of this process's resident memory (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status does not tell {which}; this benchmark needs Linux.")


KINDS = ("transfer", "compute", "wait")


def trace(costs: list[Cost]) -> dict[str, object]:
    """Of all ranks; a machine's ranks share its monotonic clock."""
    first = min(start for cost in costs for _, start, _ in cost.spans)
    spans = [Span(len(KINDS) * rank + KINDS.index(what), start - first, end - first, "", what)
             for rank, cost in enumerate(costs) for what, start, end in cost.spans]
    names = [f"rank {rank} {what}" for rank in range(len(costs)) for what in KINDS]
    return perfetto(spans, names, "ring attention", microseconds=1e6)


def shares(costs: list[Cost]) -> dict[str, float]:
    """Of the time of forward and backward, the mean of the ranks."""
    return {kind: sum(sum(end - start for what, start, end in cost.spans if what == kind)
                      / cost.seconds for cost in costs) / len(costs) for kind in KINDS}


def main() -> None:
    from tests.ranks import RankPool

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    spec, rows = layer(args.tokens), []
    found: dict[str, float] = {}
    print("| method | rows | ranks | kept | peak | sent forward | sent backward | seconds |\n"
          "|---|---|---|---|---|---|---|---|")
    for ranks, config in [(1, CONFIGS[1]), *((args.ranks, config) for config in CONFIGS)]:
        pool = RankPool()  # new processes each time: memory that a process has had stays with it
        try:
            costs = pool.run(ranks, measure, args.tokens, config, timeout=1200.0)
        finally:
            pool.close()
        sent = wire_bytes(config.method, args.tokens, spec.num_kv_heads, spec.num_heads,
                          spec.head_dim, ranks, placement=config.placement)
        row = {"method": config.method if ranks > 1 else "one rank",
               "placement": config.placement if ranks > 1 else "", "ranks": ranks,
               "kept": max(c.kept for c in costs), "peak": max(c.peak for c in costs),
               **asdict(sent), "seconds": round(max(c.seconds for c in costs), 2)}
        rows.append(row)
        sizes = " | ".join(f"{int(row[name]) / 2**20:.1f} MiB"  # type: ignore[call-overload]
                           for name in ("kept", "peak", "forward", "backward"))
        print(f"| {row['method']} | {row['placement']} | {ranks} | {sizes} | {row['seconds']} |")
        if ranks > 1 and config == CONFIGS[1]:
            found = shares(costs)
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / "ring-trace.json").write_text(json.dumps(trace(costs)) + "\n")
    print("\nOf the pass, in a zigzag ring, ranks had exchanges under way for "
          f"{found['transfer']:.1%}, computed attention for {found['compute']:.1%} and waited for "
          f"exchanges for {found['wait']:.1%}.")
    (RESULTS / "long_context.json").write_text(json.dumps(
        {"machine": cpu_name(), "tokens": args.tokens, "ring": found, "rows": rows}, indent=1)
        + "\n")


if __name__ == "__main__":
    main()
