"""A model's whole life on this machine, as `make demo` shows it: some minutes.

    python examples/demo.py [key=value ...]

It pulls a real model, asks it something, tells what training it will take, trains it by
reinforcement on three ranks (examples/demo.toml; key=value changes its settings), and serves the
result to the `openai` client. Then it says what moved between the ranks, and by how much sampling
and training differed: 0.0.

Each stage is commands that are shown and can be given by hand. Ctrl-C (or SIGTERM) ends it at any
time. A run that was cut is gone on with; a finished one is followed by another in a new folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from kilter.job import JobError, read_job
from kilter.report.text import size, table

JOB = Path(__file__).with_name("demo.toml")
QUESTION = "What is the capital of France?"
NAME = "demo"  # what the served model is called
STAGES = 6
SERVER_SECONDS = 300.0  # to load the model, on a busy machine
KV_BYTES = 4  # of a key's or value's element in the rollout's cache (fp32)


class Failed(Exception):
    """A command that did not do what it should; its own words stand above."""


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    try:
        need("openai", "reasoning_gym")
        job = read_job(_job_class(), JOB, arguments)
        demo(job, arguments)
    except JobError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nThe demo was stopped; given again, it goes on with its run.", flush=True)
        return 130
    print(f"\nAll of it took {(time.monotonic() - started) / 60:.1f} minutes.", flush=True)
    return 0


def demo(job: Any, changes: Sequence[str] = ()) -> None:
    """All stages of an `RLJob`.

    Raises:
        Failed: if a command did.
    """
    model = job.model.path
    with stage(1, "A model", "fetches a real one and asks it something"):
        kilter("pull", model)
        kilter("chat", model, "-p", QUESTION)
    with stage(2, "What it is, and what training will take", "reads headers only"):
        kilter("inspect", model)
        print("\n" + memory_page(job), flush=True)
    with stage(3, "Reinforcement learning",
               f"{job.steps} steps on {job.layout.world} ranks, which train as one FSDP group and "
               f"roll out with {job.rollout.tp}-way tensor parallelism"):
        output = train(job, changes)
        lines = read_lines(output / "metrics.jsonl")
    with stage(4, "A Hugging Face folder", "what the run wrote, as any other library loads it"):
        print(folder_page(output / "model"), flush=True)
    with stage(5, "Served", "OpenAI's API, asked by the openai client"):
        serve_and_ask(output / "model", job)
    with stage(6, "What moved, and what it came to", "from the run's metrics.jsonl"):
        print(summary_page(lines), flush=True)


# ---- stages and commands ----


@contextmanager
def stage(number: int, title: str, about: str) -> Iterator[None]:
    """Says what comes, and how long it took."""
    start = time.monotonic()
    print(f"\n[{number}/{STAGES}] {title}: {about}.", flush=True)
    yield
    print(f"[{number}/{STAGES}] done in {time.monotonic() - start:.0f} s", flush=True)


def kilter(*arguments: object) -> None:
    """Shows and runs a command of Kilter; its output goes where ours does.

    Raises:
        Failed: if it fails.
        KeyboardInterrupt: if we are told to stop; the command has then ended by itself.
    """
    process = _start(*arguments)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        _end(process)
        raise
    if code:
        raise Failed(f"`kilter {arguments[0]}` ended with exit code {code}.")


def need(*packages: str) -> None:
    """Asks for what stages will import, before the first of them takes its time.

    Raises:
        Failed: naming what is not there.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise Failed(f"The demo needs {' and '.join(missing)}, which cannot be imported. `make "
                     "demo` installs what it needs; elsewhere, pip install 'kilter[demo]'.")


def next_folder(base: Path, usable: Callable[[Path], bool]) -> Path:
    """`base`-1, -2, …: the last one if its run is not finished and can be gone on with, else the
    one after it."""
    numbers = [int(tail) for path in base.parent.glob(f"{base.name}-*") if path.is_dir()
               and (tail := path.name.removeprefix(f"{base.name}-")).isdecimal()]
    last = max(numbers, default=0)
    folder = base.with_name(f"{base.name}-{last}")
    if last > 0 and not (folder / "model").exists() and usable(folder):
        return folder
    return base.with_name(f"{base.name}-{last + 1}")


