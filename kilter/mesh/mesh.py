"""`Mesh`: a layout's process groups, as one rank holds them.

    mesh = Mesh(Layout(dp=2, tp=4))       # in each of 8 ranks of an initialised default group
    tp = mesh.axis("tp")                  # Axis: name, ranks, index, size, group
    mesh.axis("dp_cp")                    # several axes of one view flattened into one
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kilter.comm.axis import Axis
from kilter.mesh.layout import Layout

# Each has its own groups even where two hold the same ranks, so that a count of communication can
# tell what it was for. They are made at once and in this order: making a group is collective.
_MADE_AT_ONCE = ("pp", "tp", "cp", "dp", "replicate", "shard", "dp_cp", "dp_shard_cp",
                 "pp_dp_cp", "etp", "ep", "edp", "ereplicate", "eshard")


class Mesh:
    """The axes of a layout, seen from this rank of the default process group.

    Attributes:
        layout: what the mesh was made of.
        rank: this rank's place among the mesh's ranks; -1 if it is none of them.
        coordinates: its place on every axis of both views.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: if the layout is not one of the world's size.
    """

    def __init__(self, layout: Layout, device_type: str = "cpu", *, alone: bool = False,
                 timeout: timedelta | None = None, ranks: Sequence[int] | None = None) -> None:
        """``alone`` ignores the default process group; the layout is then of one rank.
        ``timeout``: how long a collective waits for the other ranks; default torch's own, which
        is not the default group's. ``ranks``: those of the default group that the mesh is made of;
        default all. All ranks of the default group make it, with the axes they will ask it for
        (`axis`, `make_axis`): the others have no use for it but that groups get the same names
        everywhere."""
        distributed = dist.is_initialized() and not alone
        self._ranks = list(ranks if ranks is not None else
                           range(dist.get_world_size() if distributed else 1))
        layout.check(len(self._ranks))
        self._whole = not distributed or len(self._ranks) == dist.get_world_size()
        self.layout = layout
        self.device_type = device_type
        self.timeout = timeout
        self.rank = 0
        if distributed:
            own = dist.get_rank()
            self.rank = self._ranks.index(own) if own in self._ranks else -1
        self.coordinates = layout.coordinates(max(self.rank, 0))
        self._axes: dict[str, Axis] = {}
        self._made: dict[tuple[str, tuple[tuple[int, ...], ...]], Axis] = {}
        self._device_meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._own: dist.ProcessGroup | None = None
        for name in _MADE_AT_ONCE:
            self.axis(name)

    @classmethod
    def single(cls, device_type: str = "cpu") -> Mesh:
        """The mesh of one process: every axis has size 1, whatever torch.distributed is doing."""
        return cls(Layout(), device_type, alone=True)

    def axis(self, name: str) -> Axis:
        """An axis of the layout, or several of one view joined by ``_``: ``tp``, ``dp_cp``,
        ``dp_shard_cp`` (what ZeRO shards over), ``tp_cp``, ``world``.

        Single axes, ``dp_cp``, ``dp_shard_cp``, ``pp_dp_cp`` and ``world`` are there from the
        start. The first use of another one makes its groups: then every rank has to ask for it.

        Raises:
            ValueError: if there are no such axes, or they are of different views.
        """
        if name not in self._axes:
            self._axes[name] = self._make(name)
        return self._axes[name]

    def axes(self) -> list[Axis]:
        """Those that were made so far and have more than one rank."""
        return [axis for axis in self._axes.values() if axis.size > 1]

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Axes as a torch `DeviceMesh`, the first outermost; its dimensions have their names.

        For FSDP: ``device_mesh("dp_shard_cp")``, or ``device_mesh("replicate", "dp_shard_cp")``
        where there are copies. If an axis has one rank, the first call is for all ranks to make.

        Raises:
            ValueError: without a process group, or if axes overlap or do not exist.
        """
        if not dist.is_initialized():
            raise ValueError("A DeviceMesh needs an initialised process group; start the ranks "
                             "with torchrun or call init_process_group first.")
        if self.rank < 0:
            raise ValueError("This rank is none of the mesh's, so it has no DeviceMesh of it.")
        if names not in self._device_meshes:
            self._device_meshes[names] = self._make_device_mesh(names)
        return self._device_meshes[names]

    def make_axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis:
        """An axis of groups that no layout knows of: of their places in the mesh. A rank that is in
        none of them gets an axis of itself. All ranks make it the first time; asking again for the
        same groups under the same name gives the same axis."""
        key = (name, tuple(map(tuple, groups)))
        if key not in self._made:
            self._made[key] = self._new_axis(name, groups)
        return self._made[key]

    def _new_axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis:
        mine: Sequence[int] = next((group for group in groups if self.rank in group), [self.rank])
        made = None
        for group in groups:
            if len(group) > 1:
                new = dist.new_group([self._ranks[i] for i in group], timeout=self.timeout,
                                     group_desc=name)
                made = new if group is mine else made
        if self.rank < 0:
            return Axis(name, (dist.get_rank(),), 0)
        return Axis(name, tuple(self._ranks[i] for i in mine), list(mine).index(self.rank), made)

    def _make(self, name: str) -> Axis:
        if name == "world" and self._whole and len(self._ranks) > 1:
            return Axis(name, tuple(self._ranks), self.rank, dist.group.WORLD)
        return self.make_axis(name, self.layout.groups(_parts(name)))

    def _make_device_mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        parts = [part for name in names for part in self.layout.parts(_parts(name))]
        if len(set(parts)) < len(parts):
            raise ValueError(f"The axes {', '.join(names)} overlap, so they span no DeviceMesh.")
        axes = [self.axis(name) for name in names]
        block = next(g for g in self.layout.groups(parts) if self.rank in g)
        places = [{rank: index for group in self.layout.groups(_parts(name))
                   for index, rank in enumerate(group)} for name in names]
        ordered = sorted(block, key=lambda rank: [place[rank] for place in places])
        ranks = torch.tensor([self._ranks[i] for i in ordered], dtype=torch.int)
        groups = [axis.group or self._alone() for axis in axes]
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, self.device_type,
                                     ranks.view([axis.size for axis in axes]),
                                     mesh_dim_names=names)

    def _alone(self) -> dist.ProcessGroup:
        """A group of this rank only: torch's meshes want one even for an axis of size 1."""
        if self._own is None:
            for rank in self._ranks:
                made = dist.new_group([rank], group_desc="alone")
                if rank == self._ranks[self.rank]:
                    self._own = made
        assert self._own is not None
        return self._own


def _parts(name: str) -> list[str]:
    """The layout's axes that a name joins."""
    if name == "world":
        return ["pp", "dp", "cp", "tp"]
    return name.replace("dp_shard", "shard").replace("dp_replicate", "replicate").split("_")
