"""Numbers that the literature on serving claims, reproduced: `python -m bench.claims serving`.

Each claim is stated, computed or measured here on SmolLM2-135M, and written with the published
figure beside it to bench/results/claims-serving.json. Where they differ, docs/errata.md says why.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.page import provenance, write_section
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.serve.engine import Delta, Engine, EngineConfig
from kilter.serve.load import load_engine
from kilter.serve.pages import Pages
from kilter.serve.params import SamplingParams
from kilter.serve.scheduler import SchedulerConfig
from kilter.weights.pull import pull
from kilter.weights.tokenizer import write_tokenizer

HERE = Path(__file__).parent
LISTS = ([37, 152, 8, 420, 91], [47, 183, 12, 891, 256, 5, 1024, 73, 330, 15])


@dataclass
class Claim:
    """One line of the report."""

    what: str
    published: str
    here: str
    figures: dict[str, float]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def drain(engine: Engine) -> list[tuple[float, list[Delta]]]:
    """Runs to idle: (time after each step, its deltas)."""
    events = []
    while engine.busy:
        deltas = engine.step()
        events.append((time.perf_counter(), deltas))
    return events


def paged_memory(lengths: list[int], published: str, maximum: int = 2048, page: int = 16) -> Claim:
    """Bytes of naive preallocation and of pages, for 32 heads of 128 in fp16."""
    spec = ModelSpec("claim", 1, 4096, 1, 32, 32, 128, (LayerSpec(RopeSpec()),), maximum)
    per_token = spec.kv_elements_per_token * 2
    pages = Pages(num_pages=4096, page_size=page)
    for length in lengths:
        pages.allocate(pages.pages_for(length))
    used, naive = sum(lengths) * per_token, len(lengths) * maximum * per_token
    paged = pages.num_held * page * per_token
    figures = {"naive_bytes": naive, "paged_bytes": paged, "used_bytes": used,
               "naive_waste": 1 - used / naive, "paged_waste": 1 - used / paged}
    return Claim(
        f"KV memory of {len(lengths)} requests, max {maximum}, page {page}", published,
        f"naive {naive / 2**20:.1f} MiB (waste {figures['naive_waste']:.1%}), paged "
        f"{paged / 2**20:.1f} MiB (waste {figures['paged_waste']:.1%}), used "
        f"{used / 2**20:.1f} MiB", figures)


def batching(engine: Engine, repeats: int) -> Claim:
    """Static: a batch starts when the one before has wholly ended. Continuous: no batches."""
    rng = random.Random(3)
    work = [(rng.randint(8, 40), rng.choice([4, 8, 16, 32, 96])) for _ in range(32)]
    width = 8
    times: dict[str, list[float]] = {"static": [], "continuous": []}
    steps: dict[str, int] = {}
    for turn in range(repeats + 1):
        for mode, figures in times.items():
            groups = [work] if mode == "continuous" else [
                work[i:i + width] for i in range(0, len(work), width)]
            start, steps[mode] = time.perf_counter(), 0
            for group in groups:
                for length, new in group:
                    engine.submit([rng.randrange(1000, 40000) for _ in range(length)], greedy(new))
                steps[mode] += len(drain(engine))
            if turn:
                figures.append(time.perf_counter() - start)
            engine.flush_cache()
    ratio = statistics.median(s / c for s, c in zip(*times.values(), strict=True))
    tokens = sum(new for _, new in work)
    return Claim(
        f"static against continuous batching, {len(work)} requests, width {width}",
        "2-3x the throughput",
        f"{ratio:.2f}x the throughput ({steps['static']} steps against {steps['continuous']}, "
        f"{tokens} tokens)", {"ratio": ratio, **{f"{k}_steps": v for k, v in steps.items()}})


def small_pool(engine: Engine) -> Claim:
    """20 requests on 32 pages, four at a time: all finish, whatever has to give way."""
    small = Engine(engine.model, engine.tokenizer, EngineConfig(
        kv_tokens=32 * 16, max_context=512,
        scheduler=SchedulerConfig(max_running=4, prefill_tokens=128, mixed_tokens=64)))
    rng = random.Random(4)
    expected = {}
    for _ in range(20):
        new = rng.randint(40, 200)
        number = small.submit([rng.randrange(1000, 40000) for _ in range(rng.randint(20, 120))],
                              greedy(new))
        expected[number] = new
    got = dict.fromkeys(expected, 0)
    for _, deltas in drain(small):
        for delta in deltas:
            got[delta.request] += len(delta.choices)
    if got != expected:
        raise AssertionError(f"Not every request finished: {got} against {expected}.")
    small.check_integrity()
    return Claim("20 requests on a pool of 32 pages, batch 4", "all finish",
                 f"all finish, {small.scheduler.preemptions} preemptions, "
                 f"{small.scheduler.steps} steps",
                 {"preemptions": small.scheduler.preemptions, "steps": small.scheduler.steps})


def prefix_hit(engine: Engine, repeats: int, shared: int = 512, own: int = 32) -> Claim:
    """Time to the first token of a prompt whose first part is cached, against a cold one."""
    rng = random.Random(5)
    ratios = []
    for turn in range(repeats + 1):
        engine.flush_cache()
        prefix = [rng.randrange(1000, 40000) for _ in range(shared)]
        times = []
        for _ in range(2):
            engine.submit(prefix + [rng.randrange(1000, 40000) for _ in range(own)], greedy(1))
            start = time.perf_counter()
            times.append(drain(engine)[0][0] - start)
        if turn:
            ratios.append(times[1] / times[0])
    lower = 1 - statistics.median(ratios)
    return Claim(f"TTFT with {shared} of {shared + own} prompt tokens cached", "50-90 % lower",
                 f"{lower:.0%} lower", {"lower": lower})


def chunked_prefill(engine: Engine, repeats: int, length: int = 8000) -> Claim:
    """A long prompt arrives among four decodes: their worst gap, and the prompt's own TTFT."""
    rng = random.Random(6)
    scheduler = engine.scheduler
    gaps: dict[str, list[float]] = {"whole": [], "chunked": []}
    ttfts: dict[str, list[float]] = {"whole": [], "chunked": []}
    before = scheduler.config
    whole = replace(before, prefill_tokens=2 * length, mixed_tokens=2 * length)
    for _ in range(repeats):
        for mode in gaps:
            scheduler.config = whole if mode == "whole" else before
            engine.flush_cache()
            decodes = {engine.submit([7, 8, 9, i], greedy(120)) for i in range(4)}
            for _ in range(8):
                engine.step()
            last = start = time.perf_counter()
            long = engine.submit([rng.randrange(1000, 40000) for _ in range(length)], greedy(1))
            worst = 0.0
            while engine.busy:
                deltas = engine.step()
                now = time.perf_counter()
                if any(delta.request in decodes for delta in deltas):
                    worst, last = max(worst, now - last), now
                if any(delta.request == long for delta in deltas):
                    ttfts[mode].append(now - start)
            gaps[mode].append(worst)
    scheduler.config = before
    gap = {mode: statistics.median(values) for mode, values in gaps.items()}
    ttft = {mode: statistics.median(values) for mode, values in ttfts.items()}
    return Claim(
        f"worst gap between tokens while a prompt of {length} arrives",
        "200 ms whole, 15 ms chunked; TTFT 20 % longer",
        f"{gap['whole'] * 1e3:.0f} ms whole, {gap['chunked'] * 1e3:.0f} ms chunked "
        f"({gap['whole'] / gap['chunked']:.1f}x); TTFT "
        f"{ttft['chunked'] / ttft['whole'] - 1:+.0%}",
        {"gap_whole_s": gap["whole"], "gap_chunked_s": gap["chunked"],
         "ttft_whole_s": ttft["whole"], "ttft_chunked_s": ttft["chunked"]})


def serving(repeats: int) -> list[Claim]:
    engine = load_engine(pull("smollm2-135m", after=write_tokenizer), context=8192, max_running=8,
                         kv_tokens=16384)
    return [
        paged_memory(LISTS[0], "naive 160.0 MB, used 22.1 MB, waste 86.2 %"),
        paged_memory(LISTS[1], "naive 320.0 MB (86.2 %), paged 45.5 MB (2.6 %), used 44.3 MB"),
        batching(engine, repeats),
        small_pool(engine),
        prefix_hit(engine, repeats),
        chunked_prefill(engine, max(1, repeats // 2)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["serving"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    claims = serving(args.repeats)
    for claim in claims:
        print(f"{claim.what}\n    published: {claim.published}\n    here:      {claim.here}")
    out = HERE / "results" / f"claims-{args.part}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n")
    lines = [provenance() + " SmolLM2-135M, 2 threads.", "", "| claim | published | here |",
             "|---|---|---|"]
    lines += [f"| {claim.what} | {claim.published} | {claim.here} |" for claim in claims]
    write_section(f"claims-{args.part}", "\n".join(lines))


if __name__ == "__main__":
    main()
