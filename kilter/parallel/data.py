"""Data parallelism: replicas of a model, and what of them is spread (ZeRO, arXiv 1910.02054).

    zero  parameters  gradients         optimizer  communication of a step, S bytes of gradients
    0     whole       whole             whole      all-reduce S
    1     whole       whole, then rows  rows       reduce-scatter S, all-gather S
    2     whole       rows              rows       reduce-scatter S per micro-batch, all-gather S
    3     rows        rows              rows       FSDP2: that, and all-gathers of parameters

All four present one face: `held` is what this rank's optimizer steps, plain local tensors with the
boxes of the whole parameter that they are. Gradients are sums over ranks, never means: the loss has
been divided by the global number of tokens before. Buckets leave while backward still runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_gather_rows, split_sizes
from kilter.parallel.shards import Shard

# torch 2.13 renames this; the old name warns there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BUCKET_BYTES = 25 << 20  # gradients that leave together


@dataclass
class Held:
    """A part of a parameter that this rank's optimizer steps.

    Attributes:
        name: the parameter's.
        tensor: its local elements; ``grad`` is set by `DataParallel.finish`.
        shard: which elements of the whole these are, and whether this rank counts for them.
        fused: of a matrix that is several: the equal groups that its rows are in, and how many
            each of the matrices has in a group, in order (`kilter.models.adapter.arrangement`).
    """

    name: str
    tensor: nn.Parameter
    shard: Shard
    fused: tuple[int, tuple[int, ...]] | None = None


class DataParallel(Protocol):
    """What the four have in common. Per step: `begin` before each backward, `finish` after the
    last, the optimizer's step over `held`, `updated`."""

    held: list[Held]

    def begin(self, last: bool) -> None:
        """Announces a micro-batch's backward; ``last`` if it is the step's last."""

    def arrived(self) -> None:
        """After gradients of weights that were made apart from their backward pass (where the
        module's own hooks cannot see them)."""

    def finish(self) -> None:
        """Waits until every ``held.tensor.grad`` is the sum over all ranks; zeros where a parameter
        took no part on any."""

    def updated(self) -> None:
        """Brings what the optimizer changed to where the model reads it; gradients are dropped."""


class Replicated:
    """ZeRO 0: every rank has everything (DDP)."""

    def __init__(self, parameters: dict[str, nn.Parameter], shards: dict[str, Shard],
                 axis: Axis) -> None:
        self._axis = axis
        self.held = [Held(name, parameter, shards[name].owned_by(axis.index == 0))
                     for name, parameter in parameters.items()]
        self._last = False
        self._buckets = _Buckets([h.tensor for h in self.held], self._reduce)
        self._sent: list[tuple[list[nn.Parameter], Tensor, dist.Work | None]] = []

    def begin(self, last: bool) -> None:
        self._last = last
        self._buckets.begin()

    def arrived(self) -> None:
        pass

    def finish(self) -> None:
        self._buckets.finish()
        for bucket, flat, work in self._sent:
            if work is not None:
                work.wait()
            for parameter, grad in zip(bucket, _views(flat, bucket), strict=True):
                parameter.grad = grad
        self._sent.clear()
        for held in self.held:  # one rank has sent nothing; that it took no part is no difference
            held.tensor.grad = _grad(held.tensor)

    def updated(self) -> None:
        for held in self.held:
            held.tensor.grad = None

    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        if not self._last or self._axis.size == 1:
            return
        flat = torch.cat([_grad(p).flatten() for p in bucket])
        for parameter in bucket:
            parameter.grad = None
        self._sent.append((bucket, flat, dist.all_reduce(flat, group=self._axis.group,
                                                         async_op=True)))