def can_resume(job: Any, folder: Path) -> bool:
    """Whether a folder's checkpoint, if it has one, is of this job."""
    from kilter.rl.loop import FREE
    from kilter.train.loop import last_checkpoint

    try:
        last_checkpoint(replace(job, output=str(folder)), FREE)
    except ValueError:
        return False
    return True


def train(job: Any, changes: Sequence[str]) -> Path:
    """Runs the job, told as changes of `JOB`, in a folder of its own, which it returns.

    Raises:
        Failed: if the run does.
    """
    output = next_folder(Path(job.output), lambda folder: can_resume(job, folder))
    kilter("rl", JOB, *changes, f"output={output}")
    print("\n" + answers_page(read_lines(output / "rollouts.jsonl")))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"\nThe largest process had {size(peak)} in memory.", flush=True)
    return output


def serve_and_ask(model: Path, job: Any) -> None:
    """Serves the model as long as it takes to ask it something.

    Raises:
        Failed: if the server does not start.
    """
    from openai import OpenAI

    from kilter.rl.tasks import build_task

    task = build_task(job.task, "held_out")
    process = _start("serve", model, "--port", 0, "--served-name", NAME, stdout=subprocess.PIPE)
    try:
        url = _address(process)
        print(f"{NAME} is served at {url}\n", flush=True)
        with OpenAI(base_url=url, api_key="none", timeout=SERVER_SECONDS) as client:
            for index in range(6):
                item = task[index]
                prompt = "".join(str(message["content"]) for message in item.messages)
                said = client.completions.create(
                    model=NAME, prompt=prompt, max_tokens=job.rollout.max_tokens, temperature=0,
                    stop=list(job.rollout.stop) or None)
                print(f"  {prompt} {said.choices[0].text.strip()}   "
                      f"(reference: {item.reference['answer']})", flush=True)
    finally:
        _end(process)


