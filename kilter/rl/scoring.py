"""The trainer's side: log-probabilities of an experience's actions, in micro-batches of few tokens.

    for part in micro_batches(experience, token_budget=4096):
        rows_T = spread.forward(part.batch(device), part.targets_T(device), temperature=t)
        logprobs_T = part.at_actions(rows_T)        # of part.experience's tokens, NaN elsewhere

Packing changes no bits on the exact path; how many tokens a micro-batch has is a matter of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_reduce_max
from kilter.models.batch import Batch
from kilter.rl.experience import IGNORE, Experience


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of an experience side by side, as one forward takes them.

    Attributes:
        sequences: their indices in the whole experience, ascending.
        experience: these sequences; None of a blank, which computes and changes nothing and keeps
            ranks in step that have fewer micro-batches than others.
        padding: tokens after them, in a sequence of their own and without targets.
    """

    sequences: tuple[int, ...]
    experience: Experience | None
    padding: int

    @property
    def num_tokens(self) -> int:
        return (0 if self.experience is None else self.experience.num_tokens) + self.padding

    def batch(self, device: torch.device | str = "cpu") -> Batch:
        padding = [[0] * self.padding] if self.padding else []
        if self.experience is None:
            return Batch.of(padding, device)
        parts = self.experience.tokens_T.split(self.experience.lengths.tolist())
        return Batch.of([part.tolist() for part in parts] + padding, device)

    def targets_T(self, device: torch.device | str = "cpu") -> Tensor:
        """int64, of the batch's rows: the next token where it is an action, else `IGNORE`."""
        none_P = torch.full((self.padding,), IGNORE)
        if self.experience is None:
            return none_P.to(device)
        return torch.cat([self.experience.targets(), none_P]).to(device)

    def at_actions(self, row_values_T: Tensor) -> Tensor:
        """From values of the batch's rows to those of the experience's tokens: float, at each
        action what the row before it has, NaN elsewhere. Gradients pass."""
        if self.experience is None:
            return row_values_T[:0]
        own_T = row_values_T[:self.experience.num_tokens]
        is_action_T = self.experience.is_action_T.to(own_T.device)
        return torch.where(is_action_T, self.experience.at_actions(own_T), torch.nan)


def micro_batches(experience: Experience, token_budget: int, *, at_least: int = 1,
                  multiple: int = 1) -> list[MicroBatch]:
    """All sequences, each whole in one micro-batch; the same for the same lengths, always.

    Long sequences go first, each into the first micro-batch that has room (first-fit decreasing).

    Args:
        token_budget: tokens of a micro-batch at most, padding not counted.
        at_least: as many micro-batches; large ones are then halved, and where there are fewer
            sequences the rest is blank. For ranks that have to run equally many.
        multiple: every micro-batch is padded to a multiple of so many tokens (sequence parallelism
            cuts them over tp ranks).

    Raises:
        ValueError: for a sequence that is longer than the budget.
    """
    lengths = experience.lengths.tolist()
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > token_budget:
        raise ValueError(f"Sequence {experience.ids[longest]!r} has {lengths[longest]} tokens, "
                         f"which no micro-batch of {token_budget} can hold; a sequence is never "
                         "split, so raise the token budget or make shorter rollouts.")
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, room in enumerate(free) if room >= lengths[index]), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(token_budget)
        bins[place].append(index)
        free[place] -= lengths[index]
    while len(bins) < min(at_least, len(lengths)):
        fullest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
        bins.remove(fullest)
        bins += [fullest[::2], fullest[1::2]]
    bins = sorted(sorted(b) for b in bins)
    found = []
    for chosen in bins:
        part = experience.select(chosen)
        found.append(MicroBatch(tuple(chosen), part, -part.num_tokens % multiple))
    return found + [MicroBatch((), None, multiple)] * (at_least - len(found))


@dataclass(frozen=True)
class Scores:
    """What a model says of an experience.

    Attributes:
        logprobs_T: float32 [T] on the CPU, of each action; NaN elsewhere.
        entropy_T: of the distribution each action was drawn from, nats, likewise; None if it was
            not asked for.
    """

    logprobs_T: Tensor
    entropy_T: Tensor | None


@torch.no_grad()
def score(forward: Callable[..., Any], experience: Experience, *, token_budget: int,
          temperature: float = 1.0, with_entropy: bool = False, multiple: int = 1,
          in_step: Axis | None = None, device: torch.device | str = "cpu") -> Scores:
    """Log-probabilities of all actions, without gradients.

    Args:
        forward: `TokenLogprobs.forward` (`Spread.forward`).
        token_budget, multiple: as in `micro_batches`.
        temperature: that the actions were sampled at.
        in_step: the ranks that have to call ``forward`` equally often, though their experiences
            differ (where parameters are sharded over them: ``dp_cp``).

    Raises:
        ValueError: as `micro_batches` and the forward do.
    """
    parts = micro_batches(experience, token_budget, multiple=multiple)
    if in_step is not None and in_step.size > 1:
        most = all_reduce_max(torch.tensor([len(parts)], device=device), in_step)
        parts = micro_batches(experience, token_budget, at_least=int(most), multiple=multiple)
    found = [torch.full((experience.num_tokens,), torch.nan) for _ in range(1 + with_entropy)]
    cu = experience.cu_seqlens_S1.tolist()
    for part in parts:
        rows = forward(part.batch(device), part.targets_T(device), temperature=temperature,
                       with_entropy=with_entropy)
        if part.experience is None:
            continue
        place_T = torch.cat([torch.arange(cu[s], cu[s + 1]) for s in part.sequences])
        for whole_T, rows_T in zip(found, rows if with_entropy else (rows,), strict=True):
            whole_T[place_T] = part.at_actions(rows_T).cpu()
    return Scores(found[0], found[1] if with_entropy else None)
