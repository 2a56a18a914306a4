"""A tied head in a pipeline: the last stage's copy of the first one's embedding.

The copy is no parameter of its own. Its gradient goes to the first stage, which adds it to the
embedding's and steps; the new values come back. So the optimizer's states exist once, and norms,
checkpoints and files never see a second embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.parallel.data import Held
from kilter.parallel.pipeline.stage import TIED
from kilter.parallel.shards import Shard

_Local = tuple[nn.Parameter, Shard]


class TiedCopy:
    """Both ends, or one, or none of them on this rank of the pipeline axis; every rank calls.

    Args:
        first, last: ranks on the axis of the first and the last stage.
        original, copied: the parameter's elements here, where that stage is here.
        first_held, last_held: what these stages hold for the optimizer.

    Attributes:
        copy: what the last stage holds of the copy, and nobody is to step.
    """

    def __init__(self, axis: Axis, first: int, last: int, original: _Local | None,
                 copied: _Local | None, first_held: Sequence[Held], last_held: Sequence[Held]
                 ) -> None:
        self._axis, self._first, self._last = axis, first, last
        self._local = [None if x is None else x[0] for x in (original, copied)]
        self._original = next((h for h in first_held if h.name == TIED), None)
        self.copy = next((h for h in last_held if h.name == TIED), None)

    @torch.no_grad()
    def add_grads(self) -> None:
        """The copy's gradient joins the original's."""
        ends = [None if h is None else h.tensor.grad for h in (self.copy, self._original)]
        if (came := self._move(ends[0], ends[1], self._last, self._first)) is not None:
            assert ends[1] is not None
            ends[1].add_(came)

    @torch.no_grad()
    def step(self) -> None:
        """What the optimizer made of the original's elements comes to the copy's."""
        ends = [None if h is None else h.tensor for h in (self._original, self.copy)]
        if (came := self._move(ends[0], ends[1], self._first, self._last)) is not None:
            assert ends[1] is not None
            ends[1].copy_(came)

    @torch.no_grad()
    def share(self) -> None:
        """The copy takes all the original's elements of this rank."""
        original, copied = self._local
        if (came := self._move(original, copied, self._first, self._last)) is not None:
            assert copied is not None
            copied.copy_(came)

    def _move(self, here: Tensor | None, there: Tensor | None, source: int, target: int
              ) -> Tensor | None:
        """On the target, what the source has; ``there`` has its shape."""
        axis = self._axis
        if axis.index not in (source, target) or (here is None and there is None):
            return None
        if source == target:
            return here
        if axis.index == source:
            assert here is not None
            dist.send(here.contiguous(), axis.ranks[target], group=axis.members)
            return None
        assert there is not None
        came = torch.empty_like(there, memory_format=torch.contiguous_format)
        dist.recv(came, axis.ranks[source], group=axis.members)
        return came
