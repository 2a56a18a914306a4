"""One iteration of GRPO on SmolLM2-135M beside TRL, in one run.

    python -m bench.rl --trl PYTHON [--repeats 3] [--threads 2]
        [--prompts 2] [--samples 8] [--tokens 96] [--rows 8] [--no-docs]

An iteration samples answers, judges them and takes one AdamW step on all of them, in fp32, with the
same prompts, group size, reward, learning rate and size of micro-batches. All answers have exactly
--tokens tokens: Kilter does not let the model's end token end an answer, TRL does not let it be
sampled. Contenders run in processes of their own, about 4 GB each, and take turns, one iteration at
a time; seconds are medians over turns, ratios medians of the ratios turn by turn. Kilter is there
three times: as it comes; with a pass for log-probabilities before learning (`update.gate =
"pass"`), as a trainer needs that cannot rely on its sampler's; and with torch's own kernels
(`model.exact = false`).
`--trl` is the interpreter of an environment that has trl; without it the run says so. Writes
bench/results/rl.json and the section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from bench.foundation import hf_folder
from bench.page import provenance, write_section
from bench.peers.trl_turns import BETAS, CLIP, DECAY, EPS, EPSILON, LR, reward
from bench.train import Contender
from kilter.ops.cpu.library import set_num_threads
from kilter.rl.algorithms import RecipeConfig
from kilter.rl.config import Gate, RLJob, SamplingConfig, UpdateConfig
from kilter.rl.launch import open_rl
from kilter.rl.loop import RLRun
from kilter.rl.prompts import Prompts
from kilter.rl.rewards import Sample
from kilter.rl.rewards.config import RewardConfig
from kilter.rl.roles import Roles
from kilter.rl.tasks import FileConfig, GymConfig, TaskConfig, build_task
from kilter.serve.engine_config import EngineConfig
from kilter.serve.params import SamplingParams
from kilter.tokens import Tokenizer
from kilter.train.checkpoint import CheckpointConfig
from kilter.train.config import ModelConfig
from kilter.train.optimizer import OptimizerConfig
from kilter.train.schedule import ScheduleConfig
from kilter.weights.pull import pull
from kilter.weights.tokenizer import write_tokenizer

HERE = Path(__file__).parent
PEER = HERE / "peers" / "trl_turns.py"
TRL = "TRL"
OURS, PASS, STOCK = "kilter", "kilter, with a pass", "kilter, exact = false"
PARTS = ("weights", "generate", "judge", "learn")


@dataclass(frozen=True)
class Size:
    """Of an iteration.

    Attributes:
        rows: sequences of a micro-batch.
    """

    prompts: int
    samples: int
    tokens: int
    rows: int


class OfOneLength(SamplingConfig):
    """Answers that end at ``max_tokens`` and nowhere before."""

    def params(self) -> SamplingParams:
        return replace(super().params(), ignore_eos=True)


def judge(samples: Sequence[Sample]) -> list[float]:
    """Kilter's form of the reward."""
    return [reward(sample.answer_text) for sample in samples]


def make_job(folder: str, prompts: str, out: str, size: Size, exact: bool) -> RLJob:
    tokenizer = Tokenizer.from_folder(Path(folder))
    task = build_task(TaskConfig(file=FileConfig(prompts)))
    longest = size.tokens + max(len(tokenizer.encode_chat(task[i].messages))
                                for i in range(len(task)))
    cache = size.prompts * size.samples * (longest + 16)
    return RLJob(
        output=out, steps=len(task), seed=1, export=False,
        model=ModelConfig(path=folder, exact=exact),
        task=TaskConfig(file=FileConfig(prompts)), rewards=(RewardConfig("bench.rl:judge"),),
        recipe=RecipeConfig(eps_low=EPSILON, eps_high=EPSILON),
        rollout=OfOneLength(size.prompts, size.samples, size.tokens, engine=EngineConfig(
            kv_tokens=cache, max_context=longest)),
        update=UpdateConfig(token_budget=size.rows * longest, max_norm=CLIP),
        optimizer=OptimizerConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
        schedule=ScheduleConfig(name="constant"), checkpoint=CheckpointConfig(every=0))