class ShardedStates:
    """ZeRO 1 and 2: whole parameters, but each rank steps only its rows of them. With zero 2 a
    micro-batch's gradients are summed and cut as backward makes them, so no rank ever holds more
    of them whole than three buckets: one that fills and two on their way; with zero 1 this happens
    once a step."""

    def __init__(self, parameters: dict[str, nn.Parameter], shards: dict[str, Shard],
                 axis: Axis, replicate: Axis, zero: int) -> None:
        self._axis, self._replicate, self._zero = axis, replicate, zero
        self._last = False
        self.held = []
        self._rows: dict[nn.Parameter, list[int]] = {}
        self._held_of: dict[nn.Parameter, Held] = {}
        for name, parameter in parameters.items():
            rows = split_sizes(parameter.shape[0], axis.size)
            start = sum(rows[:axis.index])
            # A view: the step writes into the model's own rows.
            mine = nn.Parameter(parameter.data[start:start + rows[axis.index]])
            held = Held(name, mine, shards[name].rows(start, start + rows[axis.index])
                        .owned_by(replicate.index == 0))
            self.held.append(held)
            self._rows[parameter], self._held_of[parameter] = rows, held
        self._buckets = _Buckets(list(parameters.values()), self._reduce)
        self._sent: list[tuple[list[nn.Parameter], Tensor, Tensor, dist.Work | None]] = []

    def begin(self, last: bool) -> None:
        self._buckets.finish()  # parameters that took no part in the micro-batch before
        self._settle()
        self._last = last
        self._buckets.begin()

    def arrived(self) -> None:
        pass

    def finish(self) -> None:
        self._buckets.finish()
        self._settle()
        if self._replicate.size > 1:
            grads = [h.tensor.grad for h in self.held if h.tensor.grad is not None]
            flat = torch.cat([g.flatten() for g in grads])
            dist.all_reduce(flat, group=self._replicate.group)
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    @torch.no_grad()
    def updated(self) -> None:
        for bucket in self._buckets.all:
            if self._axis.size > 1:
                lengths = self._lengths(bucket)
                mine = torch.cat([self._held_of[p].tensor.flatten() for p in bucket])
                mine = torch.nn.functional.pad(mine, (0, max(lengths) - mine.numel()))
                every = all_gather_rows(mine, self._axis, [max(lengths)] * self._axis.size)
                for row, flat in enumerate(every.chunk(self._axis.size)):
                    at = 0
                    for p in bucket:
                        start, count = sum(self._rows[p][:row]), self._rows[p][row]
                        target = p.data[start:start + count]
                        target.copy_(flat[at:at + target.numel()].view_as(target))
                        at += target.numel()
            for p in bucket:
                self._held_of[p].tensor.grad = p.grad = None

    def _lengths(self, bucket: Sequence[nn.Parameter]) -> list[int]:
        """Elements each rank has of a bucket."""
        return [sum(self._rows[p][r] * p[0].numel() for p in bucket)
                for r in range(self._axis.size)]

    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        if self._zero == 1 and not self._last:
            return
        self._settle(left=1)
        lengths = self._lengths(bucket)
        flat = bucket[0].new_zeros(self._axis.size, max(lengths))
        for r, line in enumerate(flat):
            at = 0
            for p in bucket:
                start, count = sum(self._rows[p][:r]), self._rows[p][r]
                rows = _grad(p)[start:start + count].flatten()
                line[at:at + rows.numel()] = rows
                at += rows.numel()
        for p in bucket:
            p.grad = None
        if self._axis.size == 1:
            self._sent.append((bucket, flat[0], flat, None))
            return
        mine = torch.empty_like(flat[0])
        work = _reduce_scatter(mine, flat.view(-1), group=self._axis.members, async_op=True)
        self._sent.append((bucket, mine, flat, work))

    def _settle(self, left: int = 0) -> None:
        """Adds what has arrived to the gradients of the rows, until only so many buckets are on
        their way: each holds its whole gradients as long as it is."""
        while len(self._sent) > left:
            bucket, mine, _, work = self._sent.pop(0)
            if work is not None:
                work.wait()
            at = 0
            for p in bucket:
                held = self._held_of[p].tensor
                part = mine[at:at + held.numel()].view_as(held)
                held.grad = part.clone() if held.grad is None else held.grad.add_(part)
                at += held.numel()


