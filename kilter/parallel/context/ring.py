"""Ring attention (arXiv 2310.01889): keys and values go round, queries stay.

    step 0   rank 0: own keys      rank 1: own keys      rank 2: own keys
    step 1   rank 0: of rank 2     rank 1: of rank 0     rank 2: of rank 1       …

In every step a rank posts the next exchange, computes with the keys at hand, and merges what it
found by the log-sum-exp of what it saw (arXiv 2205.14135). Backward sends keys and values round
again and with them the sum of their gradients, which goes home from the last rank that adds to it.
A block of keys travels only as far as somebody still sees some of it, and nobody computes where he
sees nothing: with contiguous rows half the blocks stay at home, with a window nearly all do.

Partial results are merged in an order that depends on the rank, so one device's result is met
within rounding, not bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.ops import Ops
from kilter.ops.band_attention import Bands, band_attention, band_attention_grad, merge_
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.placement import Placement

# (what, start, end in seconds of time.perf_counter): "transfer" from when an exchange is posted to
# when it is known to be done, "compute", and "wait", the part of a transfer after computing.
Recorder = Callable[[str, float, float], None]


class RingAttention:
    """Attention of one batch's rows over an axis; an `Attend` of `kilter.models.batch`.

    Args:
        recorder: told of what the host does, which on a GPU is not what the device does.
    """

    def __init__(self, placement: Placement, mask: Mask, axis: Axis,
                 recorder: Recorder | None = None) -> None:
        self.placement, self.axis = placement, axis
        self._mask = mask.padded(placement.pads)
        self._recorder = recorder
        self._routes: dict[int | None, Route] = {}

    def __call__(self, ops: Ops, q_THd: Tensor, keys_TGd: Tensor, values_TGd: Tensor, *,
                 scale: float, window: int | None) -> Tensor:
        """The kernels are the ring's own, whatever ``ops`` are."""
        if window not in self._routes:
            self._routes[window] = Route.of(self.placement, self._mask.within(window), self.axis)
        out: Tensor = _Ring.apply(q_THd, keys_TGd, values_TGd, self._routes[window], scale,
                                  self._recorder)
        return out


class Message(NamedTuple):
    """What one rank sends another: keys and values of a rank's block, or their gradients."""

    source: int
    target: int
    block: int


@dataclass(frozen=True, eq=False)
class Route:
    """Who needs whose keys. A block is a rank's keys; its distance to a rank counts ranks onward.

    Attributes:
        sizes: rows of each block.
        bands: what this rank's rows see of the block at each distance behind; None: nothing.
        nearest, farthest: of each block, least and largest distance of another rank that sees some
            of it; 0 if none does.
    """

    axis: Axis
    sizes: tuple[int, ...]
    bands: tuple[Bands | None, ...]
    nearest: tuple[int, ...]
    farthest: tuple[int, ...]

    @staticmethod
    def of(placement: Placement, mask: Mask, axis: Axis) -> Route:
        n, strips = axis.size, placement.strips
        mine = tuple(mask.bands(strips[axis.index], strips[(axis.index - d) % n]) for d in range(n))
        seen = [[d for d in range(1, n)
                 if mask.bands(strips[(block + d) % n], strips[block]) is not None]
                for block in range(n)]
        return Route(axis, placement.sizes, mine, tuple(min(d, default=0) for d in seen),
                     tuple(max(d, default=0) for d in seen))

    def keys_at(self, step: int) -> list[Message]:
        """Keys and values that are sent while step ``step`` is computed."""
        n = len(self.sizes)
        return [Message((block + step) % n, (block + step + 1) % n, block)
                for block in range(n) if step < self.farthest[block]]

    def grads_at(self, step: int) -> list[Message]:
        """Gradients that are sent while step ``step`` is computed: those of the step before."""
        n, messages = len(self.sizes), []
        for block in range(n):
            done = step - 1  # the distance whose rank has just added to them
            if done < max(self.nearest[block], 1) or done > self.farthest[block]:
                continue
            target = block if done == self.farthest[block] else (block + step) % n
            messages.append(Message((block + done) % n, target, block))
        return messages


