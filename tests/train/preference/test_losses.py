"""Losses of pairs: against loops, hand-computed numbers and what is known of their ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kilter.train.preference.losses import bradley_terry, dpo
from tests.rl.flat import GOLDEN, gradient, leaf


def pairs(seed: int) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(seed)
    names = ("chosen_P", "rejected_P", "ref_chosen_P", "ref_rejected_P")
    return {name: -20 * torch.rand(6, generator=chance, dtype=torch.float64) for name in names}


def test_golden_dpo() -> None:
    case = GOLDEN["dpo"]
    chosen, rejected, ref_chosen, ref_rejected = (
        torch.tensor([float(x)], dtype=torch.float64)
        for x in (*case["policy"], *case["reference"]))
    found = dpo(chosen_P=chosen, rejected_P=rejected, ref_chosen_P=ref_chosen,
                ref_rejected_P=ref_rejected, beta=case["beta"])
    assert float(found.margins_P) == pytest.approx(case["margin"])
    assert float(found.losses_P) == pytest.approx(case["loss"], abs=1e-6)


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_dpo_and_its_gradient_are_those_of_loops(kind: Any, smoothing: float) -> None:
    data, beta = pairs(1), 0.3
    mine, theirs = leaf(data["chosen_P"]), leaf(data["chosen_P"])
    found = dpo(**{**data, "chosen_P": mine}, beta=beta, kind=kind, label_smoothing=smoothing)
    terms = []
    for i in range(6):
        h = theirs[i] - data["ref_chosen_P"][i] - data["rejected_P"][i] + data["ref_rejected_P"][i]
        right = 1 / (1 + torch.exp(-beta * h))
        terms.append((h - 1 / (2 * beta)) ** 2 if kind == "ipo" else
                     -(1 - smoothing) * torch.log(right) - smoothing * torch.log(1 - right))
    expected = torch.stack(terms)
    assert torch.allclose(found.losses_P, expected)
    assert torch.allclose(gradient(found.losses_P.sum(), mine), gradient(expected.sum(), theirs))


def test_dpo_at_the_start_is_log_two_and_ipo_ends_at_its_gap() -> None:
    data = pairs(2)
    data |= {"ref_chosen_P": data["chosen_P"], "ref_rejected_P": data["rejected_P"]}
    assert dpo(**data, beta=0.1).losses_P.tolist() == pytest.approx([math.log(2)] * 6)
    data["ref_chosen_P"] = data["chosen_P"] - 5.0  # 1 / (2β)
    assert dpo(**data, beta=0.1, kind="ipo").losses_P.tolist() == pytest.approx([0.0] * 6)


def test_dpo_is_finite_far_out_and_the_reference_is_fixed() -> None:
    data = pairs(3)
    data["chosen_P"] = leaf(data["chosen_P"] - 1e5)
    data["ref_chosen_P"] = leaf(data["ref_chosen_P"])
    loss = dpo(**data, beta=1.0).losses_P.sum()
    loss.backward()
    assert math.isfinite(loss.item()) and data["chosen_P"].grad.tolist() == [-1.0] * 6
    assert data["ref_chosen_P"].grad is None


def test_bradley_terry_is_the_log_odds() -> None:
    chosen, rejected = leaf(torch.tensor([2.0, -1.0])), torch.tensor([0.5, 1.0])
    plain = bradley_terry(chosen_P=chosen, rejected_P=rejected)
    assert plain.losses_P.tolist() == pytest.approx(
        [-math.log(1 / (1 + math.exp(-1.5))), -math.log(1 / (1 + math.exp(2.0)))], rel=1e-6)
    assert plain.margins_P.tolist() == [1.5, -2.0]
    assert gradient(plain.losses_P.sum(), chosen).tolist() == pytest.approx(
        [1 / (1 + math.exp(-1.5)) - 1, 1 / (1 + math.exp(2.0)) - 1])
    wide = bradley_terry(chosen_P=chosen, rejected_P=rejected, margin_P=torch.tensor([1.5, 0.0]))
    assert wide.losses_P.tolist() == pytest.approx([math.log(2), float(plain.losses_P[1].detach())])


def test_what_cannot_be_is_refused() -> None:
    data = pairs(4)
    for options in ({"beta": 0.0}, {"beta": 0.1, "label_smoothing": 0.5},
                    {"beta": 0.1, "kind": "hinge"},
                    {"beta": 0.1, "kind": "ipo", "label_smoothing": 0.1}):
        with pytest.raises(ValueError, match=r"\.$"):
            dpo(**data, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one shape"):
        bradley_terry(chosen_P=torch.zeros(2), rejected_P=torch.zeros(1))
    with pytest.raises(TypeError):
        bradley_terry(torch.zeros(2), torch.zeros(2))  # type: ignore[misc]