class FullyShardedStates:
    """ZeRO 3 through FSDP2: the model's parameters are DTensors on the data axes; here they are
    seen as the plain rows that this rank holds.

    Args:
        deferred: gradients of weights are made apart from the backward passes: a backward pass then
            sends none, and `arrived` does.
    """

    def __init__(self, root: nn.Module, parameters: dict[str, nn.Parameter],
                 shards: dict[str, Shard], axis: Axis, replicate: Axis, deferred: bool = False
                 ) -> None:
        self._root, self._replicate = root, replicate
        self._last = False
        if deferred:
            root.set_requires_gradient_sync(False)  # type: ignore[operator]
        self._sharded = list(parameters.values())
        self.held = []
        for name, parameter in parameters.items():
            local = parameter.to_local()  # type: ignore[attr-defined]  # a DTensor
            # torch.chunk's rule: equal runs of the rounded-up size, the last ones short or empty.
            size = -(-parameter.shape[0] // axis.size)
            start = min(axis.index * size, parameter.shape[0])
            stop = min(start + size, parameter.shape[0])
            if local.shape[0] != stop - start:
                raise RuntimeError(f"FSDP holds {local.shape[0]} rows of {name} on this rank where "
                                   f"{stop - start} were expected.")
            self.held.append(Held(name, nn.Parameter(local.detach()), shards[name].rows(start, stop)
                                  .owned_by(replicate.index == 0)))

    def begin(self, last: bool) -> None:
        self._last = last
        if self._replicate.size > 1:
            self._root.set_requires_all_reduce(last)  # type: ignore[operator]

    def arrived(self) -> None:
        # What FSDP's hooks do in a backward pass, for want of a public way to ask for it.
        state = self._root._get_fsdp_state()  # type: ignore[operator]
        self._root.set_requires_gradient_sync(True)  # type: ignore[operator]
        self.begin(self._last)
        for inner in state._state_ctx.all_states:
            for group in reversed(inner._fsdp_param_groups):
                group.post_backward()
        state._root_post_backward_final_callback()
        self._root.set_requires_gradient_sync(False)  # type: ignore[operator]

    def finish(self) -> None:
        for parameter, held in zip(self._sharded, self.held, strict=True):
            grad = parameter.grad
            held.tensor.grad = (torch.zeros_like(held.tensor) if grad is None
                                else grad.to_local())  # type: ignore[attr-defined]

    def updated(self) -> None:
        for parameter, held in zip(self._sharded, self.held, strict=True):
            parameter.grad = held.tensor.grad = None


class _Buckets:
    """Groups parameters, last first, and says when all gradients of a group are there."""

    def __init__(self, parameters: Sequence[nn.Parameter], ready) -> None:  # type: ignore[no-untyped-def]
        self.all: list[list[nn.Parameter]] = []
        self._ready = ready
        self._missing: list[int] = []
        size = BUCKET_BYTES
        for parameter in reversed(parameters):
            size += parameter.numel() * 4
            if size > BUCKET_BYTES:
                self.all.append([])
                size = parameter.numel() * 4
            self.all[-1].append(parameter)
        self._next = len(self.all)
        for i, bucket in enumerate(self.all):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self._hook(i))

    def begin(self) -> None:
        self._missing = [len(bucket) for bucket in self.all]
        self._next = 0

    def finish(self) -> None:
        """Sends what backward did not complete: parameters that took no part have no gradient."""
        while self._next < len(self.all):
            self._send()

    def _hook(self, index: int):  # type: ignore[no-untyped-def]
        # Torch holds a hook where the garbage collector does not see it: a strong reference back
        # to the parameters would keep the model in memory for ever.
        buckets = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            if (found := buckets()) is not None:
                found._arrived(index)

        return arrived

    def _arrived(self, index: int) -> None:
        self._missing[index] -= 1
        # In order, so that every rank's collectives agree whatever order backward takes.
        while self._next < len(self.all) and self._missing[self._next] <= 0:
            self._send()

    def _send(self) -> None:
        bucket = self.all[self._next]
        self._next += 1
        self._ready(bucket)


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [part.view_as(p) for part, p in
            zip(flat.split([p.numel() for p in like]), like, strict=True)]
