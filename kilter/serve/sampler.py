"""From logits to a token, by each request's own settings.

A request's `SamplingState` and its row of logits decide, in this order:

    raw logits   logit_bias, repetition penalty, frequency and presence penalty,
                 then what may not be chosen: the grammar's mask, end tokens before min_tokens
    greedy       the largest logit, the lowest id of equal ones
    else         temperature, top-k, top-p, min-p, then one token by the stream's next number

A choice depends on the row, the settings, the tokens so far and (seed, step) alone: every row is
computed by itself, and random numbers are counter-based (Philox), so neighbours, batching and
restarts cannot change it. Reported log-probabilities are the model's own, of the raw logits; with
``tempered_logprobs`` of the logits divided by the temperature, by the bits what a trainer scores
that divides them so (`kilter.ops.logprob.tempered`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from kilter.ops import Ops
from kilter.ops.logprob import tempered
from kilter.serve.params import BeamParams, GrammarSpec, SamplingParams

__all__ = ["BeamParams", "Choice", "GrammarSpec", "SamplingError", "SamplingParams",
           "SamplingState", "best_answers", "choose", "sample", "sampling_distribution",
           "score_tokens", "stream_key", "uniform"]

_BLOCK = 256  # weights summed at once on the way to a token
_TINY = 1e-30  # weights below this are nothing beside the largest, 1


class SamplingError(ValueError):
    """No token can be chosen for this request; others are not affected."""


class TokenMask(Protocol):
    """What sampling asks of a grammar's state (`kilter.serve.grammar.GrammarState`). Both raise
    ValueError where the grammar cannot be followed."""

    @property
    def is_finished(self) -> bool: ...
    def mask(self, logits_V: np.ndarray) -> None: ...
    def accept(self, token: int) -> None: ...


@dataclass(frozen=True)
class Choice:
    """A token and, where they were asked for, log-probabilities under the model's own
    distribution (or the tempered one): its own and the likeliest ones', (id, log-probability),
    equal ones by lower id."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplingState:
    """One answer in the making, as sampling sees it. Preemption does not touch it, and it is a
    function of (settings, tokens, seed): made anew from them it is the same.

    Args:
        prompt_ids: the prompt; read for the repetition penalty alone.
        end_ids: the model's end tokens.
        index: which of the request's answers this is (of n or best_of).
        grammar: kept in step with the tokens from here on.
        output_ids: tokens that were already chosen (the grammar has accepted them).
        drawn: how many numbers of the stream were used before, by an answer that this one goes on
            with; its tokens are in the prompt.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] = (), *,
                 end_ids: Iterable[int] = (), index: int = 0, grammar: TokenMask | None = None,
                 output_ids: Sequence[int] = (), drawn: int = 0) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.grammar = grammar
        self.generated = len(output_ids)
        self._drawn = drawn
        self._key = stream_key(self.seed, index)
        self._ends = np.array(sorted({*end_ids, *params.stop_token_ids}), dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._history = None
        if params.penalised:
            seen = prompt_ids if params.repetition_penalty != 1 else ()
            self._history = _TokenCounts(seen)
            for token in output_ids:
                self._history.add(token)

    def accept(self, token: int) -> None:
        """The answer goes on with this token.

        Raises:
            SamplingError: if the grammar cannot be followed any further; the token counts.
        """
        self.generated += 1
        if self._history is not None:
            self._history.add(token)
        if self.grammar is not None:
            try:
                self.grammar.accept(token)
            except ValueError as error:
                raise SamplingError(str(error)) from error

    @property
    def finished(self) -> bool:
        """Whether the grammar has ended the answer, also where ``ignore_eos`` is set."""
        return self.grammar is not None and self.grammar.is_finished

    @property
    def untouched(self) -> bool:
        """Whether the next choice is made from the raw logits."""
        return (self._history is None and self.grammar is None and not self._bias_ids.size
                and self.generated >= self.params.min_tokens)

    def processed(self, logits_V: np.ndarray) -> np.ndarray:
        """The float32 row after biases, penalties and masks; the given one is not changed.

        Raises:
            SamplingError: if the grammar cannot be followed any further.
        """
        if self.untouched:
            return logits_V
        row_V = logits_V.copy()
        row_V[self._bias_ids] += self._bias
        if self._history is not None:
            self._history.penalise(row_V, self.params)
        if self.grammar is not None:
            try:
                self.grammar.mask(row_V)
            except ValueError as error:
                raise SamplingError(str(error)) from error
        if self.generated < self.params.min_tokens and self._ends.size:
            ends = row_V[self._ends]
            row_V[self._ends] = -np.inf
            if self.grammar is not None and row_V.max() == -np.inf:
                row_V[self._ends] = ends  # a grammar that can only end does, however early
        return row_V

    def choose(self, logits_V: np.ndarray) -> int:
        """The next token, from a float32 row of raw logits.

        Raises:
            SamplingError: if nothing may be chosen, or the logits are broken.
        """
        return sample(self.processed(logits_V), self.params, self._key,
                      self._drawn + self.generated)


class _TokenCounts:
    """How often each token came, kept up to date one token at a time, in arrays that index a row
    of logits. Tokens of the prompt are there with a count of zero."""

    def __init__(self, seen: Sequence[int]) -> None:
        ids = np.unique(np.asarray(seen, dtype=np.int64))
        self._size = ids.size
        self._ids = np.concatenate((ids, np.zeros(64, dtype=np.int64)))
        self._counts = np.zeros(self._ids.size, dtype=np.float32)
        self._place = {int(token): i for i, token in enumerate(ids)}

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == self._ids.size:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    def penalise(self, row_V: np.ndarray, params: SamplingParams) -> None:
        ids, counts = self._ids[:self._size], self._counts[:self._size]
        values = row_V[ids]
        if (penalty := params.repetition_penalty) != 1:
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= counts * params.frequency_penalty
        values -= (counts > 0) * np.float32(params.presence_penalty)
        row_V[ids] = values


# ---- a step of many requests ----

def choose(logits_SV: Tensor, states: Sequence[SamplingState], ops: Ops
           ) -> list[Choice | SamplingError]:
    """The next token of each request. No state is changed: call ``accept`` for tokens you keep.

    Args:
        logits_SV: raw float32 logits, on any device; not changed.
        ops: `ops.argmax` chooses for greedy requests that ask for nothing else; log-probabilities
            come from `ops.token_logprobs` and `ops.log_softmax`.

    Returns:
        For each request a choice, or the error that ends this request alone.
    """
    results: dict[int, Choice | SamplingError] = {}
    plain = [s for s, state in enumerate(states) if state.params.greedy and state.untouched]
    if plain:
        tokens_S = ops.argmax(logits_SV)
        tokens = tokens_S.tolist()
        largest = logits_SV.gather(1, tokens_S[:, None])[:, 0].tolist()
        for s in plain:
            results[s] = Choice(tokens[s]) if math.isfinite(largest[s]) else _broken(largest[s])
    others = sorted(set(range(len(states))).difference(plain))
    if others:
        rows = _rows(logits_SV, others).cpu().numpy()
        for row_V, s in zip(rows, others, strict=True):
            try:
                results[s] = Choice(states[s].choose(row_V))
            except SamplingError as error:
                results[s] = error
    # Alternatives need the whole distribution, which is not computed for the other requests.
    asking: dict[bool, list[tuple[int, Choice, int]]] = {False: [], True: []}
    for s, state in enumerate(states):
        result = results[s]
        if state.params.logprobs is not None and isinstance(result, Choice):
            asking[state.params.logprobs > 0].append((s, result, state.params.logprobs))
    for group in filter(None, asking.values()):
        index, choices, tops = zip(*group, strict=True)
        rows_SV = _tempered_rows(_rows(logits_SV, list(index)), [states[s].params for s in index])
        scored = score_tokens(rows_SV, [c.token_id for c in choices], tops, ops)
        for s, choice in zip(index, scored, strict=True):
            results[s] = choice
    return [results[s] for s in range(len(states))]


def score_tokens(logits_TV: Tensor, tokens: Sequence[int], tops: Sequence[int], ops: Ops
                 ) -> list[Choice]:
    """Tokens with their log-probabilities and those of the ``tops[t]`` likeliest: for chosen tokens
    and, with the rows of a prompt's positions and its next tokens, for prompt_logprobs.

    Args:
        logits_TV: raw float32 logits; row t is the distribution that token t is from.
    """
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=logits_TV.device)
    if not any(tops):
        logprobs = ops.token_logprobs(logits_TV, tokens_T).tolist()
        return [Choice(token, p) for token, p in zip(tokens, logprobs, strict=True)]
    logprobs_TV = ops.log_softmax(logits_TV).cpu().numpy()  # the same bits as token_logprobs
    results = []
    for row_V, logits_V, token, top in zip(logprobs_TV, logits_TV.cpu().numpy(), tokens, tops,
                                           strict=True):
        ids = _likeliest(logits_V, top)
        ids = ids[np.argsort(-logits_V[ids], kind="stable")]
        results.append(Choice(token, float(row_V[token]),
                              tuple(zip(ids.tolist(), row_V[ids].tolist(), strict=True))))
    return results


def best_answers(logprobs: Sequence[float], lengths: Sequence[int], n: int) -> list[int]:
    """Which n of best_of answers to give: those of the highest log-probability per token, best
    first, equal ones in order.

    Args:
        logprobs: each answer's summed log-probability; lengths: its tokens.
    """
    means = [total / max(length, 1) for total, length in zip(logprobs, lengths, strict=True)]
    return sorted(range(len(means)), key=lambda i: -means[i])[:n]


def _rows(logits_SV: Tensor, index: list[int]) -> Tensor:
    if len(index) == logits_SV.shape[0]:
        return logits_SV
    return logits_SV[torch.tensor(index, device=logits_SV.device)]


def _tempered_rows(logits_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The rows that log-probabilities are of."""
    temperatures = [p.temperature if p.tempered_logprobs else 1.0 for p in params]
    if all(t == 1.0 for t in temperatures):
        return logits_SV
    return tempered(logits_SV, torch.tensor(temperatures, dtype=torch.float32,
                                            device=logits_SV.device)[:, None])