def kilter(folder: str, prompts: str, size: Size, threads: int, exact: bool) -> None:
    """The contender's own process: a line on stdin says where the gate is, and which turn it is."""
    torch.set_num_threads(threads)
    set_num_threads(threads)
    said = sys.stdout
    with tempfile.TemporaryDirectory() as out, ExitStack() as closing, redirect_stdout(sys.stderr):
        job = make_job(folder, prompts, out, size, exact)
        inputs = open_rl(job)
        run = RLRun(job, inputs, Roles(job, inputs, "cpu"), closing)
        # In the file's order, as the peer reads them.
        run.prompts = Prompts(build_task(job.task), run.roles.tokenizer, samples=size.samples,
                              format="chat", seed=None)
        print("ready", file=said, flush=True)
        for line in sys.stdin:
            gate, number = line.split()
            run.place = int(number) * size.prompts
            run.job = replace(job, update=replace(job.update, gate=cast(Gate, gate)))
            print(json.dumps(turn(run, size.tokens)), file=said, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)


def turn(run: RLRun, tokens: int) -> dict[str, float]:
    """One iteration's facts."""
    start, processor = time.perf_counter(), time.process_time()
    with run.monitor.step(run.step + 1):
        told, rollouts = run.take_step()
    run.step += 1
    run.monitor.tell(run.step, told, rollouts)
    total, processor = time.perf_counter() - start, time.process_time() - processor
    if not told["length"] == told["longest"] == tokens:
        raise AssertionError(f"Answers have {told['length']} tokens on average and up to "
                             f"{told['longest']}, not {tokens}.")
    metrics = (run.output / "metrics.jsonl").read_text(encoding="utf-8")
    seconds = json.loads(metrics.splitlines()[-1])["seconds"]
    parts = {"weights": seconds["weights"], "generate": seconds["rollout"],
             "judge": seconds["judge"]}
    inner = {name: seconds[name] for name in ("gate", "forward", "backward", "optimizer")
             if name in seconds}
    return {"total": total, "processor": processor, **parts,
            "learn": total - sum(parts.values()), **inner, "tokens": told["tokens"],
            "gap": told["gate"]["max"]}


class Taker(Contender):
    """A process that takes iterations in turns, of one kind or several."""

    def __init__(self, name: str, command: list[str], kinds: dict[str, str]) -> None:
        super().__init__(name, command)
        self.kinds = kinds
        self.found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}

    def turns(self, number: int) -> None:
        """One of each kind, every other time in the other order. What the first take is not kept:
        it takes memory and compiles."""
        for kind in sorted(self.kinds, reverse=number % 2 == 1):
            try:
                answer = self._say(f"{self.kinds[kind]} {number}\n")
            except BrokenPipeError:
                answer = ""
            if not answer:
                raise RuntimeError(f"{self.name} ended in the middle of its turns; what it said is "
                                   "above, if it was not killed for want of memory.")
            facts = json.loads(answer)
            print(f"{kind}: {facts}", file=sys.stderr, flush=True)
            if number > 0:
                self.found[kind].append(facts)


def write_prompts(path: Path, count: int) -> None:
    """Sums from reasoning-gym, asked for as `kilter rl` asks."""
    task = build_task(TaskConfig(gym=GymConfig("chain_sum", size=count)))
    path.write_text("".join(json.dumps({"messages": task[i].messages}) + "\n"
                            for i in range(count)), encoding="utf-8")


def takers(args: argparse.Namespace, folder: str, prompts: str) -> list[Taker]:
    numbers = [str(n) for n in (args.prompts, args.samples, args.tokens, args.rows)]
    ours = [sys.executable, "-m", "bench.rl", "--threads", str(args.threads), "--prompts",
            numbers[0], "--samples", numbers[1], "--tokens", numbers[2], "--rows", numbers[3],
            "--kilter", folder, prompts]
    found = [Taker(OURS, [*ours, "exact"], {OURS: "training", PASS: "pass"})]
    if args.trl is not None:
        found.append(Taker(TRL, [str(args.trl), str(PEER), folder, prompts, str(args.threads),
                                 *numbers], {TRL: "go"}))
    found.append(Taker(STOCK, [*ours, "stock"], {STOCK: "training"}))
    return found


