"""Learning rates as a function of the step, and of nothing else: no state to save or to lose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "cosine", "linear", "wsd"]


@dataclass(frozen=True)
class ScheduleConfig:
    """A warm-up, then one of four shapes.

    Attributes:
        name: ``constant``; ``cosine`` (arXiv 1608.03983) and ``linear`` fall from the end of the
            warm-up to the end; ``wsd`` (arXiv 2404.06395) is constant and falls linearly over the
            last ``decay_steps``, or what the warm-up leaves of them.
        warmup_steps: steps over which the rate rises linearly; the first step already has one part
            of it. A run of fewer steps ends on its way up.
        decay_steps: of ``wsd``; default a tenth of all steps.
        floor: the rate at the end as a fraction of the peak: the end is what would be the step
            after the last, so that no step is taken in vain where the floor is 0.
    """

    name: ScheduleName = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.name not in ("constant", "cosine", "linear", "wsd"):
            problems.append(f"name is {self.name!r} but must be constant, cosine, linear or wsd")
        if self.warmup_steps < 0:
            problems.append(f"warmup_steps is {self.warmup_steps} but cannot be negative")
        if self.decay_steps is not None and (self.name != "wsd" or self.decay_steps < 1):
            problems.append("decay_steps is for wsd only, and at least 1")
        if not 0.0 <= self.floor <= 1.0:
            problems.append(f"floor is {self.floor} but must be from 0 to 1")
        if problems:
            raise ValueError(f"The learning-rate schedule cannot be so: {'; '.join(problems)}.")

    def factor(self, step: int, steps: int) -> float:
        """What the peak rate is multiplied by in step ``step`` (from 0) of ``steps``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        length = max(1, steps - self.warmup_steps)
        if self.name == "wsd":
            length = min(length, self.decay_steps or max(1, steps // 10))
        done = min(max((step - (steps - length)) / length, 0.0), 1.0)
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.name == "cosine" else 1.0 - done
        return self.floor + (1.0 - self.floor) * left
