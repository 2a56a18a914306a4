"""Rules around a reward: answers that are too long or do not end, and how stale data may be."""

from __future__ import annotations

import torch
from torch import Tensor

from kilter.rl.masks import check_mask


def overlong_penalty(lengths_S: Tensor, *, max_length: int, cache: int) -> Tensor:
    """float32 [S], from 0 to −1: soft overlong punishment (DAPO, arXiv 2503.14476 eq. 13). Nothing
    up to ``max_length − cache`` tokens, then falling evenly to −1 at ``max_length``.

    Args:
        lengths_S: tokens of each answer.

    Raises:
        ValueError: unless 0 < cache ≤ max_length.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache is {cache} and max_length {max_length}, but cache must be at "
                         "least 1 and at most max_length.")
    return ((max_length - cache - lengths_S.double()) / cache).clamp(-1.0, 0.0).float()


def missing_eos_penalty(reward_S: Tensor, *, ended_S: Tensor, penalty: float) -> Tensor:
    """[S]: the rewards, less ``penalty`` where the answer did not end by itself.

    Args:
        ended_S: bool [S], True where an end token (any of the model's) or stop string ended it.

    Raises:
        ValueError: for a mask that is not bool, other shapes, or a negative penalty.
    """
    check_mask(ended_S, reward_S=reward_S)
    if penalty < 0.0:
        raise ValueError(f"penalty is {penalty}, but it is subtracted and must not be negative.")
    return torch.where(ended_S, reward_S, reward_S - penalty)


def staleness_capacity(*, max_staleness: int, version: int, batch: int, accepted: int, running: int
                       ) -> int:
    """How many more sequences may be started so that, trained on in the order they were begun, none
    is more than ``max_staleness`` weight versions old (AReaL, arXiv 2505.24298); negative: that
    many are too many already.

    A trainer that takes what is finished first can meet a straggler that is older: check ages
    where that matters.

    Args:
        version: of the weights now; the number of training steps done.
        batch: sequences in a training step.
        accepted: sequences finished and kept since the run began, trained on or not.
        running: sequences that are being generated.
    """
    numbers = {"max_staleness": max_staleness, "version": version, "accepted": accepted,
               "running": running}
    if min(numbers.values()) < 0 or batch < 1:
        raise ValueError(f"batch is {batch} but must be at least 1, and none of {numbers} may be "
                         "negative.")
    return (max_staleness + version + 1) * batch - (accepted + running)
