"""Beam search: of the continuations of all running beams, which go on and which are finished.

`expand` is one step as a pure function; `BeamSearch` keeps the beams of one request. The driver
(the engine, a test) computes log-probabilities, forks sequences as told, and stops when `done`:

    search = BeamSearch(params, end_ids)
    while not search.done:
        moves = search.advance(logprobs_BV)     # row b belongs to search.running[b]
        # new beam i continues old beam moves[i].parent with moves[i].token

The same sequences in the same order as `transformers` gives (num_beams = width, no sampling), up to
ties, which go to the earlier beam and the lower token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from kilter.serve.params import BeamParams


@dataclass(frozen=True)
class Move:
    """A beam's continuation by one token."""

    parent: int  # index among the running beams
    token: int
    score: np.float32  # log-probability of the whole answer


@dataclass(frozen=True)
class Hypothesis:
    """An answer, running or finished.

    score: its log-probability; once finished, divided by length ** length_penalty.
    """

    tokens: tuple[int, ...]
    score: np.float32


def expand(logprobs_BV: np.ndarray, scores_B: np.ndarray, width: int, ends: Collection[int],
           last: bool = False) -> tuple[list[Move], list[Move]]:
    """One step: (up to ``width`` moves that go on, the moves that finish), each best first.

    A move finishes if its token is an end, or if this is the ``last`` step; then it counts only
    among the ``width`` best moves of all, so that a poor beam does not end just because it may.

    Args:
        logprobs_BV: float32 log-probabilities of each running beam's next token.
        scores_B: float32 log-probability of each beam so far.
    """
    total = (logprobs_BV + scores_B[:, None]).reshape(-1)
    # Each beam has at most len(ends) finishing moves, so these hold `width` that go on.
    count = min(max(2, 1 + len(ends)) * width, total.size)
    bound = np.partition(total, -count)[-count]
    candidates = np.flatnonzero(total >= bound)
    order = candidates[np.argsort(-total[candidates], kind="stable")][:count]
    vocab = logprobs_BV.shape[1]
    moves = [Move(int(i) // vocab, int(i) % vocab, total[i]) for i in order
             if total[i] > -np.inf]
    finishing = [move for move in moves[:width] if last or move.token in ends]
    going_on = [] if last else [move for move in moves if move.token not in ends][:width]
    return going_on, finishing


class BeamSearch:
    """The beams of one request.

    Args:
        end_ids: the model's end tokens.
    """

    def __init__(self, params: BeamParams, end_ids: Iterable[int] = ()) -> None:
        self.params = params
        self.ends = frozenset(params.stop_token_ids).union(() if params.ignore_eos else end_ids)
        self.running = [Hypothesis((), np.float32(0))]
        self.finished: list[Hypothesis] = []  # best first, at most width
        self.done = False

    def advance(self, logprobs_BV: np.ndarray) -> list[Move]:
        """Takes float32 log-probabilities of each running beam's next token; returns the moves that
        made the new running beams, in order (none when the search is done)."""
        params = self.params
        length = len(self.running[0].tokens) + 1
        scores_B = np.array([beam.score for beam in self.running], dtype=np.float32)
        moves, finishing = expand(logprobs_BV, scores_B, params.width, self.ends,
                                  last=length >= params.max_tokens)
        norm = np.float32(length ** params.length_penalty)
        found = [Hypothesis((*self.running[m.parent].tokens, m.token), m.score / norm)
                 for m in finishing]
        self.finished = sorted([*self.finished, *found], key=lambda h: -h.score)[:params.width]
        self.running = [Hypothesis((*self.running[m.parent].tokens, m.token), m.score)
                        for m in moves]
        self.done = not self.running or self._settled(length)
        return [] if self.done else moves

    def _settled(self, length: int) -> bool:
        """Whether no running beam would displace a finished one."""
        params = self.params
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is True:
            return True
        reach = (params.max_tokens if params.early_stopping == "never"
                 and params.length_penalty > 0 else length)
        best = self.running[0].score / np.float32(reach ** params.length_penalty)
        return bool(best <= self.finished[-1].score)