# ---- one row ----

def stream_key(seed: int, index: int) -> int:
    """The key of the random stream of a request's answer ``index``: seed + index · 2**64, so no two
    answers of any requests with different seeds share one, and answer 0 is that of n = 1."""
    return seed + (index << 64)


def uniform(seed: int, step: int) -> float:
    """The step-th number in [0, 1) of a seed's stream (Philox4x64, key = seed, up to 128 bits,
    counter = step)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=step)).random())


def sample(logits_V: np.ndarray, params: SamplingParams, seed: int, step: int) -> int:
    """One token of a row: inverse transform, in id order, of the seed's step-th number.

    Raises:
        SamplingError: if the logits hold NaN or no finite value.
    """
    ids, weights = _candidates(logits_V, params)
    at = 0 if weights.size == 1 else _reach(weights, uniform(seed, step), "right")
    return at if ids is None else int(ids[at])


def sampling_distribution(logits_V: np.ndarray, params: SamplingParams
                          ) -> tuple[np.ndarray, np.ndarray]:
    """(token ids in ascending order, probabilities summing to 1): temperature, then top-k, top-p
    and min-p. A greedy setting gives one token. Probabilities are good to some 1e-6, relative.

    Raises:
        SamplingError: if the logits hold NaN or no finite value.
    """
    ids, weights = _candidates(logits_V, params)
    probs = weights.astype(np.float64)
    return np.arange(logits_V.size) if ids is None else ids, probs / probs.sum()


def _candidates(logits_V: np.ndarray, params: SamplingParams
                ) -> tuple[np.ndarray | None, np.ndarray]:
    """(ids that may be chosen, ascending, None for all; float32 weights, the largest 1)."""
    top = logits_V.max()
    if not np.isfinite(top):
        raise _broken(float(top))
    if params.greedy:
        return np.array([int(logits_V.argmax())]), np.ones(1, dtype=np.float32)
    ids = None
    if 0 < params.top_k < logits_V.size:
        ids = _likeliest(logits_V, params.top_k)
    with np.errstate(over="ignore", under="ignore"):  # what is far below the top has weight 0
        weights = np.subtract(logits_V if ids is None else logits_V[ids], top)
        weights /= np.float32(params.temperature)
        np.exp(weights, out=weights)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _reach(weights: np.ndarray, share: float, side: Literal["left", "right"]) -> int:
    """Where the running sum of the weights reaches ("left") or passes ("right") this share of the
    whole. Sums of blocks come first: a running sum over a vocabulary is slow."""
    whole = weights.size - weights.size % _BLOCK
    sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1)
    passed = np.cumsum(np.append(sums, weights[whole:].sum()), dtype=np.float64)
    target = share * passed[-1]
    block = min(int(np.searchsorted(passed, target, side)), passed.size - 1)
    inner = weights[block * _BLOCK:(block + 1) * _BLOCK]
    before = passed[block - 1] if block else 0.0
    at = int(np.searchsorted(np.cumsum(inner, dtype=np.float64), target - before, side))
    # Where rounding leaves the block short of the target: never a token without weight, which may
    # be a forbidden one.
    return block * _BLOCK + (at if at < inner.size else int(np.flatnonzero(inner)[-1]))


def _broken(top: float) -> SamplingError:
    return SamplingError(
        f"The logits hold no finite maximum (it is {top}): the model's weights or its input are "
        f"broken, or the grammar and the settings together allow no token.")


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Where the ``count`` largest values are, ascending; of equal ones the first."""
    if count >= values.size:
        return np.arange(values.size)
    if count == 0:
        return np.arange(0)
    bound = np.partition(values, -count)[-count]
    return _down_to(values, bound, count - int(np.count_nonzero(values > bound)))


def _nucleus(weights: np.ndarray, share: float) -> np.ndarray:
    """Where the fewest largest weights are that reach this share of their sum, ascending; of equal
    ones the first."""
    mass = share * float(weights.sum())
    floor = 0.125  # mostly a few weights hold the mass, so not all are sorted
    pool = np.compress(weights > floor, weights)
    while float(pool.sum()) < mass and floor > _TINY:
        floor /= 8
        pool = np.compress(weights > floor, weights)
    pool = -np.sort(-pool)
    last = _reach(pool, mass / float(pool.sum()), "left")
    return _down_to(weights, pool[last], int(np.count_nonzero(pool[:last + 1] == pool[last])))


def _down_to(values: np.ndarray, bound: np.floating, ties: int) -> np.ndarray:
    """Where values are above the bound, and the first ``ties`` that equal it, ascending."""
    keep = values > bound
    keep[np.flatnonzero(values == bound)[:ties]] = True
    return np.flatnonzero(keep)
