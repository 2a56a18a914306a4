"""What ranks hold while they train, what they need for rollouts, and which of them make a replica.

    trainer tp 4 · dp 2:   rank   0   1   2   3   4   5   6   7
                           holds  ¼0  ¼1  ¼2  ¼3  ¼0  ¼1  ¼2  ¼3
    rollout tp 2,
      consecutive groups   needs  ½0  ½1  ½0  ½1  ½0  ½1  ½0  ½1     ranks 1, 2, 5, 6 hold nothing
                                                                     of what they need
      nested groups        needs  ½0  ½0  ½1  ½1  ½0  ½0  ½1  ½1     groups 0 2 | 1 3 | 4 6 | 5 7

Pure arithmetic; the boxes are those that `kilter.parallel` cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kilter.mesh.layout import Layout, divisors
from kilter.models.decoder import Decoder
from kilter.models.linear import Embedding, Linear
from kilter.parallel.heads import split_model
from kilter.parallel.shards import Shard
from kilter.parallel.tensor import placements
from kilter.rl.reshard_plan import Shards

Groups = tuple[tuple[int, ...], ...]  # of each rollout replica: its ranks, ascending, by part
_Chain = tuple["_Chain", int] | None  # parts of the ranks so far, the last one outside

_KEPT = 1 << 15


def trainer_shards(model: Decoder, layout: Layout,
                   stage_of: Callable[[str], int] | None = None) -> list[dict[str, Shard]]:
    """By rank, what `kilter.parallel.apply.apply` leaves it of a model.

    Args:
        model: whole; on the meta device will do.
        stage_of: the pipeline stage that has a parameter.

    Raises:
        ValueError: for a degree that the model cannot be spread over, or stages without
            ``stage_of``.
    """
    if layout.pp > 1 and stage_of is None:
        raise ValueError(f"The layout has {layout.pp} pipeline stages, so it must be said which "
                         f"has what; give stage_of.")
    tensor = [placements(model, part, index)
              for index, part in enumerate(split_model(model.spec, layout.tp))]
    groups = {rank: group for group in layout.groups(("shard", "cp")) for rank in group}
    found = []
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        shards = {name: shard for name, shard in tensor[at["tp"]].items()
                  if stage_of is None or stage_of(name) == at["pp"]}
        if layout.zero == 3:
            n, index = len(groups[rank]), groups[rank].index(rank)
            for name, shard in shards.items():
                size = -(-shard.local_shape[0] // n)  # FSDP cuts as torch.chunk does
                shards[name] = shard.rows(index * size, (index + 1) * size)
        found.append(shards)
    return found


def rollout_parts(model: Decoder, degree: int) -> list[dict[str, Shard]]:
    """By tensor-parallel rank of a rollout replica, its part of a (whole) model.

    Raises:
        ValueError: for a degree that the model cannot be spread over.
    """
    return [placements(model, part, index)
            for index, part in enumerate(split_model(model.spec, degree))]


def rollout_needs(parts: Sequence[Shards], groups: Groups) -> list[Shards]:
    """By rank of the world, the part that its place in its group means.

    Raises:
        ValueError: if the groups do not hold every rank once, or have not one rank per part.
    """
    ranks = sorted(rank for group in groups for rank in group)
    if ranks != list(range(len(ranks))) or any(len(group) != len(parts) for group in groups):
        raise ValueError(f"Rollout groups {[list(group) for group in groups]} must hold every rank "
                         f"once, {len(parts)} ranks each.")
    places = {rank: index for group in groups for index, rank in enumerate(group)}
    return [parts[places[rank]] for rank in ranks]


def rollout_formats(model: Decoder, weights: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every parameter in an engine that holds large matrices in ``weights``; norms,
    biases and adapters are float32 in any."""
    matrices = {f"{path}.weight" for path, module in model.named_modules()
                if isinstance(module, Linear | Embedding)}
    return {name: weights if name in matrices else torch.float32
            for name, _ in model.named_parameters()}


def consecutive_groups(world: int, degree: int) -> Groups:
    """Replicas of neighbouring ranks.

    Raises:
        ValueError: if the degree does not divide the world.
    """
    _check(world, degree)
    return tuple(tuple(range(first, first + degree)) for first in range(0, world, degree))


def nested_groups(held: Sequence[Shards], parts: Sequence[Shards]) -> Groups:
    """Replicas made so that all ranks together receive the least, where parts are in the order of
    a replica's ranks, as they are in a process group. Where that makes no difference, a rank takes
    the part it has in `consecutive_groups`.

    A replica's ranks need not be neighbours: on machines whose ranks within a node are much better
    connected than nodes, a few bytes once a step may cost less than rollouts across nodes.

    Raises:
        ValueError: if the number of parts does not divide the world.
    """
    world, degree = len(held), len(parts)
    _check(world, degree)
    # Elements that stay where they are, and to break ties whether the part is the usual one.
    gain = [[(world + 1) * _common(shards, part) + (index == rank % degree)
             for index, part in enumerate(parts)] for rank, shards in enumerate(held)]
    return _assign(gain)


def _assign(gain: Sequence[Sequence[int]]) -> Groups:
    """Ranks to groups and parts for the greatest sum of ``gain[rank][part]``.

    Rank by rank: how many ranks each part has so far is all that matters for the ranks to come. A
    part never has more than the one before, so that the n-th ranks of all parts make a group in
    ascending order. Of such counts the best are kept, all of them unless there are very many.
    """
    degree = len(gain[0])
    size = len(gain) // degree
    best: dict[tuple[int, ...], tuple[int, _Chain]] = {(0,) * degree: (0, None)}
    for row in gain:
        following: dict[tuple[int, ...], tuple[int, _Chain]] = {}
        for counts, (total, chain) in best.items():
            for part, count in enumerate(counts):
                if count < (counts[part - 1] if part else size):
                    after = (*counts[:part], count + 1, *counts[part + 1:])
                    if after not in following or following[after][0] < total + row[part]:
                        following[after] = (total + row[part], (chain, part))
        if len(following) > _KEPT:
            ranked = sorted(following.items(), key=lambda item: (-item[1][0], item[0]))
            following = dict(ranked[:_KEPT])
        best = following
    [(_, chain)] = best.values()
    members: list[list[int]] = [[] for _ in range(degree)]
    for rank in reversed(range(len(gain))):
        assert chain is not None
        chain, part = chain
        members[part].insert(0, rank)
    return tuple(zip(*members, strict=True))


def _common(a: Shards, b: Shards) -> int:
    return sum(both.numel for name, shard in a.items() if name in b for x in shard.boxes
               for y in b[name].boxes if (both := x.overlap(y)) is not None)


def _check(world: int, degree: int) -> None:
    if degree < 1 or world % degree:
        raise ValueError(f"Rollout tensor parallelism {degree} does not divide the {world} ranks; "
                         f"it may be {', '.join(map(str, divisors(world)))}.")
