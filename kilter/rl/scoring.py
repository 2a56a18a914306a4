"""An experience through a spread model, in micro-batches of few tokens: what is computed of each
token, for looking and for learning.

    rows_T = rows_of(spread, experience, 4096, logprob_rows(0.7))      # whole, on every rank
    logprobs_T = at_actions(experience, rows_T)                        # NaN where nothing acted

    for part in deal(spread, experience, 4096):                        # to learn from
        rows_T = logprob_rows(0.7)(forward, *local_rows(spread, part, device))
        part.at_actions(rows_T)                                        # of part.experience's tokens

Samples of one prompt come together, and their prompt is computed once (`kilter.rl.sharing`); not
under context parallelism, whose attention takes sequences as they are.

Every rank has the whole experience. Each data-parallel rank takes every so-manieth micro-batch, the
context-parallel ones compute their rows of it and are given all (`all_rows`), and what they compute
comes back to every rank, so that what follows (advantages, losses' weights) is the same arithmetic
everywhere. Packing changes no bits on the exact path; how many tokens a
micro-batch has is a matter of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilter.comm.collectives import all_reduce_max, all_reduce_sum
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread
from kilter.parallel.context.plan import all_rows
from kilter.rl.experience import IGNORE, Experience
from kilter.rl.sharing import Shared, shared_lengths
from kilter.train.step import local_rows

ROWS = 2048  # of a micro-batch, where a run does not say

# Of a forward, and what it is to compute with its targets (this rank's rows), the values [T] of all
# ranks' rows, or several.
Rows = Callable[[Callable[..., Any], Batch, Tensor], Any]


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of an experience side by side, as one forward takes them (for
    `kilter.train.step` too).

    Attributes:
        sequences: their indices in the whole experience, ascending.
        experience: these sequences; None of a blank, one token that nothing is learned from, which
            keeps ranks in step that have fewer micro-batches than others.
        shared: which of its tokens have a row together; None: each has its own.
    """

    sequences: tuple[int, ...]
    experience: Experience | None
    shared: Shared | None = None

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
        if self.experience is None:
            return torch.tensor([IGNORE])
        targets_T = self.experience.targets()
        return targets_T if self.shared is None else targets_T[self.shared.token_U]

    def batch(self, device: torch.device | str = "cpu") -> Batch:
        if self.experience is None:
            return Batch.of([[0]], device)
        if self.shared is not None:
            return self.shared.batch(self.experience, device)
        parts = self.experience.tokens_T.split(self.experience.lengths.tolist())
        return Batch.of([part.tolist() for part in parts], device)

    def at_tokens(self, row_values_T: Tensor) -> Tensor:
        """[num_tokens]: of each token what its row of the batch has (what follows as padding is
        left out). Gradients pass."""
        if self.shared is None:
            return row_values_T[:self.num_tokens]
        return row_values_T.index_select(0, self.shared.row_T.to(row_values_T.device))

    def at_actions(self, row_values_T: Tensor) -> Tensor:
        """From values of the batch's rows to those of its tokens: float, at each action what the
        row before it has, NaN elsewhere. Gradients pass."""
        own_T = self.at_tokens(row_values_T)
        if self.experience is None:
            return own_T * torch.nan
        is_action_T = self.experience.is_action_T.to(own_T.device)
        return torch.where(is_action_T, self.experience.at_actions(own_T), torch.nan)


