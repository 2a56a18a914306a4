"""Losses of pairs, one better than the other: DPO (arXiv 2305.18290), IPO (2310.12036), and the
reward model's (Bradley–Terry). Pure functions of what models say of P pairs.

A sequence's log-probability is the sum over its answer's tokens, undivided by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceLoss = Literal["sigmoid", "ipo"]


@dataclass(frozen=True)
class PairLosses:
    """Attributes:
        losses_P: float [P], one per pair, with the gradient.
        margins_P: float [P], without: how much more reward the chosen one has, implicit (β times
            the difference of log-ratios) or modelled. Positive is right.
    """

    losses_P: Tensor
    margins_P: Tensor


def dpo(*, chosen_P: Tensor, rejected_P: Tensor, ref_chosen_P: Tensor, ref_rejected_P: Tensor,
        beta: float, kind: PreferenceLoss = "sigmoid", label_smoothing: float = 0.0) -> PairLosses:
    """With h = (log π − log π_ref of the chosen) − (the same of the rejected):

        sigmoid   −(1 − ε)·log σ(β·h) − ε·log σ(−β·h)
        ipo       (h − 1/(2β))²

    Args:
        chosen_P, rejected_P: the policy's log-probabilities of whole answers; ``ref_…`` the
            reference's, into which no gradient flows.
        label_smoothing: ε, the share of pairs that are taken to be the wrong way around.

    Raises:
        ValueError: for shapes that differ, or settings that cannot be.
    """
    _same_shape(chosen_P, rejected_P, ref_chosen_P, ref_rejected_P)
    if kind not in get_args(PreferenceLoss):
        raise ValueError(f"The preference loss {kind!r} is not known; it must be one of "
                         f"{', '.join(get_args(PreferenceLoss))}.")
    if beta <= 0.0 or not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"beta is {beta} and label_smoothing {label_smoothing}; beta must be "
                         "positive, and label_smoothing from 0 to below 0.5.")
    if kind == "ipo" and label_smoothing:
        raise ValueError(f"label_smoothing is {label_smoothing}, but ipo has none; set it to 0.")
    h_P = (chosen_P - ref_chosen_P.detach()) - (rejected_P - ref_rejected_P.detach())
    if kind == "ipo":
        losses_P = (h_P - 1.0 / (2.0 * beta)).square()
    else:
        losses_P = (-(1.0 - label_smoothing) * logsigmoid(beta * h_P)
                    - label_smoothing * logsigmoid(-beta * h_P))
    return PairLosses(losses_P, (beta * h_P).detach())


def bradley_terry(*, chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None
                  ) -> PairLosses:
    """−log σ(r_chosen − r_rejected − margin), what a reward model learns from.

    Args:
        chosen_P, rejected_P: the model's rewards.
        margin_P: by how much the chosen one should be better at least (2307.09288 §3.2.2).

    Raises:
        ValueError: for shapes that differ.
    """
    _same_shape(chosen_P, rejected_P, *([] if margin_P is None else [margin_P]))
    difference_P = chosen_P - rejected_P
    wanted_P = difference_P if margin_P is None else difference_P - margin_P.detach()
    return PairLosses(-logsigmoid(wanted_P), difference_P.detach())


def _same_shape(first: Tensor, *others: Tensor) -> None:
    shapes = [list(x.shape) for x in (first, *others)]
    if first.dim() != 1 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"Pairs need values of one shape [P], but the shapes are {shapes}.")
