"""A whole training step of SmolLM2-135M beside peers, in one run.

    python -m bench.train [--repeats 5] [--tokens 2048] [--threads 2] [--litgpt PYTHON]

Forward, backward, clipping and AdamW on one process, with products in fp32, and again with products
in bf16 (Kilter's `model.products`, the peers' autocast), parameters and optimizer in fp32 in both.
Kilter packs documents of mixed lengths; peers get as many tokens in the form they are fastest in,
without padding: equal rows of 256 tokens. Contenders run in processes of their own and take turns,
one step at a time; seconds are medians over turns, ratios medians of the ratios turn by turn.
`--litgpt` is the interpreter of an environment that has litgpt; without it the run says so. Writes
bench/results/train.json and the section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.foundation import hf_folder
from bench.page import provenance, write_section
from bench.peers.train_turns import BETAS, CLIP, DECAY, EPS, LR, turns
from bench.train_step import DOCUMENT, documents
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.ops.cpu.build import detect_isa
from kilter.ops.cpu.library import set_num_threads
from kilter.parallel.apply import apply
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import train_step
from kilter.weights.bridge import open_model
from kilter.weights.pull import pull
from kilter.weights.tokenizer import write_tokenizer

HERE = Path(__file__).parent
PEERS = HERE / "peers" / "train_turns.py"


@dataclass(frozen=True)
class Documents:
    """One pack, as `kilter.train.step` takes it."""

    sequences: list[list[int]]

    @property
    def targets_T(self) -> Tensor:
        return torch.tensor([t for text in self.sequences for t in [*text[1:], -100]])

    @property
    def valid(self) -> int:
        return sum(len(text) - 1 for text in self.sequences)

    def batch(self, device: torch.device) -> Batch:
        return Batch.of(self.sequences, device)


def kilter(folder: str, tokens: int, threads: int, products: str) -> None:
    """The contender's own process."""
    torch.set_num_threads(threads)
    set_num_threads(threads)
    source = open_model(folder)
    with torch.device("meta"):
        model = Decoder(source.spec, max_positions=tokens, products=products)
    mesh = Mesh.single()
    spread = apply(model, mesh)
    spread.load(source)
    optimizer = Optimizer(spread.held, OptimizerConfig(
        lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY), mesh.axis("world"))
    pack = Documents(documents(tokens))
    turns(lambda: void(train_step(spread, optimizer, [pack], max_norm=CLIP)))


def void(_: object) -> None:
    """A step's result is not what is measured."""


class Contender:
    """A process that takes turns."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.seconds: list[float] = []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)
        if self._say(None) != "ready":
            raise RuntimeError(f"{name} did not start.")

    def turn(self) -> float:
        return float(self._say("go\n"))

    def end(self) -> int:
        """Peak memory, bytes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak = int(self._say(None))
        self._process.wait()
        return peak

    def _say(self, text: str | None) -> str:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if text is not None:
            process.stdin.write(text)
            process.stdin.flush()
        return process.stdout.readline().strip()


def measure(args: argparse.Namespace, folder: str, form: str) -> dict[str, Any]:
    """All contenders with products in this format, in turns."""
    shape = [str(args.tokens // DOCUMENT), str(DOCUMENT)]
    threads = str(args.threads)
    commands = {
        "kilter": [sys.executable, "-m", "bench.train", "--kilter", folder, form,
                   "--tokens", str(args.tokens), "--threads", threads],
        "transformers Trainer": [sys.executable, str(PEERS), "trainer", threads, form, folder,
                                 *shape]}
    if args.litgpt is not None:
        commands["litgpt"] = [str(args.litgpt), str(PEERS), "litgpt", threads, form, *shape]
    contenders = [Contender(name, command) for name, command in commands.items()]
    for contender in contenders:
        contender.turn()  # the first step takes memory and compiles
    for _ in range(args.repeats):
        for contender in contenders:
            contender.seconds.append(contender.turn())
    peaks = {c.name: c.end() for c in contenders}
    ours, *peers = contenders
    fastest = min(peers, key=lambda c: statistics.median(c.seconds))
    ratio = statistics.median(b / a for a, b in zip(ours.seconds, fastest.seconds, strict=True))
    return {"seconds": {c.name: c.seconds for c in contenders}, "peak_bytes": peaks,
            "ratio_to_fastest_peer": ratio, "fastest_peer": fastest.name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--litgpt", type=Path, metavar="PYTHON")
    parser.add_argument("--kilter", nargs=2, metavar=("FOLDER", "FORMAT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kilter:
        kilter(args.kilter[0], args.tokens, args.threads, args.kilter[1])
        return
    folder = str(hf_folder(pull("smollm2-135m", after=write_tokenizer)))
    result = {"provenance": provenance(), "isa": detect_isa(), "tokens": args.tokens,
              "threads": args.threads, "absent": [] if args.litgpt else ["litgpt (--litgpt)"],
              "products": {form: measure(args, folder, form) for form in ("fp32", "bf16")}}
    (HERE / "results" / "train.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"{provenance()[:-1]} ({detect_isa()}). SmolLM2-135M, {args.tokens} tokens, "
             f"{args.threads} threads; medians of {args.repeats} steps taken in turns.", "",
             "| products | | seconds | tokens/s | peak memory |", "|---|---|---|---|---|"]
    for form, found in result["products"].items():
        lines += [f"| {form} | {name} | {statistics.median(found['seconds'][name]):.2f} | "
                  f"{args.tokens / statistics.median(found['seconds'][name]):.0f} | "
                  f"{found['peak_bytes'][name] / 2**30:.2f} GiB |" for name in found["seconds"]]
    lines += [""]
    for form, found in result["products"].items():
        lines.append(f"With products in {form} Kilter takes {found['ratio_to_fastest_peer']:.2f}× "
                     f"as many tokens per second as the fastest peer, {found['fastest_peer']}.")
    if args.litgpt is None:
        lines.append("Absent in this run: litgpt (--litgpt).")
    print("\n".join(lines))
    write_section("train", "\n".join(lines))


if __name__ == "__main__":
    main()