class _Exchange:
    """Messages under way. Every rank posts those of a step in the same order, so that what two of
    them send each other is matched in order; the tag tells keys from gradients."""

    def __init__(self, axis: Axis, recorder: Recorder | None) -> None:
        self._axis = axis
        self._recorder = recorder
        self._ops: list[dist.P2POp] = []
        self._works: list[Any] = []
        self._start = 0.0

    def add(self, messages: Sequence[Message], tag: int, outgoing: Mapping[int, Tensor],
            incoming: Callable[[int], Tensor]) -> dict[int, Tensor]:
        """Of these messages, those that this rank sends or receives. Returns by block what the
        received ones will hold after `wait`."""
        axis, received = self._axis, {}
        for message in messages:
            if message.source == axis.index:
                self._ops.append(dist.P2POp(dist.isend, outgoing[message.block],
                                            axis.ranks[message.target], axis.members, tag))
            if message.target == axis.index:
                buffer = received[message.block] = incoming(message.block)
                self._ops.append(dist.P2POp(dist.irecv, buffer, axis.ranks[message.source],
                                            axis.members, tag))
        return received

    def post(self) -> None:
        self._start = time.perf_counter()
        if self._ops:
            self._works = dist.batch_isend_irecv(self._ops)

    def wait(self) -> None:
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        if self._recorder is not None and self._ops:
            end = time.perf_counter()
            self._recorder("transfer", self._start, end)
            self._recorder("wait", start, end)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, route: Route, scale: float,
                recorder: Recorder | None) -> Tensor:
        n, index = route.axis.size, route.axis.index
        out_THd = torch.zeros(q_THd.shape, dtype=torch.float32, device=q_THd.device)
        lse_TH = q_THd.new_full(q_THd.shape[:2], -torch.inf, dtype=torch.float32)
        kv = {index: torch.stack([k_TGd, v_TGd])}
        for step in range(n):
            exchange = _Exchange(route.axis, recorder)
            arriving = exchange.add(route.keys_at(step), 0, kv, _room(route, k_TGd, k_TGd.dtype))
            exchange.post()
            bands = route.bands[step]
            if bands is not None:
                keys, values = kv[(index - step) % n]
                with _timed(recorder):
                    more_THd, more_TH = band_attention(q_THd, keys, values, bands, scale=scale)
                    merge_(out_THd, lse_TH, more_THd.float(), more_TH)
            exchange.wait()
            kv = arriving
        out_THd = out_THd.to(q_THd.dtype)
        ctx.save_for_backward(q_THd, k_TGd, v_TGd, out_THd, lse_TH)
        ctx.route, ctx.scale, ctx.recorder = route, scale, recorder
        return out_THd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_THd, k_TGd, v_TGd, out_THd, lse_TH = ctx.saved_tensors
        route, recorder = ctx.route, ctx.recorder
        n, index = route.axis.size, route.axis.index
        dout_THd = grads[0].contiguous()
        dq_THd = torch.zeros(q_THd.shape, dtype=torch.float32, device=q_THd.device)
        own = torch.zeros((2, *k_TGd.shape), dtype=torch.float32, device=k_TGd.device)
        kv = {index: torch.stack([k_TGd, v_TGd])}
        sums: dict[int, Tensor] = {}  # gradients of other ranks' blocks, as far as they have come
        for step in range(n + 1):
            block = (index - step) % n
            exchange = _Exchange(route.axis, recorder)
            arriving = exchange.add(route.keys_at(step), 0, kv, _room(route, k_TGd, k_TGd.dtype))
            arriving_sums = exchange.add(route.grads_at(step), 1, sums,
                                         _room(route, k_TGd, torch.float32))
            exchange.post()
            sums = {}
            bands = route.bands[step] if step < n else None
            if bands is not None:
                keys, values = kv[block]
                with _timed(recorder):
                    dq, dk, dv = band_attention_grad(dout_THd, q_THd, keys, values, out_THd,
                                                     lse_TH, bands, scale=ctx.scale)
                    dq_THd += dq
                    more = torch.stack([dk, dv])
                if step == 0:
                    own += more
                else:
                    sums[block] = more
            exchange.wait()
            kv = arriving
            for which, total in arriving_sums.items():
                if which == index:
                    own += total
                else:
                    sums[which] = total + sums[which] if which in sums else total
        dk_TGd, dv_TGd = own.to(k_TGd.dtype)
        return dq_THd.to(q_THd.dtype), dk_TGd, dv_TGd, None, None, None


def _room(route: Route, k_TGd: Tensor, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Makes memory for a block's keys and values, or their gradients."""
    return lambda block: k_TGd.new_empty(2, route.sizes[block], *k_TGd.shape[1:], dtype=dtype)


@contextmanager
def _timed(recorder: Recorder | None) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if recorder is not None:
        recorder("compute", start, time.perf_counter())
