"""What a run tells about itself. Rank 0 writes.

    output/metrics.jsonl   one JSON object a line: {"kind": "train" | "eval" | "start", "step": …}
    output/tensorboard/    the same numbers, if asked for
    output/profile/        torch's trace of the steps asked for, for Perfetto or chrome://tracing

A train line has loss, gradient norm and learning rate of its step (and, learning from pairs, how
often and by how much the chosen answer is ahead), and over the steps since the
line before: seconds by phase, tokens per second, and MFU, the share of what all ranks could do at
best that the model's FLOPs took (forward and backward, without recompute; evaluation and
checkpoints are left out). On a GPU a phase is the host's: a kernel counts where the host waits.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kilter.comm.collectives import all_reduce_max, all_reduce_sum
from kilter.comm.counter import CommCounter
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import Spread
from kilter.report.machine import best_seconds, gemm_rate
from kilter.report.text import short, size
from kilter.train.config import OF_PAIRS, TrainJob
from kilter.train.data import Pack
from kilter.train.record import Record
from kilter.train.step import StepResult


class Monitor(Record):
    """Measures a run and tells of it. Every rank has one and calls all of it.

    Args:
        step: the step the run goes on from.
        steps: its last.
    """

    def __init__(self, job: TrainJob, spread: Spread, step: int, steps: int) -> None:
        mesh = spread.mesh
        super().__init__(Path(job.output) if mesh.rank == 0 else None, jsonl=job.log.jsonl,
                         tensorboard=job.log.tensorboard, step=step)
        self._config, self._steps, self._mesh = job.log, steps, mesh
        self._counted = "pairs" if job.kind in OF_PAIRS else "targets"
        self._device = torch.device(mesh.device_type)
        self._spec = spread.model.spec
        shapes = {name: shard.shape for name, shard in spread.shards.items()
                  if name != "embed.weight" or self._spec.tied_head}
        self._matrices = sum(s[0] * s[1] for s in shapes.values() if len(s) == 2)
        # A reference without the adapters is one more forward pass in every step.
        self._reference = sum(
            s[0] * s[1] for name, s in shapes.items() if len(s) == 2 and ".adapter." not in name
        ) if job.kind == "dpo" and job.lora is not None else 0
        declared = job.log.peak_flops
        self._peak_source = "declared" if declared else "measured"
        self._peak = float(all_reduce_sum(torch.tensor(
            [declared or measured_peak(self._device)], dtype=torch.float64), mesh.axis("world")))
        self._profile: torch.profiler.profile | None = None
        self._folder = Path(job.output) / "profile"
        self._traffic: dict[str, Any] = {}
        self._flops, self._tokens, self._since = 0.0, 0, time.perf_counter()
        if self._first:
            parameters = sum(torch.Size(shard.shape).numel() for shard in spread.shards.values())
            self.write("start", step, {
                "layout": str(job.layout), "ranks": job.layout.world, "parameters": parameters,
                "device": mesh.device_type, "peak_flops": self._peak,
                "peak_source": self._peak_source})
            self.say(f"{short(parameters)} parameters on {job.layout.world} "
                     f"{'rank' if job.layout.world == 1 else 'ranks'} ({job.layout}); {steps} "
                     f"steps of {job.micro_batches} packs of up to {job.data.seq_len} tokens.")

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step: counts what it sends if it will be told of, traces it if that was asked
        for."""
        wanted = self._config.profile
        if (wanted and wanted[0] <= number <= wanted[1] and self._first
                and self._profile is None):
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.start()
        if self._is_told(number) and self._mesh.layout.world > 1:
            with CommCounter(self._mesh.axes()) as counter:
                yield
            self._traffic = by_axis(counter)
        else:
            yield
        if wanted and number == wanted[1]:
            self._end_profile()

    def tell(self, step: int, result: StepResult, packs: Sequence[Pack], *, lr: float, tokens: int,
             epoch: int, more: Mapping[str, float]) -> None:
        """After a step.

        Args:
            packs: this rank's.
            tokens: since the run began.
            more: numbers of this step that the kind of training has beside the loss.
        """
        self._tokens += result.tokens
        for pack in packs:
            lengths = pack.cu_seqlens_S1.diff().tolist()
            self._flops += training_flops(self._spec, self._matrices, lengths)
            if self._reference:
                self._flops += forward_flops(self._spec, self._reference, lengths)
        if not self._is_told(step):
            return
        now = time.perf_counter()
        seconds = {**self._seconds, "total": now - self._since}
        spent = max(1e-9, seconds["total"] - sum(seconds.get(name, 0.0) for name in
                                                 ("evaluation", "checkpoint")))
        flops = float(all_reduce_sum(torch.tensor([self._flops], dtype=torch.float64),
                                     self._mesh.axis("dp")))
        memory = int(all_reduce_max(torch.tensor([peak_memory(self._device)]),
                                    self._mesh.axis("world")))
        rate, mfu = self._tokens / spent, flops / spent / self._peak
        self.write("train", step, {
            "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, "tokens": tokens,
            "targets": result.valid, "epoch": epoch, "tokens_per_second": rate, "mfu": mfu,
            "memory_bytes": memory, "seconds": seconds, "comm": self._traffic, **more})
        self.say(f"step {step}/{self._steps}  loss {result.loss:.4f}{_said(more)}"
                 f"  norm {result.grad_norm:.3g}"
                 f"  lr {lr:.3g}  {short(rate)} tokens/s  MFU {mfu:.1%} of {short(self._peak)}"
                 f"FLOP/s ({self._peak_source})  {size(memory)}  epoch {epoch}")
        self._seconds = {}
        self._flops, self._tokens, self._since = 0.0, 0, now

    def evaluated(self, step: int, loss: float, targets: int, more: Mapping[str, float]) -> None:
        """After an evaluation."""
        self.write("eval", step, {"loss": loss, "targets": targets, **more})
        self.say(f"step {step}/{self._steps}  held-out loss {loss:.4f}{_said(more)} over {targets} "
                 f"{self._counted}")

    def close(self) -> None:
        self._end_profile()
        super().close()

    def _is_told(self, step: int) -> bool:
        return step % self._config.every == 0 or step == self._steps

    def _end_profile(self) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        assert self._config.profile is not None
        first, last = self._config.profile
        profile.export_chrome_trace(str(self._folder / f"steps-{first}-{last}.json"))


