"""The gate: does the trainer give every sampled token the probability it was sampled with?

On the exact path the answer is yes, bit for bit, and the loop checks it at every step: a difference
means that the two computed with other weights, another precision or another temperature, and ratios
of probabilities would be wrong from there on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.objects import gather_objects
from kilter.rl.experience import Experience


class Disagreement(RuntimeError):
    """Rollout and trainer do not compute the same policy."""


@dataclass(frozen=True)
class Agreement:
    """How far the trainer's log-probabilities are from the rollout's.

    Attributes:
        max_abs: the largest difference, nats; infinite where one of the two is not a number.
        total_abs: the sum of all.
        count: actions that were compared.
        skipped: actions that were sampled with other weights than the trainer's.
        worst: of the largest difference: (sample id, position in its sequence, the rollout's
            log-probability, the trainer's); None where all are equal.
    """

    max_abs: float
    total_abs: float
    count: int
    skipped: int = 0
    worst: tuple[str, int, float, float] | None = None

    @property
    def mean_abs(self) -> float:
        return self.total_abs / self.count if self.count else 0.0

    @property
    def exact(self) -> bool:
        return self.max_abs == 0.0

    def check(self) -> None:
        """Raises `Disagreement` unless all are the same bits."""
        if self.exact:
            return
        assert self.worst is not None
        sample, position, rollout, trainer = self.worst
        raise Disagreement(
            f"Rollout and trainer disagree by up to {self.max_abs:.3g} nats over {self.count} "
            f"tokens (mean {self.mean_abs:.3g}), most at token {position} of sample {sample!r}: "
            f"the rollout says {rollout!r}, the trainer {trainer!r}. On the exact path both are "
            "the same bits if precision, kv_dtype, temperature and adapters are set alike and the "
            "rollout has the trainer's present weights; look there, or turn the check off where "
            "exact = false.")

    @staticmethod
    def of(parts: Iterable[Agreement]) -> Agreement:
        """That of all of them."""
        every = list(parts)
        largest = max((a.max_abs for a in every), default=0.0)
        return Agreement(
            largest, sum(a.total_abs for a in every), sum(a.count for a in every),
            sum(a.skipped for a in every),
            next((a.worst for a in every if a.worst and a.max_abs == largest), None))

    def over(self, axis: Axis) -> Agreement:
        """That of all the axis' ranks, which all call."""
        if axis.size == 1:
            return self
        return Agreement.of(gather_objects(self, axis))


def agreement(experience: Experience, trainer_logprobs_T: Tensor, *, version: int | None = None
              ) -> Agreement:
    """Compares an experience's behaviour log-probabilities with a trainer's.

    Args:
        trainer_logprobs_T: float32 [T], as `kilter.rl.scoring.score` gives them; read at actions.
        version: the trainer's weights. Actions sampled with others, by an answer that was
            interrupted, are another policy's and are left out; None compares all.

    Raises:
        ValueError: if there is not one log-probability per token.
    """
    if trainer_logprobs_T.shape != (experience.num_tokens,):
        raise ValueError(f"The experience has {experience.num_tokens} tokens, but the trainer's "
                         f"log-probabilities are {list(trainer_logprobs_T.shape)}; give one per "
                         "token.")
    compared_T = experience.is_action_T
    if version is not None:
        compared_T = compared_T & (experience.version_T == version)
    place_N = compared_T.nonzero()[:, 0]
    skipped = experience.num_actions - len(place_N)
    if not len(place_N):
        return Agreement(0.0, 0.0, 0, skipped)
    ours_N = experience.logprobs_T[place_N].double()
    theirs_N = trainer_logprobs_T.detach().cpu()[place_N].double()
    gaps_N = (ours_N - theirs_N).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    largest = float(gaps_N.max())
    worst = None
    if largest > 0.0:
        i = int(gaps_N.argmax())
        t = int(place_N[i])
        sequence = int(experience.sequence_T[t])
        worst = (experience.ids[sequence], t - int(experience.cu_seqlens_S1[sequence]),
                 float(ours_N[i]), float(theirs_N[i]))
    return Agreement(largest, float(gaps_N.sum()), len(place_N), skipped, worst)
