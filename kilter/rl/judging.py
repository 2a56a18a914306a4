"""Rollouts and the rewards that can verify them, on the ranks that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kilter.comm.axis import Axis
from kilter.comm.objects import share_result
from kilter.rl.experience import Rollout
from kilter.rl.failures import SAID
from kilter.rl.prompts import Question
from kilter.rl.rewards import Sample, WeightedReward, score
from kilter.rl.rewards.score import TOTAL
from kilter.tokens import Tokenizer


def judged(rollouts: Sequence[Rollout], by_id: Mapping[str, Question],
           rewards: Sequence[WeightedReward], tokenizer: Tokenizer, axis: Axis) -> list[Rollout]:
    """With their rewards, which a replica's first rank asks for; all of its ranks call."""

    def parts() -> dict[str, list[float]]:
        samples = []
        for rollout in rollouts:
            item = by_id[rollout.id.rpartition("/")[0]].item
            samples.append(Sample.of(
                prompt=item.messages, tokens=rollout.tokens, is_action=rollout.is_action,
                decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                finish=rollout.finish, reference=item.reference))
        if samples and rewards:
            return score(rewards, samples)
        return {TOTAL: [0.0] * len(samples)}

    found = share_result(parts if axis.index == 0 else None, axis, raises=SAID)
    return [replace(rollout, rewards={name: values[i] for name, values in found.items()})
            for i, rollout in enumerate(rollouts)]


def close_rewards(rewards: Sequence[WeightedReward]) -> None:
    """Ends the processes that judge answers."""
    for weighted in rewards:
        if hasattr(weighted.reward, "close"):
            weighted.reward.close()
