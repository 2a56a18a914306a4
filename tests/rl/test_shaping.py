"""Rules around a reward: golden numbers and limits."""

from __future__ import annotations

import pytest
import torch

from kilter.rl.shaping import missing_eos_penalty, overlong_penalty, staleness_capacity
from tests.rl.flat import GOLDEN


def test_golden_overlong() -> None:
    case = GOLDEN["dapo_overlong"]
    lengths = torch.tensor([int(length) for length in case["penalty"]])
    found = overlong_penalty(lengths, max_length=case["l_max"], cache=case["l_cache"])
    assert found.tolist() == list(case["penalty"].values())
    assert overlong_penalty(torch.tensor([0, 1]), max_length=20, cache=4).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="cache is 30"):
        overlong_penalty(lengths, max_length=20, cache=30)


@pytest.mark.parametrize("case", GOLDEN["staleness_capacity"]["cases"], ids=str)
def test_golden_staleness(case: dict[str, int]) -> None:
    assert staleness_capacity(max_staleness=case["eta"], version=case["version"],
                              batch=case["batch"], accepted=case["accepted"],
                              running=case["running"]) == case["capacity"]


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_capacity_bounds_how_stale_anything_gets(eta: int) -> None:
    """Started as often as allowed, finished in any order, trained on in the order of the starts: no
    sequence is ever more than eta versions old, and some are that old."""
    chance = torch.Generator().manual_seed(eta)
    batch, version, worst = 4, 0, 0
    begun: list[int] = []  # of every sequence, the version it was begun with
    running: list[int] = []
    finished: set[int] = set()
    for _ in range(400):
        room = staleness_capacity(max_staleness=eta, version=version, batch=batch,
                                  accepted=len(finished), running=len(running))
        running += range(len(begun), len(begun) + room)
        begun += [version] * room
        if running:
            finished.add(running.pop(int(torch.randint(len(running), (), generator=chance))))
        step = range(version * batch, (version + 1) * batch)
        if finished.issuperset(step):
            worst = max(worst, *(version - begun[n] for n in step))
            version += 1
    assert worst == eta and version > 50


def test_what_does_not_end_pays() -> None:
    reward, ended = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    assert missing_eos_penalty(reward, ended_S=ended, penalty=0.5).tolist() == [1.0, 0.5]
    with pytest.raises(ValueError, match="must not be negative"):
        missing_eos_penalty(reward, ended_S=ended, penalty=-0.5)
    with pytest.raises(ValueError, match="arguments swapped"):
        missing_eos_penalty(ended, ended_S=reward, penalty=0.5)
    with pytest.raises(ValueError, match="negative"):
        staleness_capacity(max_staleness=-1, version=0, batch=1, accepted=0, running=0)
