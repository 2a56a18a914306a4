"""`Axis`: the ranks that one collective runs over, as one of them sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Axis:
    """One rank's group on one axis of a mesh. An axis of size 1 has no process group, and every
    collective over it is the identity."""

    name: str  # "tp", "dp_shard_cp", ...
    ranks: tuple[int, ...]  # ranks of the world, ascending
    index: int  # this rank's place among them
    group: dist.ProcessGroup | None = None  # None exactly for size 1

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def members(self) -> dist.ProcessGroup:
        """The process group of an axis that has one.

        Raises:
            ValueError: for an axis of size 1.
        """
        if self.group is None:
            raise ValueError(f"The axis {self.name} has one rank and so no process group.")
        return self.group
