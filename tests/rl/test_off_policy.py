"""Off-policy corrections: golden numbers, bounds, and 1 where there is nothing to correct."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kilter.rl.off_policy import (
    banded_weights,
    effective_sample_share,
    geometric_ratios,
    geometric_weights,
    mismatch,
    truncated_weights,
)
from tests.rl.flat import GOLDEN, Step

CASE = GOLDEN["off_policy_weights"]


def golden() -> dict[str, Any]:
    """With a masked NaN behind."""
    old = torch.tensor([*CASE["log_ratios"], torch.nan], dtype=torch.float64)
    return {"old_logprobs_T": old - 3.0, "mask_T": torch.tensor([True] * 4 + [False]),
            "behaviour_T": torch.tensor([-3.0] * 4 + [torch.nan], dtype=torch.float64)}


def test_golden_weights() -> None:
    cases = {"raw": truncated_weights(**golden(), cap=1e9),
             "tis_cap2": truncated_weights(**golden(), cap=2.0),
             "mis_band_05_2": banded_weights(**golden(), low=0.5, high=2.0),
             "icepop_band_05_5": banded_weights(**golden(), low=0.5, high=5.0)}
    for name, found in cases.items():
        assert found.tolist() == pytest.approx([*CASE[name], 0.0], abs=1e-6), name


def test_golden_geometric_mean() -> None:
    where = {**golden(), "sequence_T": torch.zeros(5, dtype=torch.int64), "num_seqs": 1}
    assert geometric_ratios(**where).tolist() == pytest.approx(
        [CASE["sequence_geometric_mean"]], abs=1e-6)
    assert geometric_weights(**where, low=0.5, high=1.29).tolist() == [1, 1, 1, 1, 0]
    assert geometric_weights(**where, low=0.5, high=1.28).tolist() == [0] * 5


def test_sequences_are_judged_one_by_one() -> None:
    step = Step.random(1)
    old, behaviour = step.values(2), step.values(3)
    found = geometric_ratios(old_logprobs_T=old, behaviour_T=behaviour, mask_T=step.mask_T,
                             sequence_T=step.sequence_T, num_seqs=step.num_seqs)
    expected = [float((old - behaviour)[step.actions(s)].mean().exp()) for s in range(8)]
    assert found.tolist() == pytest.approx(expected)


def test_equal_policies_need_no_correction() -> None:
    step = Step.random(4)
    x = step.values(5, torch.float32)
    same: dict[str, Any] = {"old_logprobs_T": x, "behaviour_T": x.clone(), "mask_T": step.mask_T}
    for found in (truncated_weights(**same, cap=2.0), banded_weights(**same, low=1.0, high=1.0),
                  geometric_weights(**same, sequence_T=step.sequence_T, num_seqs=8, low=1.0,
                                    high=1.0)):
        assert torch.equal(found, step.mask_T.float())
    assert mismatch(**same) == {"mean": 0.0, "max": 0.0, "differing": 0}
    assert effective_sample_share(step.mask_T.float(), mask_T=step.mask_T) == 1.0


def test_mismatch_and_share_by_hand() -> None:
    case = golden()
    assert mismatch(**case) == pytest.approx({"mean": 2.4 / 4, "max": 1.2, "differing": 3})
    share = effective_sample_share(torch.tensor([2.0, 0.0, torch.nan]),
                                   mask_T=torch.tensor([True, True, False]))
    assert share == 0.5
    empty = torch.zeros(1, dtype=torch.bool)
    assert effective_sample_share(torch.zeros(1), mask_T=empty) == 0.0
    assert mismatch(old_logprobs_T=torch.zeros(1), behaviour_T=torch.zeros(1),
                    mask_T=empty)["max"] == 0.0


def test_no_gradient_flows() -> None:
    case = {**golden(), "old_logprobs_T": golden()["old_logprobs_T"].requires_grad_()}
    assert not truncated_weights(**case, cap=2.0).requires_grad


def test_what_cannot_be_is_refused() -> None:
    case = golden()
    with pytest.raises(ValueError, match="cap is 0"):
        truncated_weights(**case, cap=0.0)
    for low, high in ((1.5, 2.0), (0.1, 0.9), (-1.0, 2.0)):
        with pytest.raises(ValueError, match="must hold 1"):
            banded_weights(**case, low=low, high=high)
    with pytest.raises(ValueError, match="arguments swapped"):
        banded_weights(**{**case, "mask_T": case["behaviour_T"]}, low=0.5, high=2.0)
