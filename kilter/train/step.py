"""One training step: the same numbers whatever the layout, the packing or the micro-batches.

    loss = sum of token losses / number of valid targets of the whole step, all ranks

so every target weighs the same wherever it stands. Nothing is changed before loss and gradient are
known to be finite on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.objects import gather_objects
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread
from kilter.parallel.context.plan import spread_batch
from kilter.parallel.norm import clip_gradients, culprits, gradient_norm
from kilter.train.optimizer import Optimizer

_NAMED = 5  # parameters that an error names

Phase = Callable[[str], AbstractContextManager[None]]
# (forward, number of the micro-batch, what each counts) -> the sum of its losses times that.
Loss = Callable[[Callable[..., Tensor], int, float], Tensor]


class MicroBatch(Protocol):
    """What a step takes, see `kilter.train.data.packing.Pack`."""

    @property
    def valid(self) -> int:
        """Targets that count, or whatever else a step's loss is divided by the number of."""

    @property
    def targets_T(self) -> Tensor:
        """int64 [T] on the CPU; negative where there is no target."""

    def batch(self, device: torch.device) -> Batch: ...


@dataclass(frozen=True)
class StepResult:
    """Of the whole step, the same on every rank.

    Attributes:
        loss: mean over valid targets.
        grad_norm: before clipping.
        valid: valid targets.
        tokens: of the micro-batches in which a target counts (fillers have none), without padding.
    """

    loss: float
    grad_norm: float
    valid: int
    tokens: int


class Losses(Protocol):
    """Makes the loss of micro-batches of this rank, which ``rows`` has as they are computed. All
    ranks call, so it may run the model."""

    def __call__(self, spread: Spread, micro_batches: Sequence[MicroBatch],
                 rows: Sequence[tuple[Batch, Tensor]]) -> Loss: ...


def token_losses(spread: Spread, micro_batches: Sequence[MicroBatch],
                 rows: Sequence[tuple[Batch, Tensor]]) -> Loss:
    """`Losses`: of all targets, negative log-likelihood."""
    def loss(forward: Callable[..., Tensor], k: int, count: float) -> Tensor:
        return token_loss(forward, *rows[k], count)

    return loss


class NotFinite(RuntimeError):
    """A loss or gradient was NaN or infinite; the step was not taken and nothing has changed."""


def train_step(spread: Spread, optimizer: Optimizer, micro_batches: Sequence[MicroBatch], *,
               factor: float = 1.0, max_norm: float | None = 1.0, losses: Losses = token_losses,
               phase: Phase = lambda _: nullcontext()) -> StepResult:
    """Forward and backward of every micro-batch, clip, step.

    Args:
        micro_batches: this rank's; the ranks of tensor, context and pipeline axes have the same
            ones, and every data-parallel rank as many.
        factor: of the peak learning rate.
        max_norm: what the true global gradient norm is clipped to; None: not at all.
        losses: what is summed, and divided by the number of valid targets of the whole step.
        phase: entered around each part of the step: ``forward``, ``backward`` (with the
            communication that leaves meanwhile), ``transfer`` (waiting for another stage of a
            pipeline), ``reduce`` (what of the gradients' sums is still to come) and ``optimizer``
            (norm, clipping, step).

    Raises:
        NotFinite: on all ranks, before anything is changed; names what is not finite and where.
        ValueError: if no target of the whole step counts.
    """
    mesh = spread.mesh
    device = torch.device(mesh.device_type)
    counts = torch.tensor([sum(m.valid for m in micro_batches),
                           sum(m.targets_T.numel() for m in micro_batches if m.valid)],
                          dtype=torch.int64)
    valid, tokens = _summed(counts, mesh.axis("dp")).tolist()
    if valid == 0:
        raise ValueError("No target of this step counts: every label is masked. Check the data and "
                         "its masks.")
    rows = [local_rows(spread, m, device) for m in micro_batches]

    loss = partial(_counted, losses(spread, micro_batches, rows), 1.0 / valid)
    own_loss = spread.backward_all([batch for batch, _ in rows], loss, phase)
    loss_value, norm = update(spread, optimizer, own_loss, factor=factor, max_norm=max_norm,
                              phase=phase)
    return StepResult(loss_value, norm, valid, tokens)


