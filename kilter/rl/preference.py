"""Learning from pairs, one better than the other: the losses that training has too
(`kilter.train.preference.losses`), and the pairs of Online DPO (arXiv 2402.04792).

A sequence's log-probability is the sum over its answer's tokens (`sequence_sums` of
`kilter.rl.masks`), undivided by their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kilter.rl.masks import check_mask
from kilter.train.preference.losses import PairLosses, PreferenceLoss, bradley_terry, dpo

__all__ = ["PairLosses", "PreferenceLoss", "bradley_terry", "dpo", "preference_pairs"]


def preference_pairs(*, reward_S: Tensor, group_S: Tensor, valid_S: Tensor
                     ) -> tuple[Tensor, Tensor]:
    """(chosen, rejected), int64 [P]: indices of the best and the worst valid sequence of each
    group, the first of equals, in the order of group numbers. A group of equal rewards, or with
    fewer than two valid sequences, gives no pair.

    Raises:
        ValueError: for a mask that is not bool, or other shapes.
    """
    check_mask(valid_S, reward_S=reward_S, group_S=group_S)
    members: dict[int, list[int]] = {}
    for s, (group, valid) in enumerate(zip(group_S.tolist(), valid_S.tolist(), strict=True)):
        if valid:
            members.setdefault(group, []).append(s)
    rewards = reward_S.tolist()
    pairs = [(max(of, key=rewards.__getitem__), min(of, key=rewards.__getitem__))
             for _, of in sorted(members.items())]
    kept = [(best, worst) for best, worst in pairs if rewards[best] > rewards[worst]]
    table = torch.tensor(kept, dtype=torch.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
