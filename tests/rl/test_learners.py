"""A step's loss and gradient are those of the formula written out over whole sequences, however the
step is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilter.job import dump
from kilter.models.batch import Batch
from kilter.rl.experience import Experience
from kilter.rl.learners import Critic, Policy, pair_slopes
from kilter.rl.lesson import Lesson, make_lesson
from kilter.rl.loop import RLRun
from kilter.rl.preference import preference_pairs
from tests.rl.tiny_job import make_job, new_run

BUDGETS = (24, 50, 1000)
TEMPERATURE = 0.7


@contextmanager
def sampled(folder: Path, **changes: Any) -> Iterator[tuple[RLRun, Experience]]:
    """A run and its first experience, of answers of different lengths."""
    changes = {"seed": 1, "rollout": {"temperature": TEMPERATURE, "max_tokens": 12}, **changes}
    with new_run(dump(make_job(folder, **changes))) as run:
        run.roles.send_weights(0)
        experience = run.sample(0)[0]
        assert len(experience.lengths.unique()) > 1
        yield run, experience


def taken(learner: Policy | Critic, lesson: Lesson, budget: int, monkeypatch: pytest.MonkeyPatch
          ) -> tuple[float, list[Tensor]]:
    """(loss, gradients) of a step that the optimizer does not take."""
    found: list[Tensor] = []

    def step(factor: float) -> None:
        for held in learner.spread.held:
            assert held.tensor.grad is not None
            found.append(held.tensor.grad.clone())

    monkeypatch.setattr(learner.optimizer, "step", step)
    monkeypatch.setattr(learner, "max_norm", None)
    monkeypatch.setattr(learner, "token_budget", budget)
    if isinstance(learner, Policy):
        report: Any = learner.learn(lesson, factor=1.0, version=None, phase=_phase)
    else:
        report = learner.learn(lesson, factor=1.0, phase=_phase)
    return report.loss, found


def _phase(name: str) -> Any:
    return nullcontext()


def matches(learner: Policy | Critic, lesson: Lesson, loss: Tensor,
            monkeypatch: pytest.MonkeyPatch) -> None:
    """That a step in micro-batches of any size has this loss and its gradient."""
    expected = torch.autograd.grad(loss, [held.tensor for held in learner.spread.held])
    assert max(float(g.abs().max()) for g in expected) > 1e-4
    for budget in BUDGETS:
        value, gradients = taken(learner, lesson, budget, monkeypatch)
        assert value == pytest.approx(loss.item(), abs=1e-6)
        for own, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def one_by_one(learner: Policy | Critic, experience: Experience) -> list[Tensor]:
    """What the model computes of each sequence alone: logits or values."""
    model = learner.spread.model
    return [model(Batch.of([list(rollout.tokens)])) for rollout in experience.to_rollouts()]


def distributions(policy: Policy, experience: Experience) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence: log-probabilities of all its tokens but the first, and the entropies."""
    found = []
    for rollout, logits in zip(experience.to_rollouts(), one_by_one(policy, experience),
                               strict=True):
        all_logs = F.log_softmax(logits[:-1] / TEMPERATURE, -1)
        tokens = torch.tensor(rollout.tokens[1:])
        found.append((all_logs.gather(1, tokens[:, None])[:, 0],
                      -(all_logs.exp() * all_logs).sum(-1)))
    return found


def rows(experience: Experience, values_T: Tensor | None, s: int) -> Tensor:
    """Of a sequence's tokens but the first."""
    assert values_T is not None
    return values_T[experience.sequence_T == s][1:]


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum",
                                  "seq_mean_token_sum_norm", "prompt_mean"])
