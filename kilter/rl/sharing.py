"""What the samples of one prompt begin with alike is computed once.

    tokens  [ p0 p1 p2 a0 a1 | p0 p1 p2 b0 ]        T tokens of the sequences as they are
    rows    [ p0 p1 | p2 a0 a1 | p2 b0 ]            U rows that the model computes

The last token of a prompt stays each sequence's own, since its row predicts another token in each.
Attention sees the sequences as they are: its queries, keys and values are copied to the places of
all tokens, and of its results one of each row is taken. Every op is row-invariant, so on the exact
path the bits are those of the sequences apart; in the gradient the copies' parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.models.batch import Batch
from kilter.ops import Ops
from kilter.rl.experience import Experience


@dataclass(frozen=True)
class Shared:
    """Which row each token is, and back.

    Attributes:
        row_T: int64 [T], the row of each token.
        token_U: int64 [U], a token of each row; of a shared one, the first sequence's. What was
            added to make U a multiple is the first token again.
    """

    row_T: Tensor
    token_U: Tensor

    @staticmethod
    def of(experience: Experience, multiple: int = 1) -> Shared | None:
        """None where no two sequences share anything.

        Args:
            multiple: of which the number of rows is one, as sequence parallelism needs it.
        """
        cu = experience.cu_seqlens_S1.tolist()
        prefix = shared_lengths(experience)
        groups = experience.group_S.tolist()
        row_T = torch.empty(experience.num_tokens, dtype=torch.int64)
        tokens: list[Tensor] = []
        first: dict[int, int] = {}  # of a group: the row its shared prefix starts at
        count = 0
        for s, group in enumerate(groups):
            skipped = prefix[s] if group in first else 0
            if skipped:
                row_T[cu[s]:cu[s] + skipped] = torch.arange(first[group], first[group] + skipped)
            first.setdefault(group, count)
            own = torch.arange(cu[s] + skipped, cu[s + 1])
            row_T[own] = torch.arange(count, count + len(own))
            tokens.append(own)
            count += len(own)
        if count == experience.num_tokens:
            return None
        tokens.append(torch.zeros(-count % multiple, dtype=torch.int64))
        return Shared(row_T, torch.cat(tokens))

    def batch(self, experience: Experience, device: torch.device | str) -> Batch:
        """The rows as a batch whose attention sees the whole sequences."""
        lengths = experience.lengths
        positions_T = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths.tolist()])
        cu = experience.cu_seqlens_S1.to(device)
        attend = SharedAttention(self.row_T.to(device), self.token_U.to(device), cu,
                                 int(lengths.max()))
        rows = len(self.token_U)
        return Batch(experience.tokens_T[self.token_U].to(device),
                     positions_T[self.token_U].to(device),
                     torch.tensor([0, rows], dtype=torch.int32, device=device), rows,
                     attend=attend)


@dataclass(frozen=True)
class SharedAttention:
    """`kilter.models.batch.Attend` over the sequences as they are."""

    row_T: Tensor
    token_U: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int

    def __call__(self, ops: Ops, q_THd: Tensor, keys_TGd: Tensor, values_TGd: Tensor, *,
                 scale: float, window: int | None) -> Tensor:
        q, k, v = (x.index_select(0, self.row_T) for x in (q_THd, keys_TGd, values_TGd))
        out: Tensor = ops.attention(q, k, v, self.cu_seqlens_S1, scale=scale, window=window,
                                    max_seqlen=self.max_seqlen)
        return out.index_select(0, self.token_U)


def shared_lengths(experience: Experience) -> list[int]:
    """Of each sequence, how many of its first tokens all others of its group have too, without the
    row that predicts its first action; 0 where it is alone."""
    cu = experience.cu_seqlens_S1.tolist()
    groups = experience.group_S.tolist()
    members: dict[int, list[int]] = {}
    for s, group in enumerate(groups):
        members.setdefault(group, []).append(s)
    found = [0] * len(groups)
    for sequences in members.values():
        if len(sequences) == 1:
            continue
        length = min(_before_first_action(experience.is_action_T[cu[s]:cu[s + 1]])
                     for s in sequences)
        head = experience.tokens_T[cu[sequences[0]]:cu[sequences[0]] + length]
        for s in sequences[1:]:
            same = head == experience.tokens_T[cu[s]:cu[s] + len(head)]
            head = head[:int(same.long().cumprod(0).sum())]
        for s in sequences:
            found[s] = len(head)
    return found


def _before_first_action(is_action: Tensor) -> int:
    """Tokens before the one whose row predicts the first action; without actions, all but one."""
    where = is_action.nonzero()
    return max((int(where[0]) if len(where) else len(is_action)) - 1, 0)
