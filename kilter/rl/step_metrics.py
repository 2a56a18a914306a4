"""What is told of a step: the numbers of its metrics, and some of its rollouts as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kilter.rl.algorithms import Recipe
from kilter.rl.experience import Rollout
from kilter.rl.kl import kl_values
from kilter.rl.learners import CriticReport, PolicyReport
from kilter.rl.lesson import Lesson
from kilter.rl.rewards.score import TOTAL
from kilter.tokens import Tokenizer


def lesson_metrics(lesson: Lesson, reward_S: Tensor, version: int) -> dict[str, Any]:
    """Of a step's experience and what was made of it.

    Args:
        reward_S: after `shaped_rewards`.
        version: of the actor's weights.
    """
    experience = lesson.experience
    counts_S = torch.bincount(experience.sequence_T[experience.is_action_T],
                              minlength=experience.num_seqs)
    ages = version - experience.version_T[experience.is_action_T]
    told: dict[str, Any] = {
        "reward": float(experience.rewards[TOTAL].mean()),
        "shaped_reward": float(reward_S.mean()),
        "rewards": {name: {"mean": float(r_S.mean()), "std": float(r_S.std(unbiased=False))}
                    for name, r_S in experience.rewards.items() if name != TOTAL},
        "sequences": experience.num_seqs, "groups": len(experience.group_S.unique()),
        "tokens": experience.num_tokens, "actions": experience.num_actions,
        "surprise": -float(experience.logprobs_T[experience.is_action_T].double().mean()),
        "length": float(counts_S.double().mean()), "longest": int(counts_S.max()),
        "truncated": float(experience.truncated_S.double().mean()),
        "aborted": float((~experience.complete_S).double().mean()),
        "staleness": {"max": int(ages.max()), "mean": float(ages.double().mean())}}
    if lesson.returns_T is not None and lesson.values_T is not None:
        returns, values = (x_T[lesson.mask_T].double()
                           for x_T in (lesson.returns_T, lesson.values_T))
        spread = float(returns.var(unbiased=False))
        left = float((returns - values).var(unbiased=False))
        told["explained_variance"] = 1.0 - left / spread if spread else 0.0
        told["value"] = float(values.mean())
    return told


def update_metrics(recipe: Recipe, reports: Sequence[PolicyReport], critic: Sequence[CriticReport]
                   ) -> dict[str, Any]:
    """Means over a step's minibatches."""
    told: dict[str, Any] = {"loss": _mean(report.loss for report in reports),
                            "grad_norm": _mean(report.grad_norm for report in reports)}
    if recipe.entropy:
        told["entropy"] = _mean(report.entropy or 0.0 for report in reports)
    if recipe.kl == "loss":
        told["kl_loss"] = _mean(report.kl_loss for report in reports)
    for name in ("ratio", "clipped_low", "clipped_high", "dual_clipped", "kl"):
        told["policy_" + name] = _mean(report.diagnostics[name] for report in reports)
    told["clip_fraction"] = told["policy_clipped_low"] + told["policy_clipped_high"]
    if critic:
        told["critic"] = {"loss": _mean(report.loss for report in critic),
                          "grad_norm": _mean(report.grad_norm for report in critic),
                          "clip_fraction": _mean(report.clipped for report in critic)}
    return told


def divergence(lesson: Lesson, ref_T: Tensor) -> dict[str, float]:
    """From the reference, summed over the tokens that are learned from; by estimator."""
    return {name: float(kl_values(name, logprobs_T=lesson.experience.logprobs_T,
                                  ref_logprobs_T=ref_T, mask_T=lesson.mask_T).double().sum())
            for name in ("k1", "k3")}


def shown_rollouts(lesson: Lesson, tokenizer: Tokenizer, count: int) -> list[dict[str, Any]]:
    """Up to ``count`` rollouts as text: of different prompts, as far as there are."""
    experience = lesson.experience
    shown = []
    rollouts = experience.to_rollouts()
    groups = experience.group_S.tolist()
    turn = [groups[:s].count(groups[s]) for s in range(len(groups))]
    for s in sorted(range(len(groups)), key=lambda s: (turn[s], s))[:count]:
        rollout = rollouts[s]
        where = experience.sequence_T == s
        shown.append({
            "id": rollout.id, "finish": rollout.finish, "rewards": dict(rollout.rewards),
            **_text(rollout, tokenizer), "tokens": sum(rollout.is_action),
            "advantage": float(lesson.advantages_T[where & lesson.mask_T].mean())
            if bool((where & lesson.mask_T).any()) else None})
    return shown


def _text(rollout: Rollout, tokenizer: Tokenizer) -> dict[str, str]:
    first = list(rollout.is_action).index(True) if any(rollout.is_action) else len(rollout.tokens)
    return {"prompt": tokenizer.decode(rollout.tokens[:first], skip_special_tokens=False),
            "answer": tokenizer.decode(rollout.tokens[first:], skip_special_tokens=False)}


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
