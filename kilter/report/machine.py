"""What this machine is and how fast: the facts that `kilter doctor` and the benchmarks report."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path


def cpu_name() -> str:
    """The processor's own name, or the architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Processors this process may run on (containers and `taskset` often allow fewer)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """(installed, now available) bytes of memory; available is 0 where the system does not say."""
    info = Path("/proc/meminfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines())
        return (int(lines["MemTotal"].split()[0]) * 1024,
                int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0


def best_seconds(call: Callable[[], object], budget: float) -> float:
    """The shortest of the calls that fit into `budget` seconds (at least three, after a first one
    that does not count)."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(budget: float = 0.5) -> float:
    """Bytes per second that torch's threads read from memory: the sum of 256 MiB of fp32, far more
    than a cache holds (but some servers' last-level cache: then this is an upper bound)."""
    import torch

    values = torch.ones(64 * 2**20)
    return values.nbytes / best_seconds(values.sum, budget)


def gemm_rate(budget: float = 0.5) -> float:
    """FLOP per second of torch's fp32 matrix product, 1024 x 1024 x 1024."""
    import torch

    n = 1024
    a, b, out = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    return 2 * n**3 / best_seconds(lambda: torch.mm(a, b, out=out), budget)
