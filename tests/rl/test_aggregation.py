"""The five aggregations: golden numbers, plain loops, and that cutting a step changes nothing."""

from __future__ import annotations

from functools import reduce
from typing import get_args

import pytest
import torch
from torch import Tensor

from kilter.rl.aggregation import Aggregation, Counts, aggregation_weights, weighted_sum
from kilter.rl.policy_loss import ppo
from tests.rl.flat import GOLDEN, Step, gradient, leaf

MODES = get_args(Aggregation)
LENGTH = 16


def length_of(mode: str) -> int | None:
    return LENGTH if mode == "seq_mean_token_sum_norm" else None


def counts_of(step: Step) -> Counts:
    return Counts.of(mask_T=step.mask_T, sequence_T=step.sequence_T, group_S=step.group_S)


def weights_of(mode: Aggregation, step: Step, counts: Counts | None = None) -> Tensor:
    return aggregation_weights(mode, mask_T=step.mask_T, sequence_T=step.sequence_T,
                               group_S=step.group_S, counts=counts or counts_of(step),
                               norm_length=length_of(mode))


@pytest.mark.parametrize(("mode", "name"), [
    ("token_mean", "token_mean"), ("seq_mean_token_mean", "seq_mean_token_mean"),
    ("seq_mean_token_sum", "seq_mean_token_sum"),
    ("seq_mean_token_sum_norm", "seq_mean_token_sum_norm_16")])
def test_golden_aggregations(mode: Aggregation, name: str) -> None:
    case = GOLDEN["loss_aggregation"]
    step = Step.of([[1] * len(losses) for losses in case["token_losses"]])
    losses = torch.tensor([x for row in case["token_losses"] for x in row], dtype=torch.float64)
    found = weighted_sum(losses, weights_T=weights_of(mode, step))
    assert float(found) == pytest.approx(case[name])


def test_golden_token_mean_is_not_the_mean_of_micro_batch_means() -> None:
    case = GOLDEN["loss_aggregation"]
    means = [sum(row) / len(row) for row in case["token_losses"]]
    wrong = case["wrong_mean_of_micro_batch_means"]
    assert sum(means) / len(means) == wrong != case["token_mean"]
    step = Step.of([[1] * len(row) for row in case["token_losses"]])
    whole = counts_of(step)
    parts = [weighted_sum(torch.tensor(row, dtype=torch.float64),
                          weights_T=weights_of("token_mean", step.part([s]), whole))
             for s, row in enumerate(case["token_losses"])]
    assert float(sum(parts)) == pytest.approx(case["token_mean"])


def by_loops(mode: str, step: Step, losses: Tensor) -> float:
    rows = {s: [float(losses[t]) for t in step.actions(s)] for s in range(step.num_seqs)}
    rows = {s: row for s, row in rows.items() if row}
    if mode == "token_mean":
        flat = [x for row in rows.values() for x in row]
        return sum(flat) / len(flat)
    if mode == "prompt_mean":
        groups: dict[int, list[float]] = {}
        for s, row in rows.items():
            groups.setdefault(int(step.group_S[s]), []).extend(row)
        return sum(sum(g) / len(g) for g in groups.values()) / len(groups)
    per_seq = [sum(row) / {"seq_mean_token_mean": len(row), "seq_mean_token_sum": 1,
                           "seq_mean_token_sum_norm": LENGTH}[mode] for row in rows.values()]
    return sum(per_seq) / len(per_seq)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_aggregations_are_loops(mode: Aggregation, seed: int) -> None:
    step = Step.random(seed)
    mask = step.mask_T & (step.sequence_T != 2)  # a sequence without tokens that count
    step = Step(mask, step.sequence_T, step.group_S, step.num_seqs)
    losses = step.values(seed + 50)
    found = weighted_sum(losses, weights_T=weights_of(mode, step))
    assert float(found) == pytest.approx(by_loops(mode, step, losses), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_step_cut_into_parts_is_the_step(mode: Aggregation, parts: int) -> None:
    """Loss and gradient; groups of four are spread over the parts."""
    step = Step.random(21)
    new, old, advantages = (step.values(seed, torch.float32, 0.3) for seed in (22, 23, 24))

    def loss(of: Step, rows: Tensor, logprobs: Tensor, counts: Counts) -> Tensor:
        found = ppo(logprobs_T=logprobs[rows], old_logprobs_T=old[rows],
                    advantages_T=advantages[rows], mask_T=of.mask_T)
        return weighted_sum(found.losses_T, weights_T=weights_of(mode, of, counts))

    logprobs = leaf(new)
    whole = loss(step, torch.arange(step.num_tokens), logprobs, counts_of(step))
    expected = gradient(whole, logprobs)
    shares = [range(n, 8, parts) for n in range(parts)]
    counts = reduce(lambda a, b: a + b, (counts_of(step.part(share)) for share in shares), Counts())
    assert counts == counts_of(step)
    cut = [loss(step.part(share), step.tokens_of(share), logprobs, counts) for share in shares]
    found = torch.stack([gradient(part, logprobs) for part in cut]).sum(0)
    assert sum(x.item() for x in cut) == pytest.approx(whole.item(), abs=1e-6)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9)
    assert expected[~step.mask_T].abs().sum() == 0.0 and expected.abs().sum() > 0.0