def training_flops(spec: ModelSpec, matrices: int, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward, which counts twice the forward (arXiv 2104.04473, appendix);
    see `forward_flops`."""
    return 3.0 * forward_flops(spec, matrices, lengths)


def forward_flops(spec: ModelSpec, matrices: int, lengths: Sequence[int]) -> float:
    """FLOPs of a forward pass over sequences of these lengths. A multiply-add counts 2; norms,
    rope, softmax and activations are left out.

    Args:
        matrices: elements of all matrices that a token is multiplied with.
    """
    seen = sum(_seen(n, layer.window or n) for n in lengths for layer in spec.layers)
    return 2.0 * matrices * sum(lengths) + 4.0 * spec.num_heads * spec.head_dim * seen


def _seen(length: int, window: int) -> int:
    """Keys that the tokens of a sequence see, all together."""
    rising = min(length, window)
    return rising * (rising + 1) // 2 + (length - rising) * window


def measured_peak(device: torch.device) -> float:
    """FLOP/s of a large float32 matrix product on this rank's device; on a CPU with the threads
    this rank has, while the other ranks measure too."""
    if device.type == "cpu":
        return gemm_rate(0.3)
    n = 8192
    a, b, out = (torch.ones(n, n, device=device) for _ in range(3))

    def product() -> None:
        torch.mm(a, b, out=out)
        torch.cuda.synchronize(device)

    return 2 * n**3 / best_seconds(product, 0.3)


def peak_memory(device: torch.device) -> int:
    """Bytes: the process's largest resident set, or on a GPU the most that tensors took there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def by_axis(counter: CommCounter) -> dict[str, dict[str, dict[str, int]]]:
    """axis -> operation -> calls and bytes of one rank."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (axis, operation), sent in sorted(counter.traffic.items()):
        found.setdefault(axis, {})[operation] = asdict(sent)
    return found


def _said(more: Mapping[str, float]) -> str:
    """What the console says of the numbers beside the loss."""
    if "accuracy" not in more:
        return ""
    return f"  accuracy {more['accuracy']:.1%}  margin {more['margin']:.3g}"
