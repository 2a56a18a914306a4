"""`Batch`: what one forward pass computes. A flat run of T tokens of S sequences, no padding.

    tokens_T        [ a0 a1 a2 | b7 | c0 c1 ... ]     T tokens, sequence after sequence
    positions_T     [ 0  1  2  | 7  | 0  1  ... ]     position of each token in its sequence
    cu_seqlens_S1   [ 0, 3, 4, ... , T ]              where each sequence's new tokens start

A training pack, an RL scoring batch, a prefill chunk and a decode step are all this. With a
`KVView`, keys and values are written to and read from a paged cache; without one, a sequence's
keys are the batch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kilter.ops import Ops


@dataclass
class KVView:
    """Where each sequence's keys and values live in a paged cache.

    A *slot* is ``page * page_size + offset``; the same slot numbers hold for every layer.
    """

    keys: list[Tensor]  # per layer [num_slots, G, d]; its dtype is part of the numerics
    values: list[Tensor]  # per layer [num_slots, G, d]
    page_size: int  # tokens per page
    page_table_SP: Tensor  # int32 [S, P] page ids; entries past a sequence's last page unread
    context_S: Tensor  # int32 [S] tokens each sequence will have after this pass (old + new)
    slots_T: Tensor  # int32 [T] slot that each new token's key and value are written to


class Attend(Protocol):
    """What computes attention where a batch's rows are only a part of its sequences (context
    parallelism), instead of the model's own op."""

    def __call__(self, ops: Ops, q_THd: Tensor, keys_TGd: Tensor, values_TGd: Tensor, *,
                 scale: float, window: int | None) -> Tensor:
        """[T, H, d] of this batch's rows, whose queries and keys are turned by rope already; for
        one layer, which looks back over ``window`` tokens."""


@dataclass
class Batch:
    """One forward pass's input (shapes above). All index tensors are int32 on the model's device
    but ``tokens_T``, which is int64 as token ids are everywhere in torch."""

    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int  # largest number of new tokens of any sequence (a host integer)
    kv: KVView | None = None
    attend: Attend | None = None  # None: each sequence of the batch over its own keys

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens_S1.shape[0] - 1

    @staticmethod
    def of(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Batch:
        """A batch of whole sequences without a cache (training, scoring).

        Raises:
            ValueError: if there is no sequence, or one is empty.
        """
        lengths = [len(s) for s in sequences]
        if not lengths or min(lengths) == 0:
            raise ValueError(f"A batch needs at least one sequence and no empty ones; the lengths "
                             f"are {lengths}.")
        tokens = torch.tensor([t for s in sequences for t in s], dtype=torch.int64)
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
        return Batch(tokens.to(device), positions.to(device), boundaries(lengths).to(device),
                     max(lengths))


def boundaries(lengths: Sequence[int]) -> Tensor:
    """int32 [S + 1]: where sequences of these lengths begin and end in a flat run of tokens."""
    cu_S1 = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_S1[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return cu_S1
