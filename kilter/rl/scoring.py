"""The trainer's side: log-probabilities of an experience's actions, in micro-batches of few tokens.

    scores = score(spread, experience, token_budget=4096, temperature=0.7)
    scores.logprobs_T                   # of each action, NaN elsewhere

    for part in micro_batches(experience, token_budget=4096):      # to learn from
        batch, targets_T = local_rows(spread, part, device)
        rows_T = forward(batch, targets_T, temperature=0.7)
        logprobs_T = part.at_actions(rows_T)                       # of part.experience's tokens

Packing changes no bits on the exact path; how many tokens a micro-batch has is a matter of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilter.comm.collectives import all_reduce_max, broadcast
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread
from kilter.rl.experience import IGNORE, Experience
from kilter.train.step import local_rows


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of an experience side by side, as one forward takes them (for
    `kilter.train.step` too).

    Attributes:
        sequences: their indices in the whole experience, ascending.
        experience: these sequences; None of a blank, one token that nothing is learned from, which
            keeps ranks in step that have fewer micro-batches than others.
    """

    sequences: tuple[int, ...]
    experience: Experience | None

    @property
    def num_tokens(self) -> int:
        return 1 if self.experience is None else self.experience.num_tokens

    @property
    def valid(self) -> int:
        """Actions."""
        return 0 if self.experience is None else self.experience.num_actions

    @property
    def targets_T(self) -> Tensor:
        """int64, on the CPU: at each row the next token where it is an action, else `IGNORE`."""
        return torch.tensor([IGNORE]) if self.experience is None else self.experience.targets()

    def batch(self, device: torch.device | str = "cpu") -> Batch:
        if self.experience is None:
            return Batch.of([[0]], device)
        parts = self.experience.tokens_T.split(self.experience.lengths.tolist())
        return Batch.of([part.tolist() for part in parts], device)

    def at_actions(self, row_values_T: Tensor) -> Tensor:
        """From values of the batch's rows (what follows as padding is left out) to those of its
        tokens: float, at each action what the row before it has, NaN elsewhere. Gradients pass."""
        own_T = row_values_T[:self.num_tokens]
        if self.experience is None:
            return own_T * torch.nan
        is_action_T = self.experience.is_action_T.to(own_T.device)
        return torch.where(is_action_T, self.experience.at_actions(own_T), torch.nan)


def micro_batches(experience: Experience, token_budget: int, *, at_least: int = 1
                  ) -> list[MicroBatch]:
    """All sequences, each whole in one micro-batch; the same for the same lengths, always.

    Long sequences go first, each into the first micro-batch that has room (first-fit decreasing).

    Args:
        token_budget: tokens of a micro-batch at most.
        at_least: as many micro-batches; full ones are then halved, and where there are fewer
            sequences the rest is blank. For ranks that have to run equally many.

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
    found = [MicroBatch(tuple(chosen), experience.select(chosen))
             for chosen in sorted(sorted(b) for b in bins)]
    return found + [MicroBatch((), None)] * (at_least - len(found))


def micro_batches_in_step(experience: Experience, token_budget: int, spread: Spread
                          ) -> list[MicroBatch]:
    """`micro_batches`, as many on every data-parallel rank, which all call: where parameters are
    sharded over them, each forward and backward is everybody's.

    Args:
        experience: this rank's; the ranks of tensor and pipeline axes have the same.
    """
    parts = micro_batches(experience, token_budget)
    count = torch.tensor([len(parts)], device=spread.mesh.device_type)
    most = int(all_reduce_max(count, spread.mesh.axis("dp")))
    return parts if most == len(parts) else micro_batches(experience, token_budget, at_least=most)


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
def score(spread: Spread, experience: Experience, *, token_budget: int, temperature: float = 1.0,
          with_entropy: bool = False) -> Scores:
    """Log-probabilities of all actions, without gradients, on every rank that has the experience;
    all ranks of the mesh call.

    Args:
        experience: as in `micro_batches_in_step`.
        temperature: that the actions were sampled at.

    Raises:
        ValueError: as `micro_batches` and the forward do, and under context parallelism, whose
            ranks have parts of sequences.
    """
    mesh = spread.mesh
    if mesh.layout.cp > 1:
        raise ValueError(f"An experience cannot be scored with cp = {mesh.layout.cp} yet, since "
                         "the rows of a sequence are then on several ranks; set cp to 1.")
    device = torch.device(mesh.device_type)
    parts = micro_batches_in_step(experience, token_budget, spread)
    rows = [local_rows(spread, part, device) for part in parts]

    def scored(forward: Callable[..., Any], k: int) -> Tensor:
        batch, targets_T = rows[k]
        found = forward(batch, targets_T, temperature=temperature, with_entropy=with_entropy)
        return torch.stack(found if with_entropy else (found,))

    whole_NT = torch.full((1 + with_entropy, experience.num_tokens), torch.nan)
    cu = experience.cu_seqlens_S1.tolist()
    for part, found_NT in zip(parts, spread.forward_all([b for b, _ in rows], scored),
                              strict=True):
        if found_NT is None or part.experience is None:
            continue
        place_T = torch.cat([torch.arange(cu[s], cu[s + 1]) for s in part.sequences])
        whole_NT[:, place_T] = torch.stack([part.at_actions(row_T) for row_T in found_NT]).cpu()
    if spread.pipeline is not None:  # the others learn it from the last stage's rank
        last = spread.pipeline.placement[-1]
        whole_NT = broadcast(whole_NT.to(device), mesh.axis("pp"), last).cpu()
    return Scores(whole_NT[0], whole_NT[1] if with_entropy else None)
