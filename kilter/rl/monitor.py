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
from kilter.train.metrics import by_axis, peak_memory
from kilter.train.record import Record, lines_to


class Monitor(Record):
    """Of one rank; only the first writes.

    Args:
        meshes: whose axes' communication is counted.
        world: all ranks of the run, of which this one computes on ``device``.
        step: the step the run goes on from; None: it begins.
    """

    def __init__(self, output: Path, config: LogConfig, meshes: Sequence[Mesh], world: Axis,
                 device: torch.device, step: int | None, steps: int) -> None:
        kept = -1 if step is None else step
        super().__init__(output if world.index == 0 else None, jsonl=True,
                         tensorboard=config.tensorboard, step=kept)
        self._config, self._steps, self._world, self._device = config, steps, world, device
        self._meshes = meshes
        self._comm: dict[str, Any] = {}
        self._started = time.perf_counter()
        self._rollouts = lines_to(output / "rollouts.jsonl", kept) if self._first else None

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
        self.write("step", step, {**values, "memory_bytes": self._memory(), "seconds": seconds,
                                  "comm": self._comm})
        if self._rollouts is not None:
            for rollout in rollouts[:self._config.samples]:
                self._rollouts.write(json.dumps({"step": step, **rollout}) + "\n")
            self._rollouts.flush()
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
        self.write("eval", step, {"reward": reward, "parts": dict(parts), "prompts": prompts,
                                  "memory_bytes": self._memory()})
        self.say(f"step {step}/{self._steps}  held-out reward {reward:.3f} over {prompts} prompts")

    def close(self) -> None:
        super().close()
        if self._rollouts is not None:
            self._rollouts.close()

    def _memory(self) -> int:
        """Of the rank that used most so far; collective."""
        return int(all_reduce_max(torch.tensor([peak_memory(self._device)]), self._world))