@pytest.mark.parametrize("mode", MODES)
def test_padding_weighs_nothing(mode: Aggregation) -> None:
    """A sequence's tokens weigh the same packed tight and padded to a rectangle."""
    tight = Step.of([[0, 1, 1], [0, 1, 1, 1, 1, 1]], [0, 0])
    padded = Step.of([[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]], [0, 0])
    assert torch.equal(weights_of(mode, tight)[tight.mask_T],
                       weights_of(mode, padded)[padded.mask_T])


def test_at_ratio_one_the_loss_is_minus_the_mean_advantage() -> None:
    """Under each mode's own mean; exactly 0 for centred advantages and means over sequences."""
    step = Step.of([[0, 1], [0, 1, 1, 1, 1], [0, 1, 1], [0, 1, 1, 1]], [0, 0, 0, 0])
    advantage = torch.tensor([0.75, -0.25, -0.25, -0.25])
    logprobs = step.values(1, torch.float32)
    losses = ppo(logprobs_T=logprobs, old_logprobs_T=logprobs, mask_T=step.mask_T,
                 advantages_T=advantage[step.sequence_T]).losses_T
    found = {mode: float(weighted_sum(losses, weights_T=weights_of(mode, step))) for mode in MODES}
    counts = torch.tensor([1.0, 4.0, 2.0, 3.0])
    assert found["seq_mean_token_mean"] == pytest.approx(0.0, abs=1e-15)
    assert found["token_mean"] == pytest.approx(-float((advantage * counts).sum()) / 10)
    assert found["prompt_mean"] == pytest.approx(found["token_mean"])
    assert found["seq_mean_token_sum"] == pytest.approx(-float((advantage * counts).sum()) / 4)
    equal = Step.of([[0, 1, 1]] * 4)
    for mode in MODES:
        rows = -advantage[equal.sequence_T]
        assert float(weighted_sum(rows, weights_T=weights_of(mode, equal))) == 0.0


def test_what_does_not_fit_is_refused() -> None:
    step = Step.of([[0, 1], [0, 1]], [0, 1])
    where = {"mask_T": step.mask_T, "sequence_T": step.sequence_T, "group_S": step.group_S,
             "counts": counts_of(step)}
    with pytest.raises(ValueError, match="must be one of token_mean"):
        aggregation_weights("mean", **where)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs one of at least 1"):
        aggregation_weights("seq_mean_token_sum_norm", **where)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs one of at least 1"):
        aggregation_weights("token_mean", **where, norm_length=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="arguments swapped"):
        aggregation_weights("token_mean", **{**where, "mask_T": step.mask_T.float()})
    with pytest.raises(ValueError, match="add up the counts"):
        aggregation_weights("token_mean", **{**where, "counts": counts_of(step.part([0]))})
    with pytest.raises(ValueError, match="add up the counts"):
        aggregation_weights("prompt_mean", **{**where, "counts": Counts(2, 2, {0: 2})})
