"""Runs a schedule on the ranks of a pipeline: this rank's list of actions, one after the other.

Sends leave at once and are waited for at the end; receives are posted a little ahead of where they
are needed, so data travels while stages compute. Messages carry tags, so it does not matter in
which order they arrive. (NCCL has no tags: there, every direction between two ranks has a group of
its own, and the schedule's messages are in order in each.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.spec import ModelSpec
from kilter.parallel.data import DataParallel
from kilter.parallel.pipeline.generators import make_schedule
from kilter.parallel.pipeline.schedule import Action, Kind, Schedule
from kilter.parallel.pipeline.stage import DeferredGrads, Recorded, Stage, split_layers

Phase = Callable[[str], AbstractContextManager[None]]
Score = Callable[[Callable[..., Tensor], int], Tensor]

_AHEAD = 2  # receives that are posted before they are needed


@dataclass(frozen=True)
class PipelineConfig:
    """How a pipeline's ranks work.

    Attributes:
        schedule: one of `kilter.parallel.pipeline.generators.NAMES`.
        stages_per_rank: default 2 for interleaved, zb-v and dualpipe-v, and 1 for the others.
        layers: layers of each stage in order; default: so that the dearest stage is cheapest.
    """

    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    layers: tuple[int, ...] | None = None

    def make(self, ranks: int, micro_batches: int) -> Schedule:
        """Raises ValueError for what cannot be."""
        return make_schedule(self.schedule, ranks, micro_batches, self.stages_per_rank)

    def layers_of(self, spec: ModelSpec, ranks: int) -> tuple[Schedule, list[range]]:
        """What the stages of so many ranks are: any schedule of theirs, for its placement, and
        the layers of each. Raises ValueError for what cannot be."""
        if ranks == 1:
            return make_schedule("1f1b", 1, 1), [range(spec.num_layers)]
        schedule = self.make(ranks, 2 * ranks)  # a number of micro-batches that all can take
        return schedule, split_layers(spec, schedule.num_stages, self.layers)


@dataclass(frozen=True)
class Part:
    """A stage on its rank: the module, and what keeps its parameters and gradients."""

    stage: Stage
    data: DataParallel
    deferred: DeferredGrads | None  # where the schedule splits the backward pass


@dataclass
class _Flow:
    """What is under way in one run, by (stage, micro-batch)."""

    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # whose gradient is sent
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of outputs, come in
    recorded: dict[tuple[int, int], Recorded] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # backward passes of each stage to come
    sending: list[tuple[Any, Tensor]] = field(default_factory=list)


class Pipeline:
    """This rank's stages and the way from one stage to the next.

    Args:
        parts: this rank's stages by number.
        placement: the rank on the axis of every stage.
        rows: of a batch, how many rows of [rows, D] go from stage to stage.

    Attributes:
        trace: (action, start, end) of the last run, in seconds of `time.perf_counter`.
    """

    def __init__(self, parts: Mapping[int, Part], placement: Sequence[int], config: PipelineConfig,
                 axis: Axis, hidden: int, rows: Callable[[Batch], int],
                 lanes: Mapping[tuple[Kind, int, int], Axis] | None = None) -> None:
        self.parts = dict(parts)
        self.placement = tuple(placement)
        self.config, self.axis = config, axis
        self.trace: list[tuple[Action, float, float]] = []
        self._hidden, self._rows, self._lanes = hidden, rows, lanes or {}
        self._schedules: dict[int, Schedule] = {}

    @property
    def last(self) -> int:
        return len(self.placement) - 1

    def schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = self.config.make(self.axis.size, micro_batches)
        return self._schedules[micro_batches]

    def run(self, batches: Sequence[Batch], loss: Score, phase: Phase) -> Tensor:
        """Forward and backward of all micro-batches.

        Args:
            loss: of the last stage's forward, which takes the rest of `Stage.forward`'s arguments,
                and a micro-batch's number, the scalar to go back from.

        Returns:
            The sum of the losses, float64; 0 on ranks without the last stage.
        """
        flow = _Flow(left=dict.fromkeys(self.parts, len(batches)))
        total = torch.zeros((), dtype=torch.float64, device=self._device(batches))

        def forward(stage: int, k: int) -> None:
            part, x_TD = self.parts[stage], flow.inputs.get((stage, k))
            if part.deferred is not None:
                flow.recorded[stage, k] = part.deferred.record()
            try:
                out = self._through(stage, batches[k], x_TD, loss, k)
            finally:
                if part.deferred is not None:
                    part.deferred.stop()
            if stage == self.last:
                total.add_(out.detach())
            elif self.placement[stage + 1] == self.axis.index:
                flow.inputs[stage + 1, k] = out.detach().requires_grad_()
            flow.outputs[stage, k] = out

        def backward(stage: int, k: int) -> None:
            out, x_TD = flow.outputs.pop((stage, k)), flow.inputs.pop((stage, k), None)
            grad = flow.grads.pop((stage, k), None)
            if out.requires_grad:  # not of a first stage that is frozen
                torch.autograd.backward(out, grad)
            del out, grad
            if x_TD is not None and self.placement[stage - 1] == self.axis.index:
                flow.grads[stage - 1, k] = _grad_of(x_TD)
            elif x_TD is not None:
                flow.inputs[stage, k] = x_TD  # until its gradient is sent

        def begin(stage: int) -> None:
            flow.left[stage] -= 1
            self.parts[stage].data.begin(last=flow.left[stage] == 0)

        def weights(stage: int, k: int) -> None:
            DeferredGrads.make(flow.recorded.pop((stage, k)))
            self.parts[stage].data.arrived()

        def do(action: Action) -> None:
            stage, k = action.stage, action.micro_batch
            if action.kind is Kind.F:
                with phase("forward"):
                    forward(stage, k)
            elif action.kind is Kind.B:
                with phase("backward"):
                    begin(stage)
                    backward(stage, k)
                    if self.parts[stage].deferred is not None:
                        weights(stage, k)
            elif action.kind is Kind.I:
                with phase("backward"):
                    backward(stage, k)
                    waiting = (recorded for (at, _), recorded in flow.recorded.items()
                               if at == stage)
                    if (first := next(waiting)) is not flow.recorded[stage, k]:
                        DeferredGrads.join(flow.recorded[stage, k], first)
            elif action.kind is Kind.W:
                with phase("backward"):
                    begin(stage)
                    weights(stage, k)
            elif action.kind is Kind.SEND_F:
                self._send(action, flow.outputs[stage, k].detach(), flow)
            elif action.kind is Kind.SEND_B:
                self._send(action, _grad_of(flow.inputs.pop((stage, k))), flow)

        def arrived(action: Action, x_TD: Tensor) -> None:
            if action.kind is Kind.RECV_F:
                flow.inputs[action.stage, action.micro_batch] = x_TD.requires_grad_()
            else:
                flow.grads[action.stage, action.micro_batch] = x_TD

        actions = self.schedule(len(batches)).actions[self.axis.index]
        self._follow(actions, batches, do, arrived, flow, phase)
        return total

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], score: Score) -> list[Tensor | None]:
        """Forward alone.

        Returns:
            What ``score`` (as `run`'s loss) gives of every micro-batch; None on ranks without the
            last stage.
        """
        flow = _Flow()
        scores: list[Tensor | None] = [None] * len(batches)

        def do(action: Action) -> None:
            stage, k = action.stage, action.micro_batch
            if action.kind is Kind.SEND_F:
                self._send(action, flow.outputs.pop((stage, k)), flow)
                return
            out = self._through(stage, batches[k], flow.inputs.pop((stage, k), None), score, k)
            if stage == self.last:
                scores[k] = out
            elif self.placement[stage + 1] == self.axis.index:
                flow.inputs[stage + 1, k] = out
            else:
                flow.outputs[stage, k] = out

        def arrived(action: Action, x_TD: Tensor) -> None:
            flow.inputs[action.stage, action.micro_batch] = x_TD

        self._follow(list(self._forward_actions(len(batches))), batches, do, arrived, flow)
        return scores

    def _forward_actions(self, count: int) -> Iterable[Action]:
        """Every stage as soon as the wave of a micro-batch can have come to it."""
        me, place = self.axis.index, self.placement
        for stage, k in sorted(((s, k) for s in self.parts for k in range(count)),
                               key=lambda at: (sum(at), at)):
            if stage and place[stage - 1] != me:
                yield Action(Kind.RECV_F, stage, k, place[stage - 1])
            yield Action(Kind.F, stage, k)
            if stage < self.last and place[stage + 1] != me:
                yield Action(Kind.SEND_F, stage, k, place[stage + 1])

    def _through(self, stage: int, batch: Batch, x_TD: Tensor | None, score: Score, k: int
                 ) -> Tensor:
        module = self.parts[stage].stage
        if stage < self.last:
            return module(batch, x_TD=x_TD)
        return score(partial(module, x_TD=x_TD), k)

    def _follow(self, actions: Sequence[Action], batches: Sequence[Batch],
                do: Callable[[Action], None], arrived: Callable[[Action, Tensor], None],
                flow: _Flow, phase: Phase | None = None) -> None:
        """Goes through the actions; ``do`` all but receives."""
        device = self._device(batches)
        receives = iter([action for action in actions if action.kind.receives])
        posted: list[tuple[Any, Tensor]] = []

        def post() -> None:
            if (action := next(receives, None)) is not None:
                x_TD = torch.empty(self._rows(batches[action.micro_batch]), self._hidden,
                                   device=device)
                posted.append((self._exchange(dist.irecv, action, x_TD), x_TD))

        for _ in range(_AHEAD):
            post()
        self.trace = []
        for action in actions:
            start = time.perf_counter()
            if action.kind.receives:
                work, x_TD = posted.pop(0)
                if phase is None:
                    work.wait()
                else:
                    with phase("transfer"):
                        work.wait()
                arrived(action, x_TD)
                post()
            else:
                do(action)
            self.trace.append((action, start, time.perf_counter()))
            flow.sending = [(work, x) for work, x in flow.sending if not work.is_completed()]
        for work, _ in flow.sending:
            work.wait()

    def _send(self, action: Action, x_TD: Tensor, flow: _Flow) -> None:
        x_TD = x_TD.contiguous()
        flow.sending.append((self._exchange(dist.isend, action, x_TD), x_TD))

    def _exchange(self, how: Callable[..., Any], action: Action, x_TD: Tensor) -> Any:
        """``dist.isend`` or ``irecv`` of an action's message."""
        backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
        # A message is named by the stage that uses it.
        to = action.stage + {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(action.kind, 0)
        tag = 2 * (action.micro_batch * len(self.placement) + to) + backward
        axis = self.axis
        if self._lanes:
            ends = (self.axis.index, action.peer)
            axis = self._lanes[Kind.SEND_B if backward else Kind.SEND_F,
                               *(ends if action.kind.sends else ends[::-1])]
        return how(x_TD, self.axis.ranks[action.peer], group=axis.members, tag=tag)

    def _device(self, batches: Sequence[Batch]) -> torch.device:
        return batches[0].tokens_T.device


def lanes(mesh: Mesh, placement: Sequence[int]) -> dict[tuple[Kind, int, int], Axis]:
    """A group for every direction of messages of one kind between two ranks of a pipeline, by
    (SEND_F or SEND_B, sender, receiver) on its axis; all called pp. Collective."""
    forward = sorted({(a, b) for a, b in pairwise(placement) if a != b})
    keys = [(Kind.SEND_F, a, b) for a, b in forward] + [(Kind.SEND_B, b, a) for a, b in forward]
    return {(kind, a, b): mesh.make_axis("pp", [sorted((ranks[a], ranks[b]))
                                                for ranks in mesh.layout.groups("pp")])
            for kind, a, b in keys}


def _grad_of(x_TD: Tensor) -> Tensor:
    grad = x_TD.grad
    return torch.zeros_like(x_TD) if grad is None else grad
