"""What a job says about DPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kilter.train.preference.losses import PreferenceLoss


@dataclass(frozen=True)
class DpoConfig:
    """How answers are compared.

    Attributes:
        beta: how much a difference of log-ratios counts; small values let the model go further
            from where it started.
        loss: ``sigmoid`` (DPO) or ``ipo``.
        label_smoothing: the share of pairs that are taken to be the wrong way around; of
            ``sigmoid``.
    """

    beta: float = 0.1
    loss: PreferenceLoss = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.loss not in get_args(PreferenceLoss):
            problems.append(f"loss is {self.loss!r} but must be one of "
                            f"{', '.join(get_args(PreferenceLoss))}")
        if not self.beta > 0.0:
            problems.append(f"beta is {self.beta} but must be positive")
        if not 0.0 <= self.label_smoothing < 0.5:
            problems.append(f"label_smoothing is {self.label_smoothing} but must be from 0 to "
                            "below 0.5")
        if self.loss == "ipo" and self.label_smoothing:
            problems.append(f"label_smoothing is {self.label_smoothing}, but ipo has none; set it "
                            "to 0")
        if problems:
            raise ValueError(f"DPO cannot be so: {'; '.join(problems)}.")
