"""A whole training step of SmolLM2-135M beside peers, in one run.

    python -m bench.train [--repeats 5] [--tokens 2048] [--threads 2] [--litgpt PYTHON]

Forward, backward, clipping and AdamW in fp32 on one process. Kilter packs documents of mixed
lengths; peers get as many tokens in the form they are fastest in, without padding: equal rows of
256 tokens. Contenders run in processes of their own and take turns, one step at a time; seconds are
medians over turns, ratios medians of the ratios turn by turn. `--litgpt` is the interpreter of an
environment that has litgpt; without it the run says so. Writes bench/results/train.json and the
section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.foundation import hf_folder
from bench.page import provenance, write_section
from bench.peers.train_turns import BETAS, CLIP, DECAY, EPS, LR, turns
from bench.train_step import DOCUMENT, documents
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.ops.cpu.library import set_num_threads
from kilter.parallel.apply import apply
from kilter.serve.load import write_tokenizer
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import train_step
from kilter.weights.bridge import open_model
from kilter.weights.pull import pull

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


def kilter(folder: str, tokens: int, threads: int) -> None:
    """The contender's own process."""
    torch.set_num_threads(threads)
    set_num_threads(threads)
    source = open_model(folder)
    with torch.device("meta"):
        model = Decoder(source.spec, max_positions=tokens)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--litgpt", type=Path, metavar="PYTHON")
    parser.add_argument("--kilter", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kilter:
        kilter(args.kilter, args.tokens, args.threads)
        return
    folder = str(hf_folder(pull("smollm2-135m", after=write_tokenizer)))
    rows = args.tokens // DOCUMENT
    shape = [str(rows), str(DOCUMENT)]
    commands = {
        "kilter": [sys.executable, "-m", "bench.train", "--kilter", folder,
                   "--tokens", str(args.tokens), "--threads", str(args.threads)],
        "transformers Trainer": [sys.executable, str(PEERS), "trainer", str(args.threads), folder,
                                 *shape]}
    if args.litgpt is not None:
        commands["litgpt"] = [str(args.litgpt), str(PEERS), "litgpt", str(args.threads), *shape]
    contenders = [Contender(name, command) for name, command in commands.items()]
    for contender in contenders:
        contender.turn()  # the first step takes memory and compiles
    for _ in range(args.repeats):
        for contender in contenders:
            contender.seconds.append(contender.turn())
    peaks = {c.name: c.end() for c in contenders}
    medians = {c.name: statistics.median(c.seconds) for c in contenders}
    ours, *peers = contenders
    fastest = min(peers, key=lambda c: medians[c.name])
    ratio = statistics.median(b / a for a, b in zip(ours.seconds, fastest.seconds, strict=True))
    result = {"provenance": provenance(), "tokens": args.tokens, "threads": args.threads,
              "seconds": {c.name: c.seconds for c in contenders}, "peak_bytes": peaks,
              "ratio_to_fastest_peer": ratio, "fastest_peer": fastest.name,
              "absent": [] if args.litgpt else ["litgpt (--litgpt)"]}
    (HERE / "results" / "train.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"{provenance()} SmolLM2-135M, fp32, {args.tokens} tokens, {args.threads} threads; "
             f"medians of {args.repeats} steps taken in turns.", "",
             "| | seconds | tokens/s | peak memory |", "|---|---|---|---|",
             *(f"| {name} | {medians[name]:.2f} | {args.tokens / medians[name]:.0f} | "
               f"{peaks[name] / 2**30:.2f} GiB |" for name in medians), "",
             f"Kilter takes {ratio:.2f}× as many tokens per second as the fastest peer, "
             f"{fastest.name}."]
    if args.litgpt is None:
        lines.append("Absent in this run: litgpt (--litgpt).")
    print("\n".join(lines))
    write_section("train", "\n".join(lines))


if __name__ == "__main__":
    main()