def update(spread: Spread, optimizer: Optimizer, own_loss: Tensor, *, factor: float,
           max_norm: float | None, phase: Phase) -> tuple[float, float]:
    """What follows the backward passes of a step: sums over ranks, clipping, the optimizer.

    Args:
        own_loss: float64, this rank's part of the loss.

    Returns:
        (loss, norm of the gradient before clipping), the same on all ranks.

    Raises:
        NotFinite: as `train_step`.
    """
    mesh = spread.mesh
    with phase("reduce"):
        spread.finish()
        loss = float(_summed(own_loss.clone(), mesh.axis("pp_dp_cp")))
    with phase("optimizer"):
        norm = gradient_norm(spread.held, mesh.axis("world"), device=mesh.device_type,
                             finite=math.isfinite(loss))
        if not math.isfinite(norm):
            message = _not_finite(spread, loss, norm, float(own_loss))
            spread.updated()  # drops the gradients
            raise NotFinite(message)
        if max_norm is not None:
            clip_gradients(spread.held, norm, max_norm)
        optimizer.step(factor)
        spread.updated()
    return loss, norm


def local_rows(spread: Spread, micro_batch: MicroBatch, device: torch.device
               ) -> tuple[Batch, Tensor]:
    """A micro-batch as this rank computes it, and its targets: its rows under context parallelism,
    padded to what sequence parallelism can divide."""
    batch, targets_T = micro_batch.batch(device), micro_batch.targets_T.to(device)
    layout = spread.mesh.layout
    multiple = layout.tp if layout.sequence_parallel else 1
    if layout.cp == 1 and batch.num_tokens % multiple == 0:
        return batch, targets_T
    local = spread_batch(batch, spread.mesh.axis("cp"), spread.context, multiple)
    return local.batch, local.local(targets_T, -1)


def token_loss(forward: Callable[..., Tensor], batch: Batch, targets_T: Tensor, count: float = 1.0
               ) -> Tensor:
    """Sum of the token losses of one micro-batch (negative log-likelihood) times what each token
    counts, float32 scalar."""
    return forward(batch, targets_T,
                   torch.full(targets_T.shape, count, device=targets_T.device))


@torch.no_grad()
def evaluate(spread: Spread, micro_batches: Iterable[MicroBatch], losses: Losses = token_losses
             ) -> tuple[float, int]:
    """(mean loss over valid targets, their number), over all ranks: sums are divided once, so
    batches of different sizes weigh by their targets."""
    mesh = spread.mesh
    device = torch.device(mesh.device_type)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    valid = torch.zeros((), dtype=torch.int64)
    for some in _runs(micro_batches, 1 if spread.pipeline is None else 4 * mesh.layout.pp):
        rows = [local_rows(spread, m, device) for m in some]
        score = partial(_counted, losses(spread, some, rows), 1.0)
        for value in spread.forward_all([batch for batch, _ in rows], score):
            if value is not None:
                loss += value.double()
        valid += sum(m.valid for m in some)
    _summed(loss, mesh.axis("pp_dp_cp"))
    targets = int(_summed(valid, mesh.axis("dp")))
    if targets == 0:
        raise ValueError("No target of the evaluation data counts: every label is masked.")
    return float(loss) / targets, targets


def _counted(loss: Loss, count: float, forward: Callable[..., Tensor], k: int) -> Tensor:
    return loss(forward, k, count)


def _runs(items: Iterable[MicroBatch], size: int) -> Iterator[list[MicroBatch]]:
    run: list[MicroBatch] = []
    for item in items:
        run.append(item)
        if len(run) == size:
            yield run
            run = []
    if run:
        yield run


def _summed(values: Tensor, axis: Axis) -> Tensor:
    if axis.size > 1:
        dist.all_reduce(values, group=axis.members)
    return values


def _not_finite(spread: Spread, loss: float, norm: float, own_loss: float) -> str:
    """A sentence that names the ranks and parameters at fault; collective."""
    mine = (spread.mesh.rank, loss, math.isfinite(own_loss), culprits(spread.held))
    said: dict[str, list[int]] = {}
    for rank, theirs, finite, names in gather_objects(mine, spread.mesh.axis("world")):
        loss = loss if math.isfinite(theirs) else theirs  # of ranks that should have the same
        what = [] if finite else ["the loss"]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            what.append(f"the gradients of {', '.join(names[:_NAMED])}{more}")
        if what:
            said.setdefault(" and ".join(what), []).append(rank)
    who = "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in said.items())
    return (f"The loss is {loss} and the gradient norm {norm}; the step was not taken. Not finite: "
            f"{who or 'only the sum over ranks'}.")


def _ranks(ranks: list[int]) -> str:
    """"rank 3", "ranks 0, 4 to 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {said}"