def ratio(found: dict[str, list[dict[str, float]]], over: str, under: str, part: str) -> float:
    return statistics.median(a[part] / b[part]
                             for a, b in zip(found[over], found[under], strict=True))


def section(result: dict[str, Any]) -> str:
    found, size, peaks = result["turns"], result["size"], result["peak_bytes"]
    sampled = size["prompts"] * size["samples"] * size["tokens"]
    every = statistics.median(facts["tokens"] for facts in found[OURS])

    def median(name: str, part: str) -> str:
        values = [facts[part] for facts in found[name] if part in facts]
        return f"{statistics.median(values):.2f}" if values else "none"

    lines = [f"{result['provenance']} SmolLM2-135M-Instruct, fp32, {size['prompts']} prompts x "
             f"{size['samples']} samples x {size['tokens']} tokens, micro-batches of "
             f"{size['rows']} sequences, {result['threads']} threads. An iteration samples "
             f"{sampled} tokens; with the prompts of all samples there are {every:.0f}. Seconds, "
             f"medians of {len(found[OURS])} turns.", "",
             "| | weights | generate | judge | learn | iteration | processor | peak memory |",
             "|---|---|---|---|---|---|---|---|"]
    for name in (name for name in (OURS, PASS, STOCK, TRL) if name in found):
        peak = f"{peaks[name] / 2**30:.2f} GiB" if name in peaks else "as above"
        cells = [median(name, part) for part in (*PARTS, "total", "processor")]
        lines.append(f"| {name} | {' | '.join(cells)} | {peak} |")
    lines.append("")
    if TRL in found:
        generating, learning, whole, processor = (
            f"{ratio(found, TRL, OURS, part):.2f}×"
            for part in ("generate", "learn", "total", "processor"))
        lines.append(f"TRL takes {whole} as long as Kilter for an iteration, {generating} for "
                     f"generating and {learning} for learning; {processor} of the processor's "
                     "time.")
    else:
        lines.append("Absent in this run: TRL (--trl).")
    ours, gap = (max(facts["gap"] for facts in found[name]) for name in (OURS, STOCK))
    lines.append(f"With a pass for log-probabilities before learning, Kilter takes "
                 f"{ratio(found, PASS, OURS, 'total'):.2f}× as long as without. With torch's own "
                 f"kernels it takes {ratio(found, STOCK, OURS, 'total'):.2f}× as long as on the "
                 f"exact path, and rollout and trainer differ by up to {gap:.1g} nats; on the "
                 f"exact path by {ours:g}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2, help="of an iteration")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--no-docs", action="store_true", help="write nothing, only print")
    parser.add_argument("--kilter", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = Size(args.prompts, args.samples, args.tokens, args.rows)
    if args.prompts * args.samples % args.rows:
        parser.error(f"--rows is {args.rows}, which does not divide the "
                     f"{args.prompts * args.samples} sequences of an iteration.")
    if args.kilter:
        folder, prompts, way = args.kilter
        kilter(folder, prompts, size, args.threads, exact=way == "exact")
        return
    folder = str(hf_folder(pull("smollm2-135m", after=write_tokenizer)))
    with tempfile.TemporaryDirectory() as place:
        prompts = str(Path(place) / "prompts.jsonl")
        write_prompts(Path(prompts), args.prompts * (args.repeats + 2))
        every = takers(args, folder, prompts)
        for number in range(args.repeats + 1):
            for taker in every:
                taker.turns(number)
        peaks = {taker.name: taker.end() for taker in every}
    turns = {kind: facts for taker in every for kind, facts in taker.found.items()}
    for same in zip(*turns.values(), strict=True):
        if len(counts := {facts["tokens"] for facts in same}) > 1:
            raise AssertionError(f"Contenders had different tokens in one turn: {sorted(counts)}.")
    result = {"provenance": provenance(), "threads": args.threads, "size": vars(size),
              "turns": turns, "peak_bytes": peaks, "absent": [] if args.trl else ["TRL (--trl)"]}
    text = section(result)
    print(text)
    if not args.no_docs:
        (HERE / "results" / "rl.json").write_text(json.dumps(result, indent=1) + "\n")
        write_section("rl", text)


if __name__ == "__main__":
    main()
