"""From token losses to one loss: five means that the field uses, as a weight per token.

    loss = Σ weights_T · losses_T       over every token of the step, on whichever rank it is

The weights hold the counts of the whole step, so a step that is cut into micro-batches and spread
over ranks is the step: gradients add up, and nothing is divided again. With n_s action tokens in
sequence s, S sequences, G groups (prompts) with n_g tokens each, and N tokens in all:

    token_mean                1 / N              every token weighs the same
    seq_mean_token_mean       1 / (S · n_s)      every sequence weighs the same (2402.03300)
    seq_mean_token_sum        1 / S              as the policy gradient of whole sequences has it
    seq_mean_token_sum_norm   1 / (S · L)        the same, by a constant length (2503.20783)
    prompt_mean               1 / (G · n_g)      every prompt weighs the same (2503.14476)

Only tokens of the mask count, and only sequences and groups that have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from kilter.rl.masks import check_mask, only, sequence_counts

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum",
                      "seq_mean_token_sum_norm", "prompt_mean"]


@dataclass(frozen=True)
class Counts:
    """What a step, or a part of it, has: those of parts add up to those of the whole. A sequence
    is whole in one part; a group may be spread over many.

    Attributes:
        tokens: tokens that count.
        seqs: sequences with such a token.
        group_tokens: group -> its tokens that count, at least one.
    """

    tokens: int = 0
    seqs: int = 0
    group_tokens: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(*, mask_T: Tensor, sequence_T: Tensor, group_S: Tensor) -> Counts:
        counts_S = sequence_counts(mask_T=mask_T, sequence_T=sequence_T, num_seqs=len(group_S))
        group_tokens: Counter[int] = Counter()
        for group, count in zip(group_S.tolist(), counts_S.tolist(), strict=True):
            if count:
                group_tokens[group] += count
        return Counts(int(counts_S.sum()), int((counts_S > 0).sum()), dict(group_tokens))

    def __add__(self, other: Counts) -> Counts:
        both = Counter(self.group_tokens)
        both.update(other.group_tokens)
        return Counts(self.tokens + other.tokens, self.seqs + other.seqs, dict(both))


def aggregation_weights(mode: Aggregation, *, mask_T: Tensor, sequence_T: Tensor, group_S: Tensor,
                        counts: Counts, norm_length: int | None = None) -> Tensor:
    """float64 [T]: what each token's loss is multiplied with; 0 where the mask is False.

    Args:
        counts: of the whole step: all micro-batches of all ranks.
        norm_length: the constant L of ``seq_mean_token_sum_norm``, usually the longest answer
            allowed; None for the other modes.

    Raises:
        ValueError: for an unknown mode, a length that is missing or not used, a mask that is not
            bool, or tokens here that ``counts`` does not know of.
    """
    check_mask(mask_T, sequence_T=sequence_T)
    if mode not in get_args(Aggregation):
        raise ValueError(f"The loss aggregation {mode!r} is not known; it must be one of "
                         f"{', '.join(get_args(Aggregation))}.")
    if (norm_length is not None) != (mode == "seq_mean_token_sum_norm") or (norm_length or 1) < 1:
        raise ValueError(f"norm_length is {norm_length} with the aggregation {mode}; "
                         "seq_mean_token_sum_norm, and no other, needs one of at least 1.")
    own_S = sequence_counts(mask_T=mask_T, sequence_T=sequence_T, num_seqs=len(group_S))
    here = int(own_S.sum())
    if here > counts.tokens:
        raise ValueError(f"{here} tokens count here, but the step is said to have "
                         f"{counts.tokens}; add up the counts of all its parts first.")
    if not here:
        return torch.zeros(mask_T.shape, dtype=torch.float64, device=mask_T.device)
    divisor_S = own_S.double()
    if mode == "token_mean":
        divisor_S = torch.full_like(divisor_S, counts.tokens)
    elif mode == "seq_mean_token_mean":
        divisor_S = divisor_S * counts.seqs
    elif mode == "prompt_mean":
        tokens = [counts.group_tokens.get(group, 0) for group in group_S.tolist()]
        divisor_S = torch.tensor(tokens).to(divisor_S) * len(counts.group_tokens)
        if bool(((divisor_S == 0) & (own_S > 0)).any()):
            raise ValueError("A group has tokens here that the step's counts do not know of; add "
                             "up the counts of all its parts first.")
    else:
        divisor_S = torch.full_like(divisor_S, counts.seqs * (norm_length or 1))
    return only((1.0 / divisor_S)[sequence_T], mask_T)


def weighted_sum(losses_T: Tensor, *, weights_T: Tensor) -> Tensor:
    """float scalar: Σ weight · loss, added in float64. Slots of weight 0 may hold anything."""
    check_mask(weights_T != 0.0, losses_T=losses_T)
    kept_T = only(losses_T, weights_T != 0.0)
    return (kept_T.double() * weights_T.double()).sum().to(losses_T.dtype)
