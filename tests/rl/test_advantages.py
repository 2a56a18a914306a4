"""Advantages against golden numbers, their definitions, and what must not matter."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilter.rl.advantages import (
    discounted_returns,
    dr_grpo,
    gae,
    grpo,
    informative,
    moments,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    token_rewards,
    whiten,
)
from kilter.rl.kl import kl_values
from kilter.rl.masks import to_tokens
from tests.rl.flat import GOLDEN, Step

GROUP_RULES = (grpo, dr_grpo, rloo)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def valid(values: Tensor) -> Tensor:
    return torch.ones(len(values), dtype=torch.bool)


def test_golden_gae_with_token_kl() -> None:
    case = GOLDEN["gae_with_token_kl"]
    step = Step.of([[1, 1, 1, 1]])
    kl = kl_values("k1", logprobs_T=double(case["logp"]), ref_logprobs_T=double(case["ref_logp"]),
                   mask_T=step.mask_T)
    rewards = token_rewards(reward_S=double([case["sequence_reward"]]), mask_T=step.mask_T,
                            sequence_T=step.sequence_T, kl_T=kl, beta=case["beta"])
    advantages, returns = gae(
        rewards_T=rewards, values_T=double(case["values"]), bootstrap_S=double([0]),
        mask_T=step.mask_T, sequence_T=step.sequence_T, gamma=case["gamma"], lam=case["lam"])
    assert rewards.tolist() == pytest.approx(case["token_rewards"], abs=1e-12)
    assert advantages.tolist() == pytest.approx(case["advantages"], abs=1e-6)
    assert returns.tolist() == pytest.approx(case["returns"], abs=1e-6)


@pytest.mark.parametrize("name", ["gae_padding", "gae_tool_turn"])
@pytest.mark.parametrize("masked", [None, 1e9, torch.nan, torch.inf])
def test_golden_gae_skips_what_is_no_action(name: str, masked: float | None) -> None:
    case = GOLDEN[name]
    step = Step.of([case["is_action"]])
    rewards, values = double(case["rewards"]), double(case["values"])
    if masked is not None:
        rewards, values = (torch.where(step.mask_T, x, masked) for x in (rewards, values))
    advantages, returns = gae(
        rewards_T=rewards, values_T=values, bootstrap_S=double([0]), mask_T=step.mask_T,
        sequence_T=step.sequence_T, gamma=case["gamma"], lam=case["lam"])
    assert advantages.tolist() == pytest.approx(case["advantages"], abs=1e-9)
    assert torch.equal(returns == 0.0, ~step.mask_T)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_is_its_sum(seed: int, gamma: float, lam: float) -> None:
    """A_t = Σ (γλ)^k δ_{t+k}, each sequence by itself, the last state valued by the bootstrap."""
    step = Step.random(seed, seqs=3)
    rewards, values, last = step.values(seed), step.values(seed + 1), double([0.0, 0.7, -2.0])
    advantages, returns = gae(rewards_T=rewards, values_T=values, bootstrap_S=last,
                              mask_T=step.mask_T, sequence_T=step.sequence_T, gamma=gamma, lam=lam)
    expected = [0.0] * step.num_tokens
    for s in range(3):
        at = step.actions(s)
        v = [*values[at].tolist(), float(last[s])]
        delta = [float(rewards[t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(at)]
        for i, t in enumerate(at):
            expected[t] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[step.mask_T].tolist() == pytest.approx(
        (advantages + values)[step.mask_T].tolist(), abs=1e-9)


def test_gae_with_lambda_one_is_the_return_and_truncation_bootstraps() -> None:
    step = Step.of([[0, 1, 1], [0, 1, 1]])
    _, returns = gae(rewards_T=double([0, 0, 0, 0, 0, 0]), values_T=double([9, 1, 2, 9, 1, 2]),
                     bootstrap_S=double([0, 5]), mask_T=step.mask_T, sequence_T=step.sequence_T,
                     lam=1.0)
    assert returns.tolist() == [0, 0, 0, 0, 5, 5]


def test_the_reward_lands_on_the_last_action() -> None:
    step = Step.of([[0, 1, 1, 0], [0, 1, 0, 1, 0, 0], [0, 0], [0, 1]])
    rewards = token_rewards(reward_S=torch.tensor([1.0, 2.0, 3.0, 4.0]), mask_T=step.mask_T,
                            sequence_T=step.sequence_T)
    assert rewards.tolist() == [0, 0, 1, 0] + [0, 0, 0, 2, 0, 0] + [0, 0] + [0, 4]


def test_the_kl_penalty_falls_on_every_action_and_needs_both() -> None:
    step = Step.of([[0, 1, 1]])
    where = {"reward_S": torch.tensor([1.0]), "mask_T": step.mask_T, "sequence_T": step.sequence_T}
    kl = torch.tensor([torch.nan, 2.0, -4.0])
    assert token_rewards(**where, kl_T=kl, beta=0.25).tolist() == [0.0, -0.5, 2.0]
    for half in ({"beta": 0.1}, {"kl_T": kl}):
        with pytest.raises(ValueError, match="give both or neither"):
            token_rewards(**where, **half)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_returns_are_their_sum(seed: int, gamma: float) -> None:
    step = Step.random(seed, seqs=3)
    rewards = step.values(seed)
    found = discounted_returns(rewards_T=rewards, mask_T=step.mask_T, sequence_T=step.sequence_T,
                               num_seqs=3, gamma=gamma)
    expected = [0.0] * step.num_tokens
    for s in range(3):
        later = [float(rewards[t]) for t in step.actions(s)]
        for i, t in enumerate(step.actions(s)):
            expected[t] = sum(gamma ** k * r for k, r in enumerate(later[i:]))
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_has_the_mean_and_deviation_of_what_counts(ddof: int) -> None:
    step = Step.random(3)
    x = step.values(4)
    kept = x[step.mask_T].tolist()
    std = (statistics.stdev if ddof else statistics.pstdev)(kept)
    white = whiten(x, mask_T=step.mask_T, moments=moments(x, mask_T=step.mask_T), ddof=ddof)
    expected = [(v - statistics.mean(kept)) / std for v in kept]
    assert white[step.mask_T].tolist() == pytest.approx(expected, abs=1e-6)
    assert white[~step.mask_T].abs().sum() == 0.0
    scaled = whiten(x, mask_T=step.mask_T, moments=moments(x, mask_T=step.mask_T), ddof=ddof,
                    center=False)
    assert scaled[step.mask_T].tolist() == pytest.approx([v / std for v in kept], abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_whitening_knows_neither_ranks_nor_padding(ranks: int) -> None:
    step = Step.random(5)
    x = step.values(6, torch.float32)
    whole = whiten(x, mask_T=step.mask_T, moments=moments(x, mask_T=step.mask_T))
    shares = [range(rank, 8, ranks) for rank in range(ranks)]
    parts = [(step.tokens_of(share), step.part(share)) for share in shares]
    total = torch.stack([moments(x[rows], mask_T=part.mask_T) for rows, part in parts]).sum(0)
    for rows, part in parts:
        padded = torch.cat([x[rows], torch.full((7,), 1e9)])
        mask = torch.cat([part.mask_T, torch.zeros(7, dtype=torch.bool)])
        mine = whiten(padded, mask_T=mask, moments=total)
        assert torch.allclose(mine[:len(rows)], whole[rows], atol=1e-6)
        assert mine[len(rows):].tolist() == [0.0] * 7


def test_one_value_tells_nothing() -> None:
    mask = torch.tensor([False, True])
    x = torch.tensor([torch.nan, 3.0])
    assert whiten(x, mask_T=mask, moments=moments(x, mask_T=mask)).tolist() == [0.0, 0.0]


def test_golden_group_advantages() -> None:
    case = GOLDEN["group_advantages"]
    r = double(case["rewards"])
    where: dict[str, Any] = {"reward_S": r, "group_S": torch.zeros(8, dtype=torch.int64),
                             "valid_S": valid(r)}
    for ddof in (0, 1):
        assert grpo(**where, ddof=ddof, eps=1e-6).tolist() == pytest.approx(
            case[f"grpo_std_ddof{ddof}_eps_1e6"], abs=1e-6)
    assert dr_grpo(**where).tolist() == case["dr_grpo"]
    assert rloo(**where).tolist() == pytest.approx(case["rloo"], abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans()),
                min_size=1, max_size=12))
def test_groups_by_brute_force(rows: list[tuple[int, float, bool]]) -> None:
    """Any order of sequences, any sizes of groups, sequences that do not count."""
    where: dict[str, Any] = {
        "group_S": torch.tensor([g for g, _, _ in rows]),
        "reward_S": torch.where(torch.tensor([v for *_, v in rows]),
                                double([r for _, r, _ in rows]), torch.nan),
        "valid_S": torch.tensor([v for *_, v in rows])}
    expected: dict[str, list[float]] = {"grpo": [], "dr_grpo": [], "rloo": []}
    keep = []
    for i, (group, reward, ok) in enumerate(rows):
        mates = [r for g, r, v in rows if v and g == group]
        others = [r for j, (g, r, v) in enumerate(rows) if v and g == group and j != i]
        tells = ok and len(set(mates)) > 1
        keep.append(tells)
        if tells:
            centred = reward - statistics.mean(mates)
            expected["grpo"].append(centred / (statistics.stdev(mates) + 1e-6))
            expected["dr_grpo"].append(centred)
            expected["rloo"].append(reward - statistics.mean(others))
        else:
            for values in expected.values():
                values.append(0.0)
    for rule in GROUP_RULES:
        assert rule(**where).tolist() == pytest.approx(expected[rule.__name__], abs=1e-9)
    assert informative(**where).tolist() == keep


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_uneven_groups_and_groups_that_tell_nothing(rule: Any) -> None:
    """Exactly 0, though the mean of three times 0.1 is not 0.1 in float64."""
    group = torch.tensor([0] * 4 + [1] * 3 + [2] * 4 + [7])
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.1, 0.1, 0.1, 9.0, 1.0, 1.0, 1.0, 5.0],
                          dtype=torch.float64)
    assert float(reward[4:7].sum() / 3 - 0.1) != 0.0
    found = rule(reward_S=reward, group_S=group, valid_S=valid(reward))
    assert found[4:7].tolist() == [0.0] * 3 and float(found[-1]) == 0.0
    assert bool(found.isfinite().all()) and bool((found[:4] != 0.0).all())
    alone = rule(reward_S=reward[7:11], group_S=group[7:11], valid_S=valid(reward[7:11]))
    assert torch.equal(found[7:11], alone)


def test_an_aborted_sequence_moves_nobody() -> None:
    reward, group = torch.tensor([1.0, 0.0, torch.nan]), torch.zeros(3, dtype=torch.int64)
    found = dr_grpo(reward_S=reward, group_S=group, valid_S=torch.tensor([True, True, False]))
    assert found.tolist() == [0.5, -0.5, 0.0]
    with pytest.raises(ValueError, match="not finite"):
        dr_grpo(reward_S=reward, group_S=group, valid_S=torch.tensor([True, True, True]))


@pytest.mark.parametrize("rule", [*GROUP_RULES, informative])
def test_swapped_arguments_are_refused(rule: Any) -> None:
    r, g, v = torch.rand(4), torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool)
    for wrong in ((g, r, v), (r, v, g), (v, g, r)):
        with pytest.raises(ValueError):
            rule(**dict(zip(("reward_S", "group_S", "valid_S"), wrong, strict=True)))
    with pytest.raises(TypeError):
        rule(r, g, v)


def test_reinforce_pp_whitens_returns_over_the_step() -> None:
    step = Step.random(8)
    kl, reward = step.values(9).abs(), double([1, 0, 0, 1, 1, 1, 0, 0])
    rewards = token_rewards(reward_S=reward, mask_T=step.mask_T, sequence_T=step.sequence_T,
                            kl_T=kl, beta=0.1)
    found = reinforce_pp(rewards_T=rewards, mask_T=step.mask_T, sequence_T=step.sequence_T,
                         num_seqs=8)
    raw = {t: float(reward[s]) - 0.1 * float(kl[[u for u in step.actions(s) if u >= t]].sum())
           for s in range(8) for t in step.actions(s)}
    mean, std = statistics.mean(raw.values()), statistics.stdev(raw.values())
    assert found[sorted(raw)].tolist() == pytest.approx(
        [(raw[t] - mean) / std for t in sorted(raw)], abs=1e-6)


def test_reinforce_pp_baseline_takes_out_the_groups_mean_first() -> None:
    step = Step.random(8)
    reward = double([1, 0, 0, 1, 1, 1, 0, torch.nan])
    ok = torch.tensor([True] * 7 + [False])
    found = reinforce_pp_baseline(reward_S=reward, group_S=step.group_S, valid_S=ok,
                                  mask_T=step.mask_T, sequence_T=step.sequence_T)
    centred = dr_grpo(reward_S=reward, group_S=step.group_S, valid_S=ok)
    raw = {t: float(centred[s]) for s in range(7) for t in step.actions(s)}
    mean, std = statistics.mean(raw.values()), statistics.stdev(raw.values())
    assert found[sorted(raw)].tolist() == pytest.approx(
        [(raw[t] - mean) / std for t in sorted(raw)], abs=1e-6)
    assert found[step.actions(7)].abs().sum() == 0.0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_reinforce_pp_over_ranks_is_that_of_one(ranks: int) -> None:
    step = Step.random(10)
    rewards = step.values(11)
    whole = reinforce_pp(rewards_T=rewards, mask_T=step.mask_T, sequence_T=step.sequence_T,
                         num_seqs=8)
    shares = [range(rank, 8, ranks) for rank in range(ranks)]
    own: list[Tensor] = []

    def run(total: Any) -> list[Tensor]:
        found = []
        for share in shares:
            part = step.part(share)
            found.append(reinforce_pp(
                rewards_T=rewards[step.tokens_of(share)], mask_T=part.mask_T,
                sequence_T=part.sequence_T, num_seqs=part.num_seqs, total=total))
        return found

    run(lambda sums: (own.append(sums), sums)[1])
    added = torch.stack(own).sum(0)
    for share, found in zip(shares, run(lambda _: added), strict=True):
        assert torch.allclose(found, whole[step.tokens_of(share)], atol=1e-9)


def test_sequence_advantages_reach_their_actions() -> None:
    step = Step.of([[0, 1, 0], [0, 1]])
    assert to_tokens(torch.tensor([2.0, -3.0]), mask_T=step.mask_T,
                     sequence_T=step.sequence_T).tolist() == [0, 2, 0, 0, -3]
