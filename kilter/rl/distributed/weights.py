"""The trainer's weights as parcels: every rank packs what it is to send, every rollout rank unpacks
what is for it, and whatever is between them (Ray's object store) need not know what they are.

The plan is of least bytes (`kilter.rl.reshard_plan`) for one replica that holds nothing. Other
replicas take the same parcels, so that the trainer packs each element once however many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_reduce_sum
from kilter.parallel.checksum import checksum
from kilter.parallel.shards import Box, Shard
from kilter.rl.reshard import Local, own_checksums, view_of
from kilter.rl.reshard_plan import Plan, Shards, make_plan


@dataclass(frozen=True)
class Piece:
    """A box of a parameter: its elements as bytes."""

    name: str
    box: Box
    dtype: torch.dtype
    data: np.ndarray  # uint8


def parcel_plan(held: Sequence[Shards], parts: Sequence[Shards],
                formats: Mapping[str, torch.dtype], *, adapters_only: bool = False) -> Plan:
    """From the trainer's ranks to the parts of a replica, which are ranks after them."""
    nothing: list[Shards] = [{} for _ in parts]
    return make_plan([*held, *nothing], [{} for _ in held] + list(parts), formats,
                     adapters_only=adapters_only)


@torch.no_grad()
def pack(local: Local, plan: Plan, rank: int, parts: int) -> Iterator[list[list[Piece]]]:
    """Of each group of parameters in turn, what this rank sends to each part of a replica. A
    piece may be the trainer's own memory, so it must be copied before weights change."""
    first = plan.world - parts
    for group in plan.groups:
        found: list[list[Piece]] = [[] for _ in range(parts)]
        for exchange in group.exchanges:
            for transfer in exchange.transfers:
                if transfer.source == rank:
                    part = view_of(*local[transfer.name], transfer.box).detach()
                    flat = part.to(plan.formats[transfer.name]).cpu().contiguous().flatten()
                    found[transfer.destination - first].append(
                        Piece(transfer.name, transfer.box, flat.dtype,
                              flat.view(torch.uint8).numpy()))
        yield found


def trainer_sums(local: Local, plan: Plan, rank: int, axis: Axis) -> dict[str, int]:
    """Checksums by parameter, of all of the trainer's ranks; collective."""
    sums = all_reduce_sum(torch.stack(own_checksums(local, plan, rank)), axis)
    return dict(zip(plan.names, sums.tolist(), strict=True))


@torch.no_grad()
def unpack(groups: Iterable[Sequence[Sequence[Piece]]], shards: Mapping[str, Shard],
           sums: Mapping[str, int], axis: Axis) -> Iterator[dict[str, Tensor]]:
    """This rank's part, group by group, for `RolloutEngine.update`; all ranks of a replica call.

    Args:
        groups: of each group of parameters, what every trainer rank has packed for this rank.
        sums: the trainer's checksums of what comes.

    Raises:
        RuntimeError: if what has arrived is not what the trainer has.
    """
    arrived: dict[str, Tensor] = {}
    for parcels in groups:
        tensors: dict[str, Tensor] = {}
        filled: Counter[str] = Counter()
        for piece in (piece for parcel in parcels for piece in parcel):
            shard = shards[piece.name]
            if piece.name not in tensors:
                tensors[piece.name] = torch.empty(shard.local_shape, dtype=piece.dtype)
            values = torch.empty(piece.box.size, dtype=piece.dtype)
            np.copyto(values.view(-1).view(torch.uint8).numpy(), piece.data)
            view_of(tensors[piece.name], shard, piece.box).copy_(values)
            filled[piece.name] += piece.box.numel
        short = [name for name, tensor in tensors.items() if filled[name] != tensor.numel()]
        if short:
            raise RuntimeError(f"Of the weights for rollouts a part of {', '.join(short[:10])} did "
                               "not come.")
        for name, tensor in tensors.items():
            arrived[name] = checksum(((box, part) for box, own, part in shards[name].parts(tensor)
                                      if own), tensor.dtype, torch.device("cpu"))
        yield tensors
        tensors.clear()
    nothing = torch.zeros((), dtype=torch.int64)
    found = all_reduce_sum(torch.stack([arrived.get(name, nothing) for name in sums]), axis)
    wrong = [name for (name, ours), theirs in zip(sums.items(), found.tolist(), strict=True)
             if (ours - theirs) % (1 << 64)]
    if wrong:
        raise RuntimeError(f"The weights that arrived for rollouts are not the trainer's: "
                           f"{', '.join(wrong[:20])} ({len(wrong)} of {len(sums)}) differ in their "
                           "checksums.")
