"""From logits to a token, by each request's own settings.

A row's choice depends on its logits, its settings and (seed, step) alone: random numbers are
counter-based (Philox), so neighbours, batching and restarts cannot change them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_GREEDY_BELOW = 1e-5  # temperatures under this are taken as zero


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Raises:
        ValueError: listing every setting that is out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the smallest set with at least this probability (1904.09751)
    min_p: float = 0.0  # drop tokens under this fraction of the likeliest one's (2407.01082)
    seed: int | None = None  # None: a fresh one per request
    stop: tuple[str, ...] = ()  # text that ends the answer and is left out of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False  # report the model's log-probability of each chosen token

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 0:
            problems.append(f"max_tokens is {self.max_tokens} but cannot be negative")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(f"temperature is {self.temperature} but must be a finite number, 0 or "
                            f"more")
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k} but must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p} but must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min_p is {self.min_p} but must be in [0, 1]")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            problems.append(f"seed is {self.seed} but must be in [0, 2**64)")
        if any(not s for s in self.stop):
            problems.append("a stop string is empty")
        if problems:
            raise ValueError("These sampling settings cannot be used: " + "; ".join(problems) + ".")

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1


def uniform(seed: int, step: int) -> float:
    """The step-th number in [0, 1) of a seed's stream (Philox4x64, counter = step)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=step)).random())


def sampling_distribution(logits_V: np.ndarray, params: SamplingParams
                          ) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, probabilities summing to 1): temperature, then top-k, top-p and min-p.

    Ids come likeliest first (equal logits by lower id) where a filter needed them sorted, else in
    id order. A greedy setting gives one token.

    Raises:
        ValueError: if the logits hold NaN or no finite value.
    """
    top = logits_V.max()
    if not np.isfinite(top):
        raise ValueError(f"The logits hold no finite maximum (it is {top}); the model's weights or "
                         f"its input are broken.")
    if params.greedy:
        return np.array([int(logits_V.argmax())]), np.ones(1)
    scaled_V = (logits_V.astype(np.float64) - float(top)) / params.temperature
    ids = np.arange(logits_V.shape[0])
    if 0 < params.top_k < ids.size:
        ids = _likeliest(scaled_V, ids, params.top_k)
    weights = np.exp(scaled_V[ids])
    if params.top_p < 1:
        ids, weights = _nucleus(scaled_V, ids, params.top_p * weights.sum())
    if params.min_p > 0:
        keep = weights >= params.min_p  # the likeliest has weight exp(0) = 1
        ids, weights = ids[keep], weights[keep]
    return ids, weights / weights.sum()


def _likeliest(scaled_V: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` likeliest of ``ids``, sorted; equal ones by lower id."""
    if count < ids.size:
        values = scaled_V[ids]
        bound = np.partition(values, -count)[-count]
        ids = np.sort(ids[values >= bound])  # every tie of the last place is still here
    return ids[np.argsort(-scaled_V[ids], kind="stable")][:count]


def _nucleus(scaled_V: np.ndarray, ids: np.ndarray, mass: float) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest ids that together reach ``mass``, and their weights. A short sorted head
    is tried first: sorting a whole vocabulary costs milliseconds."""
    for count in (min(512, ids.size), ids.size):
        head = _likeliest(scaled_V, ids, count)
        weights = np.exp(scaled_V[head])
        reached = int(np.searchsorted(np.cumsum(weights), mass))
        if reached < count:
            break
    keep = min(reached + 1, count)
    return head[:keep], weights[:keep]


def sample(logits_V: np.ndarray, params: SamplingParams, seed: int, step: int) -> int:
    """One token of a row: inverse transform of the seed's step-th random number."""
    ids, probs = sampling_distribution(logits_V, params)
    if ids.size == 1:
        return int(ids[0])
    index = int(np.searchsorted(np.cumsum(probs), uniform(seed, step), side="right"))
    return int(ids[min(index, ids.size - 1)])
