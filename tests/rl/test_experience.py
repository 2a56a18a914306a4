"""Experience: what goes in comes out, the two alignments, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilter.rl.experience import IGNORE, Experience, Rollout

NAN = math.nan
TOOL = Rollout([5, 6, 7, 8, 9, 10], [False, False, True, True, False, True],
               [NAN, NAN, -0.1, -0.2, NAN, -0.3], [-1, -1, 7, 7, -1, 8], 0, "stop", "a",
               {"right": 1.0, "format": 0.5})
SHORT = Rollout([5, 11, 12], [False, True, True], [NAN, -1.5, 0.0], [-1, 7, 7], 0, "length", "b",
                {"right": 0.0, "format": 0.25})
EMPTY = Rollout([4], [False], [NAN], [-1], 3, "abort", "c", {"right": 0.0, "format": 0.0})


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    count = draw(st.integers(1, 5))
    made = []
    for i in range(count):
        actions = [False, *draw(st.lists(st.booleans(), max_size=6))]
        logprob = st.floats(-50.0, 0.0, width=32)
        made.append(Rollout(
            [draw(st.integers(0, 2**31)) for _ in actions], actions,
            [draw(logprob) if a else NAN for a in actions],
            [draw(st.integers(0, 9)) if a else -1 for a in actions], draw(st.integers(0, 3)),
            draw(st.sampled_from(["stop", "length", "abort"])), f"{i}",
            {"r": draw(st.floats(-5, 5, width=32))}))
    return made


def plain(rollout: Rollout) -> tuple[Any, ...]:
    """With None for NaN, which equals nothing."""
    return (list(rollout.tokens), list(rollout.is_action),
            [None if math.isnan(x) else x for x in rollout.logprobs], list(rollout.versions),
            rollout.group, rollout.finish, rollout.id, dict(rollout.rewards))


def same(a: Experience, b: Experience) -> bool:
    return [plain(r) for r in a.to_rollouts()] == [plain(r) for r in b.to_rollouts()]


def nan_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(99), b.nan_to_num(99))


@settings(deadline=None)
@given(rollouts())
def test_records_come_back(made: list[Rollout]) -> None:
    assert [plain(r) for r in Experience.of(made).to_rollouts()] == [plain(r) for r in made]


@settings(deadline=None)
@given(rollouts(), st.data())
def test_select_and_concat_are_those_of_lists(made: list[Rollout], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(made))))
    cut = data.draw(st.integers(1, len(made)))
    e = Experience.of(made)
    parts = [e.select(part) for part in (order[:cut], order[cut:]) if part]
    assert [p.ids for p in parts[:1]] == [tuple(made[i].id for i in order[:cut])]
    assert same(Experience.concat(parts), Experience.of([made[i] for i in order]))


@settings(deadline=None, max_examples=20)
@given(rollouts())
def test_a_file_holds_it_bit_for_bit(tmp_path_factory: pytest.TempPathFactory,
                                     made: list[Rollout]) -> None:
    path = tmp_path_factory.mktemp("e") / "e.safetensors"
    e = Experience.of(made)
    e.save(path)
    assert same(Experience.load(path), e)
    assert [p.name for p in path.parent.iterdir()] == ["e.safetensors"]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"not a file of ours")
    with pytest.raises(ValueError, match="is not an experience"):
        Experience.load(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        Experience.load(tmp_path / "y.safetensors")


def test_what_it_knows() -> None:
    e = Experience.of([TOOL, SHORT, EMPTY])
    assert (e.num_tokens, e.num_seqs, e.num_actions) == (10, 3, 5)
    assert e.lengths.tolist() == [6, 3, 1]
    assert e.cu_seqlens_S1.tolist() == [0, 6, 9, 10]
    assert e.sequence_T.tolist() == [0] * 6 + [1] * 3 + [2]
    assert e.complete_S.tolist() == [True, True, False]
    assert e.truncated_S.tolist() == [False, True, False]
    assert e.version_T.dtype == torch.int32 and e.group_S.tolist() == [0, 0, 3]


def test_targets_are_the_next_actions_and_never_cross_sequences() -> None:
    e = Experience.of([TOOL, SHORT, EMPTY])
    x = IGNORE
    assert e.targets().tolist() == [x, 7, 8, x, 10, x, 11, 12, x, x]


@settings(deadline=None)
@given(rollouts())
def test_targets_by_brute_force(made: list[Rollout]) -> None:
    expected = [r.tokens[t + 1] if t + 1 < len(r.tokens) and r.is_action[t + 1] else IGNORE
                for r in made for t in range(len(r.tokens))]
    assert Experience.of(made).targets().tolist() == expected


@settings(deadline=None)
@given(rollouts())
def test_alignments_undo_each_other_at_actions(made: list[Rollout]) -> None:
    e = Experience.of(made)
    there = e.at_rows(e.logprobs_T)
    assert torch.equal(there.isfinite(), e.targets() != IGNORE)
    assert nan_equal(e.at_actions(there), e.logprobs_T)
    assert torch.equal(e.at_actions(e.at_rows(e.is_action_T)), e.is_action_T)
    assert torch.equal(e.at_actions(e.at_rows(e.version_T)), e.version_T)


def test_alignments_carry_gradients() -> None:
    e = Experience.of([SHORT, EMPTY])
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    moved = e.at_actions(rows)
    kept = torch.where(e.is_action_T, moved, 0.0)
    (kept * torch.tensor([1.0, 10.0, 100.0, 1.0])).sum().backward()
    assert moved.isnan().tolist() == [True, False, False, True]
    assert rows.grad is not None and rows.grad.tolist() == [10.0, 100.0, 0.0, 0.0]


def test_rewards_are_summed_by_weight() -> None:
    e = Experience.of([TOOL, SHORT])
    assert e.reward_S().tolist() == [1.5, 0.25]
    assert e.reward_S({"right": 2.0, "format": -4.0}).tolist() == [0.0, -1.0]
    assert e.with_reward("extra", [3.0, 4.0]).reward_S().tolist() == [4.5, 4.25]
    with pytest.raises(ValueError, match="name each"):
        e.reward_S({"right": 1.0})
    with pytest.raises(ValueError, match="name each"):
        e.reward_S({"right": 1.0, "format": 1.0, "rigth": 1.0})


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], 1.0, [[1.0, 2.0]]])
def test_a_reward_is_never_broadcast(values: Any) -> None:
    with pytest.raises(ValueError, match="give one value for each"):
        Experience.of([TOOL, SHORT]).with_reward("x", values)


@pytest.mark.parametrize(("change", "message"), [
    ({"is_action": [True, True, True]}, "nothing comes before it"),
    ({"logprobs": [NAN, NAN, -1.0]}, "'b': token 1 was sampled, but its log-prob.* not finite"),
    ({"logprobs": [NAN, -1.0, 0.5]}, "above 0"),
    ({"logprobs": [0.0, -1.0, -1.0]}, "must be NaN"),
    ({"versions": [-1, 3, -1]}, "version is negative"),
    ({"versions": [0, 3, 3]}, "must be -1"),
    ({"tokens": [1, -2, 3]}, "negative id"),
    ({"finish": "eos"}, "eos"),
    ({"id": "a"}, "comes twice"),
    ({"tokens": [1, 2]}, "has 2 tokens, 3 is_action"),
    ({"rewards": {"right": 1.0}}, "reward parts"),
    ({"rewards": {"right": NAN, "format": 0.0}}, "nan but must be finite"),
    ({"tokens": [], "is_action": [], "logprobs": [], "versions": []}, "at least one token"),
])
def test_what_is_wrong_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experience.of([TOOL, replace(SHORT, **change)])


def test_wrong_tensors_are_refused() -> None:
    e = Experience.of([TOOL, SHORT])
    with pytest.raises(ValueError, match=r"tokens_T is torch\.int32"):
        replace(e, tokens_T=e.tokens_T.int())
    with pytest.raises(ValueError, match=r"is_action_T is torch\.float32"):
        replace(e, is_action_T=e.is_action_T.float())
    with pytest.raises(ValueError, match="must lead from 0 to the 9 tokens"):
        replace(e, cu_seqlens_S1=torch.tensor([0, 6, 8], dtype=torch.int32))
    with pytest.raises(ValueError, match="finish has 1 reasons"):
        replace(e, finish=("stop",))
    with pytest.raises(ValueError, match="give one per token"):
        e.at_rows(torch.zeros(3))


def test_nothing_is_no_experience() -> None:
    e = Experience.of([TOOL, SHORT])
    for empty in (lambda: Experience.of([]), lambda: Experience.concat([]), lambda: e.select([]),
                  lambda: e.select([2]), lambda: e.select([0, 0]),
                  lambda: Experience.concat([e, e])):
        with pytest.raises(ValueError, match=r"\.$"):
            empty()
