"""Compiles the CPU kernels on first use and keeps the library in the cache folder.

The library is plain C++17/20 with a C interface: no torch headers, so it builds in seconds and
outlives torch versions. One file per (sources, compiler, instruction set).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kilter.home import home

SOURCES = Path(__file__).parent / "csrc"
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"]
ISA_FLAGS = {
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
    "avx512": _AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "generic": [],
}


class KernelBuildError(RuntimeError):
    """The CPU kernels cannot be built on this machine; the message says why and what to do."""


@functools.cache
def detect_isa() -> str:
    """The widest instruction set this processor has of those we build for; ``KILTER_CPU_ISA``
    chooses a narrower one.

    Raises:
        ValueError: if that names none, or one this processor does not have.
    """
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() in ("x86_64", "AMD64") and cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    best = "generic"
    if {"avx2", "fma", "f16c"} <= flags:
        best = "avx2"
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
            best = "avx512bf16" if "avx512_bf16" in flags else "avx512"
    asked = os.environ.get("KILTER_CPU_ISA")
    if not asked:
        return best
    order = list(ISA_FLAGS)
    if asked not in order:
        raise ValueError(f"KILTER_CPU_ISA is {asked!r}, but must be one of "
                         f"{', '.join(order)}.")
    if order.index(asked) < order.index(best):
        raise ValueError(f"KILTER_CPU_ISA asks for {asked}, but this processor has only "
                         f"{best}. Unset it or choose {best}.")
    return asked


def find_compiler() -> str:
    """Path of the C++ compiler: ``$CXX``, else g++, clang++ or c++ on the PATH.

    Raises:
        KernelBuildError: if there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if path := shutil.which(name):
            return path
    raise KernelBuildError(
        "No C++ compiler was found (looked at $CXX, g++, clang++ and c++), so the CPU kernels "
        "cannot be built. Install one (for example `apt-get install g++`) or set CXX; until then "
        "Kilter runs on the slow pure-torch kernels.")


def build(isa: str | None = None) -> Path:
    """Builds (or finds) the kernel library and returns its path. Safe to call from several
    processes at once.

    Raises:
        KernelBuildError: no compiler, or the compiler's own message.
    """
    isa = isa or detect_isa()
    compiler = find_compiler()
    flags = ["-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
             "-ffp-contract=off", "-pthread", *ISA_FLAGS[isa]]
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest.update("\0".join([version, isa, *flags]).encode())
    folder = home() / "kernels"
    target = folder / f"kilter-{isa}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(f"The CPU kernels are kept in {folder}, which cannot be made "
                               f"({error.strerror}); set KILTER_HOME to a folder that can be "
                               f"written.") from error
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # another process may have built it while we waited
            if sys.stderr.isatty():
                print("Compiling the CPU kernels, once for this machine; this takes a minute.",
                      file=sys.stderr, flush=True)
            for left in folder.glob("tmp*"):  # by a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder) as tmp:
                _compile(compiler, flags, sources, Path(tmp) / "out.so")
                os.replace(Path(tmp) / "out.so", target)
    return target


def _compile(compiler: str, flags: list[str], sources: list[Path], out: Path) -> None:
    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelBuildError(f"Building the CPU kernels failed: `{' '.join(command)}` said:\n"
                                   f"{done.stderr.strip()[-4000:]}")

    objects = [out.with_name(s.stem + ".o") for s in sources]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(run, ([compiler, *flags, "-c", str(s), "-o", str(o)]
                            for s, o in zip(sources, objects, strict=True))))
    run([compiler, "-shared", "-pthread", "-o", str(out), *map(str, objects)])
