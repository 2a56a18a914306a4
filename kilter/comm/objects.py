"""Python objects over an axis: small things that all of its ranks have to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from kilter.comm.axis import Axis

T = TypeVar("T")


def gather_objects(mine: T, axis: Axis) -> list[T]:
    """What each rank of the axis gives, in their order, on all of them."""
    if axis.size == 1:
        return [mine]
    every: list[Any] = [None] * axis.size
    dist.all_gather_object(every, mine, group=axis.members)
    return every


def share_result(work: Callable[[], T] | None, axis: Axis, source: int = 0,
                 raises: tuple[type[BaseException], ...] = (Exception,)) -> T:
    """What a rank's work gives, on all ranks of the axis, or what it raises.

    Args:
        work: None on ranks that have no part in it.
        source: whose result it is, as a place in the axis.
        raises: what the others raise too. After anything else a rank leaves at once.
    """
    told: list[Any] = [None, None]
    if work is not None:
        try:
            told = [work(), None]
        except raises as error:
            told = [None, error]
    if axis.size > 1:
        dist.broadcast_object_list(told, axis.ranks[source], group=axis.members)
    if told[1] is not None:
        raise told[1]
    found: T = told[0]
    return found


def raise_first(failure: BaseException | None, axis: Axis) -> None:
    """Raises an axis's first failure on all of its ranks; every rank calls, most with None."""
    for found in gather_objects(failure, axis):
        if found is not None:
            raise found