def test_all_parts_of_a_policys_loss(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                     ) -> None:
    """Clipped ratios, a divergence, entropy and importance weights, under each mean."""
    recipe = {"aggregation": mode, "kl": "loss", "kl_beta": 0.3, "entropy": 0.05}
    generator = torch.Generator().manual_seed(5)

    def noise(experience: Experience, size: float) -> Tensor:
        return size * torch.randn(experience.num_tokens, generator=generator)

    with sampled(tmp_path, recipe=recipe) as (run, experience):
        policy = run.roles.policy
        assert policy is not None
        ref_T = run.roles.reference_logprobs(experience) + noise(experience, 0.2)
        lesson = make_lesson(run.recipe, experience, run._rewards(experience), kl_beta=0.0,
                             ref_T=ref_T)
        lesson = replace(lesson, old_T=experience.logprobs_T + noise(experience, 0.3),
                         advantages_T=noise(experience, 1.0),
                         weights_T=noise(experience, 1.0).exp())
        loss = torch.zeros((), dtype=torch.float64)
        groups = experience.group_S.tolist()
        act = [rows(experience, experience.is_action_T, s) for s in range(experience.num_seqs)]
        counts = [int(a.sum()) for a in act]
        for s, (logs, entropies) in enumerate(distributions(policy, experience)):
            def of(values_T: Tensor | None, s: int = s) -> Tensor:
                return rows(experience, values_T, s)[act[s]]

            log_T, advantage_T = logs[act[s]], of(lesson.advantages_T)
            ratio_T = (log_T - of(lesson.old_T)).exp()
            losses_T = (-torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.8, 1.2) * advantage_T)
                        + 0.3 * 0.5 * (log_T - of(ref_T)).square() - 0.05 * entropies[act[s]])
            share = {"token_mean": sum(counts), "seq_mean_token_mean": len(counts) * counts[s],
                     "seq_mean_token_sum": len(counts), "seq_mean_token_sum_norm": len(counts) * 12,
                     "prompt_mean": 4 * sum(n for n, g in zip(counts, groups, strict=True)
                                            if g == groups[s])}[mode]
            loss = loss + (losses_T * of(lesson.weights_T)).double().sum() / share
        matches(policy, lesson, loss, monkeypatch)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_slopes_of_pairs_are_the_gradient_of_dpo(kind: str, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two of a pair in micro-batches of their own."""
    with sampled(tmp_path, algorithm="online_dpo", recipe={"dpo_loss": kind, "beta": 0.5}) as (
            run, experience):
        policy = run.roles.policy
        assert policy is not None
        reward_S = torch.rand(experience.num_seqs, generator=torch.Generator().manual_seed(2))
        ref_T = experience.logprobs_T + 0.1 * reward_S[experience.sequence_T]
        chosen_P, rejected_P = preference_pairs(reward_S=reward_S, group_S=experience.group_S,
                                                valid_S=experience.complete_S)
        assert len(chosen_P) == 4
        whole = [logs[rows(experience, experience.is_action_T, s)].sum()
                 for s, (logs, _) in enumerate(distributions(policy, experience))]
        ref = [rows(experience, ref_T, s)[rows(experience, experience.is_action_T, s)].sum()
               for s in range(experience.num_seqs)]
        losses = []
        for chosen, rejected in zip(chosen_P.tolist(), rejected_P.tolist(), strict=True):
            gap = (whole[chosen] - ref[chosen]) - (whole[rejected] - ref[rejected])
            losses.append(-F.logsigmoid(0.5 * gap) if kind == "sigmoid" else
                          (gap - 1.0 / (2 * 0.5)) ** 2)
        loss = torch.stack(losses).mean()
        slopes_T, told = pair_slopes(run.recipe, experience, experience.logprobs_T, ref_T, chosen_P,
                                     rejected_P)
        assert told["dpo_loss"] == pytest.approx(loss.item(), rel=1e-5)
        lesson = make_lesson(run.recipe, experience, reward_S, kl_beta=0.0, ref_T=ref_T)
        lesson = replace(lesson, advantages_T=slopes_T)
        expected = torch.autograd.grad(loss, [held.tensor for held in policy.spread.held])
        largest = max(float(g.abs().max()) for g in expected)
        for budget in BUDGETS:
            _, gradients = taken(policy, lesson, budget, monkeypatch)
            for own, other in zip(gradients, expected, strict=True):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5 * largest)


def test_the_critics_loss_is_the_mean_over_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    with sampled(tmp_path, algorithm="ppo", critic={}, recipe={"value_weight": 0.5}) as (
            run, experience):
        critic = run.roles.critic
        assert critic is not None
        with torch.no_grad():
            critic.spread.local["value.weight"][0].normal_(generator=torch.Generator().manual_seed(
                1))
        values_T, after_S = run.roles.values(experience)
        alone = one_by_one(critic, experience)
        for s, row in enumerate(alone):  # the value of the state before each action
            act = rows(experience, experience.is_action_T, s)
            assert torch.equal(rows(experience, values_T, s)[act], row[:-1][act])
        assert bool((after_S == 0).all())
        lesson = make_lesson(run.recipe, experience, run._rewards(experience), kl_beta=0.0,
                             values_T=values_T, bootstrap_S=after_S)
        assert lesson.returns_T is not None
        shift_T = 0.5 * torch.randn(experience.num_tokens,
                                    generator=torch.Generator().manual_seed(4))
        lesson = replace(lesson, values_T=values_T + shift_T)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for s, row in enumerate(alone):
            act = rows(experience, experience.is_action_T, s)
            value_T, old_T, return_T = (x[act] for x in (
                row[:-1], rows(experience, lesson.values_T, s),
                rows(experience, lesson.returns_T, s)))
            clipped_T = torch.maximum(torch.minimum(value_T, old_T + 0.2), old_T - 0.2)
            total = total + torch.maximum((value_T - return_T) ** 2,
                                          (clipped_T - return_T) ** 2).double().sum()
            count += int(act.sum())
        matches(critic, lesson, 0.5 * 0.5 * total / count, monkeypatch)


@pytest.mark.parametrize("temperature", [0.3, 1.5])
def test_values_do_not_know_of_temperature(temperature: float, tmp_path: Path) -> None:
    with sampled(tmp_path, algorithm="ppo", critic={},
                 rollout={"temperature": temperature, "max_tokens": 12}) as (run, experience):
        critic = run.roles.critic
        assert critic is not None
        with torch.no_grad():
            critic.spread.local["value.weight"][0].fill_(0.3)
        values_T, _ = run.roles.values(experience)
        for s, row in enumerate(one_by_one(critic, experience)):
            act = rows(experience, experience.is_action_T, s)
            assert torch.equal(rows(experience, values_T, s)[act], row[:-1][act])


def test_at_equal_weights_the_loss_is_minus_the_mean_advantage(tmp_path: Path) -> None:
    """And exactly the divergence is 0."""
    for algorithm, recipe in (("grpo", {}), ("dapo", {}), ("grpo", {"kl": "loss", "kl_beta": 0.1})):
        job = make_job(tmp_path, algorithm=algorithm, recipe=recipe, seed=1,
                       rollout={"max_tokens": 12})
        with new_run(dump(job)) as run:
            run.roles.send_weights(0)
            experience, _ = run.sample(0)
            told, _ = run.learn(experience, 0, None)
            lesson = make_lesson(job.made, experience, run._rewards(experience), kl_beta=0.0)
        if algorithm == "grpo":  # a mean over sequences, of advantages that are centred
            assert told["loss"] == pytest.approx(0.0, abs=1e-7)
        else:
            assert told["loss"] == pytest.approx(
                -float(lesson.advantages_T[lesson.mask_T].double().mean()), abs=1e-7)
        assert told["grad_norm"] > 0.0 and told["policy_ratio"] == 1.0
        assert told["clip_fraction"] == 0.0 and told["gate"]["max"] == 0.0
        if recipe:
            assert told["kl"] == told["kl_k1"] == told["kl_loss"] == 0.0
