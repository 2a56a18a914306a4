"""Masks: what does not count may hold anything, and a mask is a bool."""

from __future__ import annotations

import pytest
import torch

from kilter.rl.masks import (
    check_mask,
    only,
    sequence_counts,
    sequence_means,
    sequence_sums,
    to_tokens,
)
from tests.rl.flat import Step, gradient, leaf


def test_sums_per_sequence_are_loops() -> None:
    step = Step.random(1)
    x = step.values(2)
    where = {"mask_T": step.mask_T, "sequence_T": step.sequence_T, "num_seqs": step.num_seqs}
    lists = [[float(x[t]) for t in step.actions(s)] for s in range(step.num_seqs)]
    assert sequence_sums(x, **where).tolist() == pytest.approx([sum(v) for v in lists])
    assert sequence_means(x, **where).tolist() == pytest.approx([sum(v) / len(v) for v in lists])
    assert sequence_counts(**where).tolist() == [len(v) for v in lists]


def test_a_sequence_without_tokens_that_count_is_zero() -> None:
    step = Step.of([[0, 0], [0, 1]])
    x = torch.tensor([torch.nan, torch.nan, torch.nan, 3.0])
    where = {"mask_T": step.mask_T, "sequence_T": step.sequence_T, "num_seqs": 2}
    assert sequence_means(x, **where).tolist() == [0.0, 3.0]
    assert to_tokens(torch.tensor([torch.nan, 2.0]), mask_T=step.mask_T,
                     sequence_T=step.sequence_T).tolist() == [0.0, 0.0, 0.0, 2.0]


def test_no_gradient_comes_back_poisoned() -> None:
    mask = torch.tensor([True, False])
    x = leaf(torch.tensor([2.0, torch.nan]))
    assert gradient(only(x, mask).exp().sum(), x)[1] == 0.0


def test_a_mask_of_another_kind_is_refused() -> None:
    values = torch.zeros(3)
    with pytest.raises(ValueError, match="were two arguments swapped"):
        check_mask(values, values=values)
    with pytest.raises(ValueError, match="give one value per slot"):
        check_mask(torch.zeros(3, dtype=torch.bool), values=torch.zeros(4))