def micro_batches(experience: Experience, token_budget: int, *, at_least: int = 1,
                  share: int = 0) -> list[MicroBatch]:
    """All sequences, each whole in one micro-batch; the same for the same lengths, always.

    Long sequences go first, each into the first micro-batch that has room (first-fit decreasing);
    where they share rows, group after group.

    Args:
        token_budget: rows of a micro-batch at most.
        at_least: as many micro-batches; full ones are then halved, and where there are fewer
            sequences the rest is blank. For ranks that have to run equally many.
        share: what sequences of a group begin with alike is one row, and the number of a
            micro-batch's rows a multiple of this; 0: every token has a row.

    Raises:
        ValueError: for a sequence that is longer than the budget.
    """
    lengths = experience.lengths.tolist()
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > token_budget:
        raise ValueError(f"Sequence {experience.ids[longest]!r} has {lengths[longest]} tokens, "
                         f"which no micro-batch of {token_budget} can hold; a sequence is never "
                         "split, so raise the token budget or make shorter rollouts.")
    prefix, groups = [0] * len(lengths), [0] * len(lengths)
    if share:
        prefix, groups = shared_lengths(experience), experience.group_S.tolist()
    bins: list[list[int]] = []
    free: list[int] = []
    there: list[set[int]] = []  # the groups of each

    def rows(index: int, b: int) -> int:
        return lengths[index] - (prefix[index] if groups[index] in there[b] else 0)

    for index in sorted(range(len(lengths)), key=lambda i: (groups[i], -lengths[i], i)):
        place = next((b for b, room in enumerate(free) if room >= rows(index, b)), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(token_budget)
            there.append(set())
        bins[place].append(index)
        free[place] -= rows(index, place)
        there[place].add(groups[index])
    while len(bins) < min(at_least, len(lengths)):
        fullest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
        bins.remove(fullest)
        bins += [fullest[::2], fullest[1::2]]
    found = []
    for chosen in sorted(sorted(b) for b in bins):
        part = experience.select(chosen)
        found.append(MicroBatch(tuple(chosen), part, Shared.of(part, share) if share else None))
    return found + [MicroBatch((), None)] * (at_least - len(found))


def deal(spread: Spread, experience: Experience, token_budget: int, *, own: bool = False
         ) -> list[MicroBatch]:
    """This rank's micro-batches: on every data-parallel rank as many, since each forward and
    backward of sharded parameters is everybody's, and as many as a pipeline's schedule can take.

    Args:
        token_budget: as of `micro_batches`; 0: ``ROWS``, or the longest sequence if that is longer.
        own: the experience is this data-parallel rank's own, and others have others; else all have
            the same and each takes a part.

    Raises:
        ValueError: for a sequence that is longer than the budget.
    """
    mesh = spread.mesh
    dp = mesh.axis("dp")
    turns, first = (1, 0) if own else (dp.size, dp.index)
    share = mesh.layout.tp if mesh.layout.sequence_parallel else 1
    if mesh.layout.cp > 1:
        share = 0
    token_budget = token_budget or max(ROWS, int(experience.lengths.max()))
    count = -(-len(micro_batches(experience, token_budget, share=share)) // turns)
    if own:
        count = int(all_reduce_max(torch.tensor([count], device=mesh.device_type), dp))
    if spread.pipeline is not None:
        count = _allowed(spread, count)
    parts = micro_batches(experience, token_budget, at_least=count * turns, share=share)
    return parts[first::turns]


@torch.no_grad()
def rows_of(spread: Spread, experience: Experience, token_budget: int, rows: Rows) -> Tensor:
    """float32 [T] on every rank: ``rows`` of every token, in the alignment of a model's rows (row t
    predicts token t + 1)."""
    mine = deal(spread, experience, token_budget)
    return together(spread, experience, mine, _forwards(spread, mine, rows))


def together(spread: Spread, experience: Experience, mine: Sequence[MicroBatch],
             found: Sequence[Tensor | None], *, own: bool = False) -> Tensor:
    """What the ranks found of the rows of their micro-batches, whole on all of them.

    Args:
        found: of each of this rank's micro-batches; None where another stage of the pipeline has
            it.
        own: as of `deal`.
    """
    mesh = spread.mesh
    axis, first = (("pp", True) if own else
                   ("pp_dp_cp", mesh.axis("cp").index == 0))  # context-parallel ranks have the same
    whole_T = torch.zeros(experience.num_tokens, dtype=torch.float64)
    for part, rows_T in zip(mine, found, strict=True):
        if part.experience is not None and rows_T is not None and first:
            whole_T[places(experience, part)] = part.at_tokens(rows_T).detach().double().cpu()
    return all_reduce_sum(whole_T, mesh.axis(axis)).float()


def places(experience: Experience, part: MicroBatch) -> Tensor:
    """int64: where the tokens of a micro-batch stand in the experience it is of."""
    cu = experience.cu_seqlens_S1.tolist()
    return torch.cat([torch.arange(cu[s], cu[s + 1]) for s in part.sequences])


def at_actions(experience: Experience, rows_T: Tensor) -> Tensor:
    """From values of rows to those of tokens: at each action what the row before it has, NaN
    elsewhere."""
    return torch.where(experience.is_action_T, experience.at_actions(rows_T), torch.nan)


def logprob_rows(temperature: float, with_entropy: bool = False) -> Rows:
    """Log-probabilities of actions, at the rows that predict them, 0 elsewhere; with the entropies
    of their distributions."""
    def rows(forward: Callable[..., Any], batch: Batch, targets_T: Tensor) -> Any:
        found = forward(batch, targets_T, temperature=temperature, with_entropy=with_entropy)
        if isinstance(found, tuple):
            return tuple(all_rows(batch, values_T) for values_T in found)
        return all_rows(batch, found)

    return rows


def value_rows(forward: Callable[..., Any], batch: Batch, targets_T: Tensor) -> Any:
    """A critic's or a reward model's values of the state after each token."""
    return all_rows(batch, forward(batch))


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
    """Log-probabilities of all actions, where each data-parallel rank has an experience of its own;
    the ranks of tensor, context and pipeline axes have the same, and all of the mesh call.

    Args:
        temperature: that the actions were sampled at.

    Raises:
        ValueError: as `deal` and the forward do.
    """
    mine = deal(spread, experience, token_budget, own=True)
    found = _forwards(spread, mine, logprob_rows(temperature, with_entropy))
    if not with_entropy:
        return Scores(at_actions(experience, together(spread, experience, mine, found, own=True)),
                      None)
    logprobs_T, entropy_T = (
        at_actions(experience, together(spread, experience, mine, [f and f[i] for f in found],
                                        own=True)) for i in range(2))
    return Scores(logprobs_T, entropy_T)


def _forwards(spread: Spread, mine: Sequence[MicroBatch], rows: Rows) -> list[Any]:
    device = torch.device(spread.mesh.device_type)
    given = [local_rows(spread, part, device) for part in mine]
    return spread.forward_all([batch for batch, _ in given],
                              lambda forward, k: rows(forward, *given[k]))


def _allowed(spread: Spread, count: int) -> int:
    """The least number of micro-batches from ``count`` on that the schedule can take."""
    assert spread.pipeline is not None
    last: ValueError | None = None
    for more in range(count, count + 3 * spread.mesh.layout.pp):
        try:
            spread.pipeline.schedule(more)
            return more
        except ValueError as error:
            last = error
    assert last is not None
    raise last
