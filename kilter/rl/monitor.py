"""What a run tells: lines on the console, ``metrics.jsonl``, TensorBoard, and some of its rollouts.

    metrics.jsonl     {"kind": "step", "step": 3, "reward": …, "seconds": {…}, "comm": {…}, …}
                      {"kind": "eval", "step": 10, "reward": …, "parts": {…}}
    rollouts.jsonl    {"step": 3, "id": …, "prompt": …, "answer": …, "rewards": {…}, …}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_reduce_max
from kilter.comm.counter import CommCounter
from kilter.mesh.mesh import Mesh
from kilter.rl.config import LogConfig
from kilter.train.metrics import by_axis, numbers, peak_memory, take_back


class Monitor:
    """Of one rank; only the first writes.

    Args:
        meshes: whose axes' communication is counted.
        world: all ranks of the run, of which this one computes on ``device``.
        step: the step the run goes on from; None: it begins.
    """

    def __init__(self, output: Path, config: LogConfig, meshes: Sequence[Mesh], world: Axis,
                 device: torch.device, step: int | None, steps: int) -> None:
        self._config, self._steps, self._world, self._device = config, steps, world, device
        self._first = world.index == 0
        self.unread = False  # whether the console is gone, which ends the run
        self._meshes = meshes
        self._seconds: dict[str, float] = {}
        self._comm: dict[str, Any] = {}
        self._started = time.perf_counter()
        self._files: dict[str, Any] = {}
        self._board: Any = None
        if not self._first:
            return
        kept = -1 if step is None else step  # the last whose lines stay
        output.mkdir(parents=True, exist_ok=True)
        for name in ("metrics", "rollouts"):
            path = output / f"{name}.jsonl"
            take_back(path, kept)
            self._files[name] = open(path, "a", encoding="utf-8")  # noqa: SIM115  (see close)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(output / "tensorboard"), purge_step=kept + 1)

    def say(self, text: str) -> None:
        if self._first and not self.unread:
            try:
                print(text, flush=True)
            except OSError:  # a reader that went away, a terminal that was closed
                self.unread = True

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Its seconds are told with the step's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step; counts what this rank sends, by axis, if the step is told of."""
        self._seconds, self._comm = {}, {}
        self._started = time.perf_counter()
        axes = [axis for mesh in self._meshes for axis in mesh.axes()]
        if axes and self.is_told(number):
            with CommCounter(axes) as counter:
                yield
            self._comm = by_axis(counter)
        else:
            yield

    def is_told(self, step: int) -> bool:
        return step % self._config.every == 0 or step == self._steps

    def tell(self, step: int, values: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]]
             ) -> None:
        """After a step."""
        if not self.is_told(step):
            return
        seconds = {**self._seconds, "total": time.perf_counter() - self._started}
        self._write("step", step, {**values, "memory_bytes": self._memory(), "seconds": seconds,
                                   "comm": self._comm})
        if self._first:
            for rollout in rollouts[:self._config.samples]:
                self._files["rollouts"].write(json.dumps({"step": step, **rollout}) + "\n")
            self._files["rollouts"].flush()
        gap = values["gate"]["max"] if "gate" in values else None
        said = [f"step {step}/{self._steps}", f"reward {values['reward']:.3f}"]
        said += [f"{name} {values[name]:.3g}" for name in ("kl", "entropy", "clip_fraction")
                 if values.get(name)]
        said += [f"length {values['length']:.0f}", f"norm {values['grad_norm']:.3g}"]
        if gap is not None:
            said.append(f"rollout-trainer {gap:g}")
        said.append(f"{seconds['total']:.1f} s")
        self.say("  ".join(said))

    def evaluated(self, step: int, reward: float, parts: Mapping[str, float], prompts: int) -> None:
        """After an evaluation."""
        self._write("eval", step, {"reward": reward, "parts": dict(parts), "prompts": prompts,
                                   "memory_bytes": self._memory()})
        self.say(f"step {step}/{self._steps}  held-out reward {reward:.3f} over {prompts} prompts")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()

    def _memory(self) -> int:
        """Of the rank that used most so far; collective."""
        return int(all_reduce_max(torch.tensor([peak_memory(self._device)]), self._world))

    def _write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if not self._first:
            return
        self._files["metrics"].write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._files["metrics"].flush()
        if self._board is not None:
            for name, value in numbers(values):
                self._board.add_scalar(f"{kind}/{name}", value, step)
