"""The trainer's entry: a batch in, this rank's rows of it out, with the attention that fits them.

    local = spread_batch(batch, mesh.axis("cp"), ContextConfig("ring", "zigzag"))
    loss = forward(local.batch, local.local(targets_T, -100))

Everything but attention works on rows by themselves, so a local batch is a batch like another: its
positions are those in the documents, its boundaries those between its runs of documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kilter.comm.autograd import reduce_from
from kilter.comm.axis import Axis
from kilter.comm.counter import wire_bytes as collective_bytes
from kilter.mesh.layout import Layout
from kilter.models.batch import Attend, Batch
from kilter.models.spec import ModelSpec
from kilter.parallel.context.balance import PlacementKind, place
from kilter.parallel.context.gather import GatherAttention
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.placement import Placement
from kilter.parallel.context.ring import Recorder, RingAttention
from kilter.parallel.context.ulysses import UlyssesAttention, kv_copies
from kilter.parallel.heads import split_model

Method = Literal["ring", "ulysses", "all_gather"]

METHODS = ("ring", "ulysses", "all_gather")
PLACEMENTS = ("contiguous", "zigzag", "striped", "balanced")


@dataclass(frozen=True)
class ContextConfig:
    """How attention works over ranks that have rows of the same sequences.

    Attributes:
        method: ``ring``: keys go round; ``ulysses``: heads in exchange for rows; ``all_gather``:
            every rank gets all keys.
        placement: which rows a rank has. ``ulysses`` takes ``contiguous`` only: rows then arrive in
            order, and its work is even in any case. ``balanced`` is for ``all_gather`` only: its
            blocks make the ranks' work even in sum, but not step by step as a ring needs it.
        block: most rows that stay together under ``balanced``.
    """

    method: Method = "ring"
    placement: PlacementKind = "zigzag"
    block: int = 128

    def __post_init__(self) -> None:
        problems = []
        if self.method not in METHODS:
            problems.append(f"The context-parallel method {self.method!r} is none of "
                            f"{', '.join(METHODS)}.")
        if self.placement not in PLACEMENTS:
            problems.append(f"The placement {self.placement!r} is none of {', '.join(PLACEMENTS)}.")
        elif self.method == "ulysses" and self.placement != "contiguous":
            problems.append(f"The method ulysses needs the placement contiguous, but it is "
                            f"{self.placement}: rows must arrive in the order of the pack, and "
                            "every rank sees all rows, so there is nothing to balance.")
        elif self.method == "ring" and self.placement == "balanced":
            problems.append("The placement balanced goes with the method all_gather only: its "
                            "blocks make the ranks' work even in sum, but not step by step as a "
                            "ring needs it. Use zigzag or striped.")
        if self.block < 1:
            problems.append(f"block is {self.block} but must be positive.")
        if problems:
            raise ValueError(" ".join(problems))


def check_context(spec: ModelSpec, layout: Layout, config: ContextConfig) -> None:
    """That the model's attention can be spread so.

    Raises:
        ValueError: naming the degrees that work.
    """
    if layout.cp > 1 and config.method == "ulysses":
        for part in split_model(spec, layout.tp):
            kv_copies(part.spec.num_heads, part.spec.num_kv_heads, layout.cp)


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """One rank's rows of a batch.

    Attributes:
        batch: of these rows; its ``attend`` sees those of the other ranks.
        placement: whose rows are where.
        index: this rank's place on the axis.
    """

    batch: Batch
    placement: Placement
    index: int

    def local(self, x_T: Tensor, fill: float) -> Tensor:
        """This rank's rows of what is given per token of the whole batch; pads hold ``fill``.

        Raises:
            ValueError: if x has not the whole batch's rows.
        """
        return self.placement.local(x_T, self.index, fill)


def spread_batch(batch: Batch, axis: Axis, config: ContextConfig, rows_multiple: int = 1, *,
                 mask: Mask | None = None, recorder: Recorder | None = None) -> LocalBatch:
    """This rank's part of a batch that all ranks of the axis have.

    Args:
        rows_multiple: of the local rows. What is missing are rows of token 0 that see only
            themselves, and for which there should be no targets.
        mask: what rows see of each other, over the batch's rows; default: causal within each
            sequence.
        recorder: of a ring's exchanges and computations.

    Returns:
        On an axis of one rank without a mask, the batch itself, if it needs no pads.

    Raises:
        ValueError: if the batch has a cache or is spread already, the mask has other rows, or the
            method does not take the mask.
    """
    if batch.kv is not None or batch.attend is not None:
        raise ValueError("Context parallelism spreads a whole batch without a cache, but this one "
                         f"{'has a cache' if batch.kv is not None else 'is spread already'}.")
    if mask is not None and mask.rows != batch.num_tokens:
        raise ValueError(f"The mask has {mask.rows} rows, but the batch {batch.num_tokens} tokens.")
    plain = mask is None
    mask = Mask.causal(batch.cu_seqlens_S1) if mask is None else mask
    kind = config.placement if axis.size > 1 else "contiguous"
    placement = place(kind, mask, axis.size, config.block, rows_multiple)
    attend: Attend | None = None
    if axis.size == 1 and plain:
        if not placement.pads:
            return LocalBatch(batch, placement, 0)
    elif config.method == "ring":
        attend = RingAttention(placement, mask, axis, recorder)
    elif config.method == "ulysses":
        attend = UlyssesAttention(placement, mask, axis, batch.tokens_T.device)
    else:
        attend = GatherAttention(placement, mask, axis, batch.tokens_T.device)
    bounds = np.asarray(batch.cu_seqlens_S1.tolist())
    cu, longest = _runs(placement, bounds, axis.index)
    local = Batch(placement.local(batch.tokens_T, axis.index, 0),
                  placement.local(batch.positions_T, axis.index, 0),
                  cu.to(batch.cu_seqlens_S1.device), longest, attend=attend)
    return LocalBatch(local, placement, axis.index)


def all_rows(batch: Batch, values_T: Tensor) -> Tensor:
    """[T, …] of the batch that was spread, in its order, on every rank: what each has of its own
    rows, pads dropped. A loss of them is to be the same on all ranks, and its gradient on a rank is
    that of the rank's own rows (see `counted_once`). Of a batch that is not spread, as they are.

    Args:
        batch: this rank's, of `spread_batch`.
        values_T: [this rank's rows, …].
    """
    attend = batch.attend
    if not isinstance(attend, RingAttention | UlyssesAttention | GatherAttention):
        return values_T
    placement = attend.placement
    rows = torch.from_numpy(placement.rows(attend.axis.index)).to(values_T.device)
    # Minus zero is what every number added to it leaves as it is.
    empty_T = values_T.new_full((placement.tokens + placement.pads, *values_T.shape[1:]), -0.0)
    return reduce_from(empty_T.index_copy(0, rows, values_T), attend.axis)[:placement.tokens]


def counted_once(loss: Tensor, axis: Axis) -> Tensor:
    """A loss of `all_rows`, to be summed over the axis: its value on the first rank and 0 on the
    others, its gradient on all."""
    return loss if axis.index == 0 else loss - loss.detach()


def _runs(placement: Placement, bounds: np.ndarray, rank: int) -> tuple[Tensor, int]:
    """(cu_seqlens of a rank's rows, the longest): a run for each document it has some of, and for
    each pad."""
    rows = placement.rows(rank)
    pad = np.maximum(rows - placement.tokens + 1, 0)
    document = np.searchsorted(bounds, rows, side="right") + pad
    new = np.append(True, document[1:] != document[:-1])
    cu = np.append(np.flatnonzero(new), len(rows))
    return torch.from_numpy(cu.astype(np.int32)), int(np.diff(cu).max())


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank puts on the wire for one layer's attention (see `kilter.comm.counter`)."""

    forward: int
    backward: int


def wire_bytes(method: Method, tokens: int, kv_heads: int, heads: int, head_dim: int, n: int, *,
               placement: PlacementKind = "zigzag", kv_bytes: int = 4) -> Sent:
    """Closed forms for one causal document of ``tokens`` rows, a multiple of 2 n, over n ranks.
    Of a ring over contiguous rows, where ranks differ, the average, rounded down.

    Args:
        kv_bytes: of an element of keys and values; all else, their gradients too, has four.
    """
    if n == 1:
        return Sent(0, 0)
    rows = tokens // n
    if method == "ulysses":
        copies = kv_copies(heads, kv_heads, n)
        away = rows * head_dim * (n - 1)  # elements of one head's rows, to all the others
        q_and_out, kv_heads = 2 * heads // n, 2 * copies * kv_heads // n
        return Sent(away * (4 * q_and_out + kv_bytes * kv_heads), away * 4 * (q_and_out + kv_heads))
    kv = rows * 2 * kv_heads * head_dim  # elements of a rank's keys and values
    if method == "all_gather":
        gathered = 2 * collective_bytes("all_gather", n * kv // 2 * kv_bytes, n)
        return Sent(gathered, gathered + (n - 1) * kv * 4)
    # Each block goes as far as the last rank that sees it, its gradient as far and home.
    hops = n * (n - 1) // (2 if placement == "contiguous" else 1)
    return Sent(hops * kv * kv_bytes // n, hops * kv * (kv_bytes + 4) // n)
