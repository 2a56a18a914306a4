"""Which heads, feed-forward rows and vocabulary rows each tensor-parallel rank has.

Sums over a dim that is spread are taken in a binary tree over ``spec.virtual_shards`` leaves V,
whatever the real degree (docs/architecture.md, exactness). A rank has a run of leaves that is a
subtree, so every degree up to V gives the same bits. A leaf is V-th of the KV groups, or, where a
model has fewer KV heads than leaves, a part of one group's query heads, whose key and value head is
then on several ranks.

    8 KV groups, tp 3: leaves 0 1 | 2 3 | 4 5 6 7      3 KV groups (V 3), tp 2: leaves 0 1 | 2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from kilter.models.spec import ModelSpec
from kilter.ops.linear import tree_shares
from kilter.ops.logprob import vocab_chunk
from kilter.parallel.shards import Box


@dataclass(frozen=True)
class Part:
    """One tensor-parallel rank's part of a model.

    Attributes:
        spec: the model's facts with this rank's numbers of heads and feed-forward rows.
        leaves: how many of the V leaves of the tree of sums it has.
        groups: KV groups as (group, first query head within the group, query heads here).
        ffn: first feed-forward row and how many.
        vocab: first vocabulary row and how many.
        sharers: indices of the tensor-parallel ranks that hold the same KV head as this one,
            itself among them; alone in the usual case.
    """

    spec: ModelSpec
    leaves: int
    groups: tuple[tuple[int, int, int], ...]
    ffn: tuple[int, int]
    vocab: tuple[int, int]
    sharers: tuple[int, ...]


def split_model(spec: ModelSpec, degree: int) -> list[Part]:
    """Every rank's part under tensor parallelism of this degree.

    Raises:
        ValueError: if this model cannot be spread so; the message names the degrees that work.
    """
    problem = _problem(spec, degree)
    if problem:
        works = [n for n in range(1, spec.virtual_shards + 1) if not _problem(spec, n)]
        raise ValueError(f"This model cannot be spread over {degree} tensor-parallel ranks: "
                         f"{problem}. Degrees that work: {', '.join(map(str, works))}.")
    leaves = tree_shares(spec.virtual_shards, degree)
    ends = list(accumulate(leaves))
    chunk = vocab_chunk(spec.vocab_size)
    vocab_ends = list(accumulate(vocab_chunks(spec.vocab_size, degree)))
    f = spec.ffn_size // spec.virtual_shards
    parts = []
    for rank, (count, end) in enumerate(zip(leaves, ends, strict=True)):
        groups = _groups(spec, end - count, end)
        first = (vocab_ends[rank - 1] if rank else 0) * chunk
        local = replace(spec, num_kv_heads=len(groups), num_heads=sum(n for *_, n in groups),
                        ffn_size=f * count)
        parts.append(Part(local, count, groups, (f * (end - count), f * count),
                          (first, min(vocab_ends[rank] * chunk, spec.vocab_size) - first), (rank,)))
    holders: dict[int, list[int]] = {}
    for rank, part in enumerate(parts):
        for group, _, here in part.groups:
            if here < spec.queries_per_kv:
                holders.setdefault(group, []).append(rank)
    return [replace(part, sharers=tuple(holders.get(part.groups[0][0], (rank,))))
            for rank, part in enumerate(parts)]


def vocab_chunks(vocab: int, degree: int) -> list[int]:
    """How many of a vocabulary's chunks (`kilter.ops.logprob.vocab_chunk`) each rank has."""
    chunks = -(-vocab // vocab_chunk(vocab))
    return [chunks // degree + (rank < chunks % degree) for rank in range(degree)]


def qkv_boxes(spec: ModelSpec, part: Part, tail: tuple[int, ...]) -> list[tuple[Box, bool]]:
    """The rows of the fused qkv weight (``tail`` (D,)) or bias (``tail`` ()) that a part has, and
    whether it is theirs to count; of ranks that share a KV head the first counts it."""
    d, per_group = spec.head_dim, spec.queries_per_kv + 2
    boxes = []
    for group, query, here in part.groups:
        start = group * per_group * d
        heads = [(start + query * d, here * d, True),
                 (start + spec.queries_per_kv * d, 2 * d, query == 0)]
        if here == spec.queries_per_kv:
            heads = [(start, per_group * d, True)]
        boxes += [(Box((row, *(0,) * len(tail)), (rows, *tail)), own) for row, rows, own in heads]
    return boxes


def out_columns(spec: ModelSpec, part: Part) -> tuple[int, int]:
    """The columns of the attention output weight that a part has: (first, count)."""
    d, (group, query, _) = spec.head_dim, part.groups[0]
    return (group * spec.queries_per_kv + query) * d, part.spec.num_heads * d


def _groups(spec: ModelSpec, first: int, end: int) -> tuple[tuple[int, int, int], ...]:
    """Leaves [first, end) as runs of query heads within KV groups."""
    per_leaf = spec.num_heads // spec.virtual_shards
    heads = range(first * per_leaf, end * per_leaf)
    found = []
    for group in range(heads.start // spec.queries_per_kv, -(-heads.stop // spec.queries_per_kv)):
        low = max(heads.start, group * spec.queries_per_kv)
        high = min(heads.stop, (group + 1) * spec.queries_per_kv)
        found.append((group, low - group * spec.queries_per_kv, high - low))
    return tuple(found)


def _problem(spec: ModelSpec, degree: int) -> str:
    """Why this degree cannot be, or nothing."""
    shards = spec.virtual_shards
    if degree > shards:
        return (f"with {spec.num_heads} query and {spec.num_kv_heads} KV heads and {spec.ffn_size} "
                f"feed-forward rows its sums have {shards} parts, fewer than ranks")
    chunk = vocab_chunk(spec.vocab_size)
    if -(-spec.vocab_size // chunk) < degree:
        return (f"its vocabulary of {spec.vocab_size} tokens is cut in "
                f"{-(-spec.vocab_size // chunk)} chunks of {chunk}, fewer than ranks")
    end = 0
    for count in tree_shares(shards, degree):
        groups = _groups(spec, end, end + count)
        if len(groups) > 1 and any(here < spec.queries_per_kv for *_, here in groups):
            shares = " and ".join(str(here) for *_, here in groups)
            return (f"one rank would have {shares} query heads of {len(groups)} KV groups of "
                    f"{spec.queries_per_kv}; a rank has whole groups, or a part of a single one")
        end += count
    return ""
