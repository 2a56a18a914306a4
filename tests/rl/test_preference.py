"""Which pairs samples make; the losses of pairs are tested in tests/train/preference."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.rl.preference import preference_pairs


def test_online_pairs_of_two_samples() -> None:
    reward = torch.tensor([0.0, 1.0, 2.0, 1.0, 5.0, 5.0, 7.0, 1.0])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    valid = torch.tensor([True] * 7 + [False])
    chosen, rejected = preference_pairs(reward_S=reward, group_S=group, valid_S=valid)
    assert (chosen.tolist(), rejected.tolist()) == ([1, 2], [0, 3])
    none, _ = preference_pairs(reward_S=reward[4:6], group_S=group[4:6], valid_S=valid[4:6])
    assert none.tolist() == [] and none.dtype == torch.int64


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1))
def test_pairs_are_best_and_worst_of_one_group(rows: list[tuple[int, int, bool]]) -> None:
    group, reward, valid = (torch.tensor(column) for column in zip(*rows, strict=True))
    chosen, rejected = preference_pairs(reward_S=reward.float(), group_S=group, valid_S=valid)
    ok: dict[int, list[int]] = {}
    for g, r, v in rows:
        if v:
            ok.setdefault(g, []).append(r)
    expected = {g: (max(r), min(r)) for g, r in ok.items() if max(r) > min(r)}
    found = {rows[c][0]: (rows[c][1], rows[r][1])
             for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)}
    assert found == expected and len(chosen) == len(expected)
    assert all(rows[i][2] for i in [*chosen.tolist(), *rejected.tolist()])
