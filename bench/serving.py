"""`kilter serve` beside other servers, under the same load, in one run.

    python -m bench.serving [--repeats 3] [--llama-server PROGRAM --gguf F16=FILE …]
        [--vllm PYTHON] [--only NAME …] [--loads batch …] [--no-stream]
    python -m bench.serving --products bf16 --vllm PYTHON

All servers hold SmolLM2-135M with 2 threads and are loaded before the first measurement; they take
turns on every load, and while one is measured the others are stopped (SIGSTOP). Every turn has
fresh prompts, the same for all, so that no cache knows them. The client is one asyncio process on
the same cores. Peers that are not given by an option are named as absent. With `--products bf16`
those who multiply bf16 numbers are compared: Kilter told so, and vLLM in bfloat16. Writes
bench/results/serving.json and the section of docs/benchmarks.md, or those of bf16 products.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.foundation import MODEL, hf_folder
from bench.page import provenance, write_section
from bench.peers import servers
from bench.peers.client import Reply
from bench.peers.loads import LOADS, Load, Texts
from bench.peers.servers import Server, Spec
from kilter.tokens import Tokenizer
from kilter.weights.pull import pull
from kilter.weights.tokenizer import write_tokenizer

HERE = Path(__file__).parent
# What is compared with what: at equal bits per weight, and ours as it comes out of the box.
PAIRS = (
    ("kilter bf16", "llama.cpp F16"), ("kilter int8", "llama.cpp Q8_0"),
    ("kilter auto", "llama.cpp Q4_1"),
    ("kilter fp32", "vLLM fp32"), ("kilter auto", "vLLM fp32"),
    ("kilter bf16 --products bf16", "vLLM bf16"), ("kilter auto --products bf16", "vLLM bf16"),
    ("kilter fp32", "transformers serve"), ("kilter auto", "transformers serve"),
    ("kilter fp32", "transformers generate, padded batches"),
    ("kilter auto", "transformers generate, padded batches"),
)


@dataclass(frozen=True)
class Figures:
    """One turn of one server on one load."""

    seconds: float
    requests_per_s: float
    tokens_per_s: float
    ttft_p50: float
    tpot_p50: float
    prompt_tokens: int
    cached_tokens: int | None
    client_cpu_share: float  # of the turn's seconds, the CPU time of this process


def measure(server: Server, load: Load, texts: Texts, seed: int) -> Figures:
    """Raises AssertionError if an answer has not the length it should have."""
    server.resume()
    start, cpu = time.perf_counter(), time.process_time()
    replies: list[Reply] = asyncio.run(load.run(server.complete, server.chat, texts, seed))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    server.pause()
    if wrong := [r.tokens for r in replies if r.tokens != load.new_tokens]:
        raise AssertionError(f"{server.spec.name}, {load.name}: answers should have "
                             f"{load.new_tokens} tokens, but some have {sorted(set(wrong))}.")
    cached = [r.cached_tokens for r in replies if r.cached_tokens is not None]
    return Figures(
        seconds, len(replies) / seconds, sum(r.tokens for r in replies) / seconds,
        statistics.median(r.time_to_first_token for r in replies),
        statistics.median(r.time_per_output_token for r in replies),
        sum(r.prompt_tokens for r in replies), sum(cached) if cached else None, cpu / seconds)


def contenders(args: argparse.Namespace, model: Path) -> tuple[list[Spec], list[str]]:
    """Those that can run, and a sentence for each that cannot."""
    absent: list[str] = []
    if args.products == "bf16":
        specs = [servers.kilter(weights, "bf16") for weights in ("auto", "bf16")]
        if args.vllm is None:
            return specs, ["vLLM (--vllm)"]
        return [*specs, servers.vllm(args.vllm, hf_folder(model), "bf16")], []
    specs = [servers.kilter(weights) for weights in ("auto", "int8", "bf16", "fp32")]
    gguf = {"Q4_1": next(model.glob("*.gguf"), None),
            **{name: Path(path) for name, _, path in (g.partition("=") for g in args.gguf)}}
    for weights in ("Q4_1", "Q8_0", "F16"):
        file = gguf.get(weights)
        if args.llama_server is None or file is None:
            absent.append(f"llama.cpp {weights} (--llama-server, --gguf {weights}=FILE)")
        else:
            specs.append(servers.llama_cpp(args.llama_server, file, weights))
    folder = hf_folder(model)
    if args.vllm is None:
        absent.append("vLLM (--vllm)")
    else:
        specs.append(servers.vllm(args.vllm, folder, "fp32"))
    try:
        import transformers  # noqa: F401
    except ImportError:
        absent.append("transformers (not installed)")
    else:
        specs += [servers.transformers_padded(folder), servers.transformers_serve(folder)]
    if args.only:
        specs = [spec for spec in specs if any(word in spec.name for word in args.only)]
    return specs, absent


def run(specs: list[Spec], loads: list[Load], repeats: int, stream: bool, texts: Texts,
        logs: Path) -> tuple[dict[str, dict[str, list[Figures]]], dict[str, dict[str, float]]]:
    """(load -> server -> figures per turn, server -> seconds to start and bytes held)"""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by SIGTERM."))  # ends the servers too
    running: dict[str, Server] = {}
    starts: dict[str, dict[str, float]] = {}
    figures: dict[str, dict[str, list[Figures]]] = {load.name: {} for load in loads}
    try:
        for spec in specs:
            name = spec.name.replace(" ", "-").replace(",", "")
            server = running[spec.name] = Server(spec, logs / f"{name}.log", stream)
            starts[spec.name] = {"start_s": server.wait_until_ready()}
            asyncio.run(warm_up(server, texts))
            server.pause()
            print(f"{spec.name}: ready after {starts[spec.name]['start_s']:.1f} s",
                  file=sys.stderr, flush=True)
        for load in loads:
            for turn in range(repeats):
                for name, server in running.items():
                    result = measure(server, load, texts, turn)
                    figures[load.name].setdefault(name, []).append(result)
                    print(f"{load.name} {turn}: {name}: {result.tokens_per_s:.1f} tokens/s, TTFT "
                          f"{result.ttft_p50:.2f} s, TPOT {result.tpot_p50 * 1e3:.0f} ms, prompts "
                          f"{result.prompt_tokens}, cached {result.cached_tokens}, client "
                          f"{result.client_cpu_share:.1%}", file=sys.stderr, flush=True)
        for name, server in running.items():
            starts[name]["memory_bytes"] = server.memory()
    finally:
        for server in running.values():
            server.end()
    return figures, starts


async def warm_up(server: Server, texts: Texts) -> None:
    """A few requests of both kinds and a full batch, so that no measurement pays for a first."""
    rng = random.Random("warm up")
    await server.chat([{"role": "user", "content": texts.draw(16, rng)}], 4)
    await asyncio.gather(*(server.complete(texts.draw(32, rng), 8)
                           for _ in range(servers.SLOTS)))


def ratio(ours: list[Figures], theirs: list[Figures]) -> float:
    return statistics.median(a.tokens_per_s / b.tokens_per_s
                             for a, b in zip(ours, theirs, strict=True))


def ratios(figures: dict[str, dict[str, list[Figures]]]) -> list[dict[str, Any]]:
    return [{"ours": ours, "theirs": theirs,
             **{load: ratio(by_name[ours], by_name[theirs]) for load, by_name in figures.items()}}
            for ours, theirs in PAIRS
            if all(ours in by_name and theirs in by_name for by_name in figures.values())]


def section(result: dict[str, Any], loads: list[Load]) -> str:
    def cell(turns: list[dict[str, Any]]) -> str:
        rate, first, each = (statistics.median(t[key] for t in turns)
                             for key in ("tokens_per_s", "ttft_p50", "tpot_p50"))
        return f"{rate:.1f} ({first * 1e3:.0f} ms, {each * 1e3:.1f} ms)"

    names = list(next(iter(result["figures"].values())))
    lines = [f"{result['provenance']} SmolLM2-135M, 2 threads, "
             f"{'streaming' if result['stream'] else 'not streaming'}, greedy, "
             f"{result['repeats']} turns. Output tokens/s (median time to the first token, median "
             "time per output token); medians over the turns.", ""]
    lines += [f"- {load.name}: {load.what}" for load in loads]
    lines += ["", "| server | " + " | ".join(load.name for load in loads) + " | memory |",
              "|---|" + "---|" * (len(loads) + 1)]
    for name in names:
        cells = [cell(result["figures"][load.name][name]) for load in loads]
        lines.append(f"| {name} | " + " | ".join(cells)
                     + f" | {result['starts'][name]['memory_bytes'] / 2**30:.1f} GiB |")
    if result["ratios"]:
        lines += ["", "Output tokens/s, Kilter over the peer, medians of the ratios turn by turn:",
                  "", "| | " + " | ".join(load.name for load in loads) + " |",
                  "|---|" + "---|" * len(loads)]
        lines += [f"| {row['ours']} / {row['theirs']} | "
                  + " | ".join(f"{row[load.name]:.2f}×" for load in loads) + " |"
                  for row in result["ratios"]]
    if result["absent"]:
        lines += ["", "Absent in this run: " + "; ".join(result["absent"]) + "."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM")
    parser.add_argument("--gguf", action="append", default=[], metavar="WEIGHTS=FILE",
                        help="F16 and Q8_0 files of the model, for llama.cpp")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON",
                        help="the interpreter of an environment that has vLLM")
    parser.add_argument("--products", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--only", action="append", metavar="WORD",
                        help="servers whose name has this word; may be given several times")
    parser.add_argument("--loads", nargs="+", choices=[load.name for load in LOADS])
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/benchmarks.md alone")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    args = parser.parse_args()
    model = pull(MODEL, after=write_tokenizer)
    texts = Texts(Tokenizer.from_folder(hf_folder(model)))
    specs, absent = contenders(args, model)
    loads = [load for load in LOADS if not args.loads or load.name in args.loads]
    logs = args.logs or Path(tempfile.mkdtemp(prefix="bench-serving-"))
    logs.mkdir(parents=True, exist_ok=True)
    figures, starts = run(specs, loads, args.repeats, not args.no_stream, texts, logs)
    result: dict[str, Any] = {
        "provenance": provenance(), "stream": not args.no_stream, "repeats": args.repeats,
        "absent": absent, "loads": {load.name: load.what for load in loads},
        "commands": {spec.name: [word.rsplit("/", 1)[-1] for word in spec.command]
                     for spec in specs}, "starts": starts,
        "ratios": ratios(figures),
        "figures": {load: {name: [asdict(f) for f in turns] for name, turns in by_name.items()}
                    for load, by_name in figures.items()},
    }
    text = section(result, loads)
    if not args.no_docs:
        name = "serving" if args.products == "fp32" else "serving-bf16"
        out = HERE / "results" / f"{name}.json"
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        write_section(name, text)
    print(text)


if __name__ == "__main__":
    main()
