"""What a step of the scheduler costs, with the model replaced by nothing.

    python -m bench.scheduler [--steps 300]

256 requests run and 1,000 wait, for each policy, in two states: everybody decodes (and whoever ends
is replaced), and pages are the limit (so that admission is refused in most steps). A step is
`Scheduler.step`, `settle`, the new tokens and `finish`. Writes bench/results/scheduler.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.page import provenance, write_section
from kilter.report.machine import cpu_name
from kilter.serve.pages import Pages
from kilter.serve.radix import RadixTree
from kilter.serve.request import Request
from kilter.serve.scheduler import Policy, Scheduler, SchedulerConfig

RUNNING, WAITING, PAGE = 256, 1000, 16


@dataclass
class Load:
    """A state that the scheduler is kept in."""

    name: str
    pages: int
    answers: tuple[int, int]  # tokens, least and most
    max_tokens: int
    max_running: int


LOADS = [
    Load("decoding, 256 run", 40_000, (200, 600), 600, RUNNING),
    Load("decoding, pages for some 256", 256 * 36, (300, 700), 700, 10 * RUNNING),
]


def drive(load: Load, policy: Policy, steps: int) -> dict[str, float]:
    """Steps the scheduler with a null executor; milliseconds per step."""
    rng = random.Random(0)
    scheduler = Scheduler(RadixTree(Pages(load.pages, PAGE)), SchedulerConfig(
        max_running=load.max_running, policy=policy))
    ends: dict[Request, int] = {}
    number = 0
    prefix = [rng.randrange(50_000) for _ in range(64)]

    def fill() -> None:
        nonlocal number
        while len(scheduler.waiting) < WAITING:
            prompt = prefix * (rng.random() < 0.5) + [
                rng.randrange(50_000) for _ in range(rng.randint(16, 128))]
            request = Request(number, prompt, len(prompt) + load.max_tokens,
                              priority=rng.randrange(3))
            ends[request] = len(prompt) + rng.randint(*load.answers)
            number += 1
            scheduler.add(request)

    times, running = [], []
    warm_up = 300
    for turn in range(warm_up + steps):
        fill()
        start = time.perf_counter()
        work = scheduler.step()
        scheduler.settle(work)
        for request in work:
            if request.computed == request.length:
                request.append(7)
                if request.length >= ends[request]:
                    scheduler.finish(request)
        if turn >= warm_up:
            times.append(1e3 * (time.perf_counter() - start))
            running.append(len(scheduler.running))
    scheduler.check_integrity()
    times.sort()
    return {"median_ms": statistics.median(times), "p99_ms": times[int(0.99 * len(times))],
            "running": statistics.mean(running), "preemptions": scheduler.preemptions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows = []
    policies: tuple[Policy, ...] = ("fcfs", "prefix", "priority")
    for load in LOADS:
        for policy in policies:
            row = drive(load, policy, args.steps)
            rows.append({"load": load.name, "policy": policy, "waiting": WAITING,
                         **{name: round(value, 3) for name, value in row.items()}})
            print(f"{load.name:42} {policy:9} median {row['median_ms']:.2f} ms, 99 % "
                  f"{row['p99_ms']:.2f} ms; {row['running']:.0f} run, "
                  f"{row['preemptions']:.0f} preemptions")
    out = Path(__file__).parent / "results" / "scheduler.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"machine": cpu_name(), "steps": args.steps, "rows": rows},
                              indent=1) + "\n")
    lines = [provenance(), "", "| load | policy | running | median | 99 % |",
             "|---|---|---|---|---|"]
    lines += [f"| {row['load']} | {row['policy']} | {row['running']:.0f} | "
              f"{row['median_ms']:.2f} ms | {row['p99_ms']:.2f} ms |" for row in rows]
    write_section("scheduler", "\n".join(lines))


if __name__ == "__main__":
    main()
