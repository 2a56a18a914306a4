"""`kilter doctor`: what this machine is, what works on it, how fast it is, and a proof on it that
a model gives the same bits however its tokens are batched, chunked or cached."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from kilter.report import machine
from kilter.report.text import size, table
from kilter.verbs.pull import pulled_models


@dataclass(frozen=True)
class Check:
    """One thing that works or does not; None: not on this machine, and that is fine."""

    name: str
    ok: bool | None
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if a check failed."""
    features = [_kernels(), *_gpu()]
    facts, speed, models = _machine(), _speed(), _models()
    exactness = _exactness()
    checks = [*features, *exactness]
    failed = [check.name for check in checks if check.ok is False]
    if args.json:
        print(json.dumps({"machine": facts, "speed": speed, "models": models, "failed": failed,
                          "checks": [asdict(check) for check in checks]}, indent=2))
        return 1 if failed else 0
    facts["speed"] = (f"reads memory at {speed['read_bytes_per_s'] / 1e9:.1f} GB/s, multiplies "
                      f"fp32 matrices at {speed['fp32_gemm_flop_per_s'] / 1e9:.0f} GFLOP/s (torch)")
    _section("Machine", facts.items(), left=2)
    _section("Features", map(_line, features), left=3)
    _section("Models in the cache", models.items() or [
        ("none", "`kilter pull --list` shows what there is to pull")], left=2)
    _section("Exactness: the log-probabilities of one text, computed in several ways; the largest "
             "difference", map(_line, exactness), left=3)
    print(f"\nFailed: {', '.join(failed)}." if failed else "\nAll checks passed.")
    return 1 if failed else 0


def _section(title: str, rows: Iterable[tuple[str, ...]], left: int) -> None:
    print(f"{title}\n{table(list(rows), left=left)}")


def _line(check: Check) -> tuple[str, str, str]:
    return {True: "ok", False: "FAIL", None: "-"}[check.ok], check.name, check.detail


def _machine() -> dict[str, str]:
    import torch

    from kilter.ops.cpu import build

    installed, free = machine.memory_bytes()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        version = subprocess.run([build.find_compiler(), "--version"], capture_output=True,
                                 text=True).stdout.splitlines()
        compiler = version[0] if version else "one that does not tell its version"
    except build.KernelBuildError:
        compiler = "none"
    return {
        "processor": f"{machine.cpu_name()}, {machine.usable_cpus()} usable cores",
        "memory": size(installed) + (f", {size(free)} available" if free else ""),
        "compiler": compiler,
        "python": f"{platform.python_version()} on {platform.platform(terse=True)}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "GPUs": ", ".join(gpus) or "none",
    }


def _models() -> dict[str, str]:
    return {name: str(folder) for name, folder in pulled_models().items()}


def _speed() -> dict[str, float]:
    return {"read_bytes_per_s": machine.read_bandwidth(),
            "fp32_gemm_flop_per_s": machine.gemm_rate()}


def _kernels() -> Check:
    from kilter.ops.cpu import build, library

    try:
        library.load()
        return Check("CPU kernels", True, f"{build.detect_isa()}, compiled as {build.build()}")
    except build.KernelBuildError as error:
        return Check("CPU kernels", False, str(error))


def _gpu() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        return [Check("CUDA", None, "torch sees no GPU here")]
    found = importlib.util.find_spec("triton") is not None
    return [Check("CUDA", True, f"torch is built for CUDA {torch.version.cuda}"),
            Check("Triton", found, "installed" if found else
                  "not installed, so GPU kernels cannot be compiled: pip install triton")]


def _exactness() -> list[Check]:
    from kilter.serve.exactness import self_test

    return [Check(name, difference == 0.0, f"{difference}") for name, difference in self_test()]