def _start(*arguments: object, stdout: int | None = None) -> subprocess.Popen[str]:
    words = [str(argument) for argument in arguments]
    print(f"$ kilter {' '.join(map(_quoted, words))}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "kilter", *words], stdout=stdout, text=True)


def _quoted(word: str) -> str:
    """As a shell takes it."""
    safe = shlex.quote(word)
    return f'"{word}"' if safe != word and not set(word) & set('"$`\\!') else safe


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, and as long as the command needs: a run writes its checkpoint, a server drains."""
    if process.poll() is None:
        process.terminate()
    process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    """Of the line that says where the server is."""
    assert process.stdout is not None
    for line in process.stdout:
        if " is served at " in line:
            return line.split(" is served at ")[1].split(";")[0]
    raise Failed("`kilter serve` ended before it served anything.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _job_class() -> type[Any]:
    from kilter.rl.config import RLJob

    return RLJob


# ---- what is told ----


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, from shapes alone: the first, whose shards are the largest.

    Attributes:
        parameters, gradients, moments: of the trainer (fp32; ZeRO 3 shards all of them).
        gathered: the largest group of parameters that is whole while it computes.
        rollout: the engine's part of the weights.
        cache: its keys and values.
    """

    parameters: int
    gradients: int
    moments: int
    gathered: int
    rollout: int
    cache: int

    @property
    def total(self) -> int:
        return (self.parameters + self.gradients + self.moments + self.gathered + self.rollout
                + self.cache)


def memory_of(spec: Any, dp: int, tp: int, kv_tokens: int) -> Memory:
    """Of a `ModelSpec` trained by ZeRO 3 over dp ranks and rolled out over tp."""
    import torch

    from kilter.models.decoder import Decoder
    from kilter.rl.reshard_layout import rollout_parts

    with torch.device("meta"):
        model = Decoder(spec)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    rows = {name: math.ceil(shape[0] / dp) * math.prod(shape[1:]) for name, shape in shapes.items()}
    groups: dict[str, int] = {}
    for name, shape in shapes.items():  # a layer is gathered by itself, what is outside together
        group = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        groups[group] = groups.get(group, 0) + math.prod(shape)
    part = sum(box.numel for shard in rollout_parts(model, tp)[0].values() for box in shard.boxes)
    shard_bytes = 4 * sum(rows.values())
    return Memory(parameters=shard_bytes, gradients=shard_bytes, moments=2 * shard_bytes,
                  gathered=4 * max(groups.values()) if dp > 1 else 0, rollout=4 * part,
                  cache=KV_BYTES * spec.kv_elements_per_token * kv_tokens // tp)


def memory_page(job: Any) -> str:
    """The account of a job's first rank, as text."""
    from kilter.weights.bridge import open_model
    from kilter.weights.pull import resolve

    spec = open_model(resolve(job.model.path)).spec
    kv_tokens = job.rollout.engine.num_pages * job.rollout.engine.page_size
    found = memory_of(spec, job.layout.dp, job.rollout.tp, kv_tokens)
    rows = [("trainer: parameters, its share", found.parameters),
            ("trainer: gradients, its share", found.gradients),
            ("trainer: AdamW's two moments, its share", found.moments),
            ("trainer: what is gathered at a time, at most", found.gathered),
            (f"rollout: its part of the weights (tp {job.rollout.tp})", found.rollout),
            (f"rollout: cache for {kv_tokens:,} tokens, its heads", found.cache),
            ("in all", found.total)]
    return ("Memory of a rank, fp32, beside Python, torch and activations\n"
            + table([(name, f"{nbytes:,}", size(nbytes)) for name, nbytes in rows]))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def answers_page(rollouts: Sequence[Mapping[str, Any]], count: int = 6) -> str:
    """The first answer to each of some prompts of the first step, and of the last."""
    parts = []
    for step in dict.fromkeys((rollouts[0]["step"], rollouts[-1]["step"])):
        firsts: dict[str, Mapping[str, Any]] = {}
        for rollout in rollouts:
            if rollout["step"] == step:
                firsts.setdefault(rollout["id"].rpartition("/")[0], rollout)
        parts.append(f"Answers of step {step}, and their rewards")
        parts += [f"  {r['rewards']['total']:.2f}  {r['prompt']}{r['answer']!r}"
                  for r in list(firsts.values())[:count]]
    return "\n".join(parts)


def folder_page(folder: Path) -> str:
    """The files of a folder and their sizes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return f"{folder}\n" + table([(path.name, size(path.stat().st_size)) for path in files])


def summary_page(lines: Sequence[Mapping[str, Any]]) -> str:
    """What a run's metrics come to: seconds, traffic, agreement, reward."""
    steps = [line for line in lines if line["kind"] == "step"]
    evals = [line for line in lines if line["kind"] == "eval"]
    seconds = total(line["seconds"] for line in steps)
    rows = [(axis, operation, f"{sent['calls']:,}", f"{sent['bytes']:,}", size(sent["bytes"]))
            for axis, operation, sent in traffic(steps) if sent["bytes"]]
    moved = sum(line["sent"]["bytes"] for line in steps if "sent" in line)
    gates = [line["gate"] for line in steps if "gate" in line]
    tokens = sum(gate["tokens"] for gate in gates)
    worst = max((gate["max"] for gate in gates), default=math.nan)
    parts = [f"Seconds of {len(steps)} steps, by phase (learn holds forward, backward, reduce and "
             "optimizer)",
             table([(name, f"{value:.1f}") for name, value in seconds.items()])]
    if rows:
        parts += ["", "What the first rank sent in these steps, by axis of the mesh",
                  table(rows, header=("axis", "operation", "calls", "bytes", ""), left=2)]
    parts += ["", f"New weights from trainer to rollout: {size(moved)} over all ranks and steps.",
              f"Largest difference of a log-probability, rollout against trainer: {worst} "
              f"({tokens:,} tokens compared)."]
    if evals:
        first, last = evals[0], evals[-1]
        parts.append(f"Held-out reward: {first['reward']:.3f} before, {last['reward']:.3f} after "
                     f"{last['step']} steps ({last['prompts']} prompts).")
    return "\n".join(parts)


def traffic(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, dict[str, int]]]:
    """(axis, operation, calls and bytes) over all steps."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for line in steps:
        for axis, operations in line["comm"].items():
            for operation, sent in operations.items():
                so_far = found.setdefault((axis, operation), {"calls": 0, "bytes": 0})
                for key in so_far:
                    so_far[key] += sent[key]
    return [(*key, sent) for key, sent in sorted(found.items())]


def total(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Key by key."""
    found: dict[str, float] = {}
    for values in tables:
        for key, value in values.items():
            found[key] = found.get(key, 0.0) + value
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
