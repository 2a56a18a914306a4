"""An experience through a spread model: who computes which sequences, and how results meet.

Every rank has the whole experience. Its sequences are packed into micro-batches, of which each
data-parallel rank takes every so-manieth; what they compute comes back to every rank, so that what
follows (advantages, losses' weights) is the same arithmetic everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kilter.comm.collectives import all_reduce_sum
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread
from kilter.rl.experience import Experience
from kilter.rl.scoring import MicroBatch, micro_batches
from kilter.train.step import local_rows

# Of a forward, and what it is to compute with its targets, the values of its rows [T].
Rows = Callable[[Callable[..., Any], Batch, Tensor], Tensor]


def deal(spread: Spread, experience: Experience, token_budget: int) -> list[MicroBatch]:
    """This rank's micro-batches: of every rank of a data axis as many, and as many as the
    pipeline's schedule can take.

    Raises:
        ValueError: for a sequence that is longer than the budget.
    """
    mesh = spread.mesh
    dp = mesh.axis("dp")
    count = -(-len(micro_batches(experience, token_budget)) // dp.size)
    if spread.pipeline is not None:
        count = _allowed(spread, count)
    return micro_batches(experience, token_budget, at_least=count * dp.size)[dp.index::dp.size]


@torch.no_grad()
def rows_of(spread: Spread, experience: Experience, token_budget: int, rows: Rows) -> Tensor:
    """float32 [T] on every rank of the model: ``rows`` of every token, in the alignment of a
    model's rows (row t predicts token t + 1)."""
    mine = deal(spread, experience, token_budget)
    device = torch.device(spread.mesh.device_type)
    given = [local_rows(spread, part, device) for part in mine]
    found = spread.forward_all([batch for batch, _ in given],
                               lambda forward, k: rows(forward, *given[k]))
    return together(spread.mesh, experience, mine, found)


def together(mesh: Mesh, experience: Experience, mine: Sequence[MicroBatch],
             found: Sequence[Tensor | None]) -> Tensor:
    """What ranks found of the rows of their micro-batches, whole on all of them.

    Args:
        found: of each of this rank's micro-batches; None where another stage of the pipeline has
            it.
    """
    own_T = torch.zeros(experience.num_tokens, dtype=torch.float64)
    for part, rows_T in zip(mine, found, strict=True):
        if part.experience is not None and rows_T is not None:
            own_T[places(experience, part)] = rows_T[:part.num_tokens].detach().double().cpu()
    return all_reduce_sum(own_T, mesh.axis("pp_dp_cp")).float()


def places(experience: Experience, part: MicroBatch) -> Tensor:
    """int64: where the tokens of a micro-batch stand in the experience it is of."""
    cu = experience.cu_seqlens_S1.tolist()
    return torch.cat([torch.arange(cu[s], cu[s + 1]) for s in part.sequences])


def logprob_rows(temperature: float) -> Rows:
    """Log-probabilities of actions, at the rows that predict them; 0 elsewhere."""
    def rows(forward: Callable[..., Any], batch: Batch, targets_T: Tensor) -> Tensor:
        found: Tensor = forward(batch, targets_T, temperature=temperature)
        return found

    return rows


def value_rows(forward: Callable[..., Any], batch: Batch, targets_T: Tensor) -> Tensor:
    """A critic's or a reward model's values of the state after each token."""
    found: Tensor = forward(batch)
    return found


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
