"""What a recipe makes of an experience: a `Lesson`, with rewards turned into advantages; and of the
log-probabilities that a policy gives it, the loss of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kilter.rl import advantages
from kilter.rl.algorithms import Recipe
from kilter.rl.experience import Experience
from kilter.rl.kl import kl_values
from kilter.rl.masks import to_tokens
from kilter.rl.off_policy import banded_weights, geometric_weights, truncated_weights
from kilter.rl.policy_loss import PolicyLoss, cispo, gspo, ppo, reinforce
from kilter.rl.shaping import missing_eos_penalty, overlong_penalty


@dataclass(frozen=True)
class Lesson:
    """An experience made ready to learn from; all of T tokens, standing at the token they are
    about, and the same on all ranks.

    Attributes:
        mask_T: which tokens are learned from.
        old_T: log-probabilities that ratios are taken against; NaN where the mask is False.
        advantages_T: with `returns_T` of a critic's, and the values it had.
        weights_T: importance weights of tokens that older weights sampled, where they are
            corrected for.
        ref_T: the reference's log-probabilities, where it counts.
    """

    experience: Experience
    mask_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    returns_T: Tensor | None = None
    values_T: Tensor | None = None
    weights_T: Tensor | None = None
    ref_T: Tensor | None = None

    def select(self, indices: Sequence[int]) -> Lesson:
        """The part of it that is of these sequences."""
        cu = self.experience.cu_seqlens_S1.tolist()
        rows = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in indices])

        def part(values_T: Tensor | None) -> Tensor | None:
            return None if values_T is None else values_T[rows]

        return Lesson(self.experience.select(indices), self.mask_T[rows], self.old_T[rows],
                      self.advantages_T[rows], part(self.returns_T), part(self.values_T),
                      part(self.weights_T), part(self.ref_T))


def shaped_rewards(recipe: Recipe, experience: Experience, reward_S: Tensor, max_tokens: int
                   ) -> Tensor:
    """[S]: the rewards after the rules about length and ends."""
    counts_S = torch.bincount(experience.sequence_T[experience.is_action_T],
                              minlength=experience.num_seqs)
    if recipe.overlong:
        reward_S = reward_S + overlong_penalty(counts_S, max_length=max_tokens,
                                               cache=recipe.overlong)
    if recipe.missing_eos:
        ended_S = torch.tensor([finish == "stop" for finish in experience.finish])
        reward_S = missing_eos_penalty(reward_S, ended_S=ended_S, penalty=recipe.missing_eos)
    return reward_S


def make_lesson(recipe: Recipe, experience: Experience, reward_S: Tensor, *, kl_beta: float,
                ref_T: Tensor | None = None, values_T: Tensor | None = None,
                bootstrap_S: Tensor | None = None, now_T: Tensor | None = None) -> Lesson:
    """From rewards to advantages.

    Args:
        reward_S: float32 [S], after `shaped_rewards`.
        kl_beta: the present weight of the divergence.
        ref_T: the reference's log-probabilities at actions.
        values_T, bootstrap_S: the critic's, at actions, and of the state after a sequence that a
            limit cut off.
        now_T: the trainer's log-probabilities before the step, where the data is older than its
            weights and that is corrected for; without, the behaviour's are the old ones.
    """
    mask_T = experience.is_action_T & experience.complete_S[experience.sequence_T]
    returns_T = None
    if recipe.advantage == "none":
        advantages_T = torch.zeros(experience.num_tokens)
    elif recipe.advantage in ("gae", "reinforce_pp"):
        advantages_T, returns_T = _of_tokens(recipe, experience, mask_T, reward_S, kl_beta, ref_T,
                                             values_T, bootstrap_S)
    else:
        advantages_T = _of_groups(recipe, experience, mask_T, reward_S)
    old_T, weights_T = experience.logprobs_T, None
    if recipe.correction != "none":
        assert now_T is not None
        old_T = now_T
        weights_T = _importance(recipe, now_T, experience, mask_T)
    return Lesson(experience, mask_T, old_T, advantages_T, returns_T, values_T, weights_T, ref_T)


def _of_tokens(recipe: Recipe, experience: Experience, mask_T: Tensor, reward_S: Tensor,
               kl_beta: float, ref_T: Tensor | None, values_T: Tensor | None,
               bootstrap_S: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(advantages, returns of a critic): from rewards of tokens."""
    sequence_T, kl_T = experience.sequence_T, None
    if recipe.kl == "reward":
        assert ref_T is not None
        kl_T = kl_values(recipe.kl_estimator, logprobs_T=experience.logprobs_T,
                         ref_logprobs_T=ref_T, mask_T=mask_T)
    rewards_T = advantages.token_rewards(reward_S=reward_S, mask_T=mask_T, sequence_T=sequence_T,
                                         kl_T=kl_T, beta=0.0 if kl_T is None else kl_beta)
    if recipe.advantage == "reinforce_pp":
        return advantages.reinforce_pp(rewards_T=rewards_T, mask_T=mask_T, sequence_T=sequence_T,
                                       num_seqs=experience.num_seqs, gamma=recipe.gamma), None
    assert values_T is not None and bootstrap_S is not None
    advantages_T, returns_T = advantages.gae(
        rewards_T=rewards_T, values_T=values_T, bootstrap_S=bootstrap_S, mask_T=mask_T,
        sequence_T=sequence_T, gamma=recipe.gamma, lam=recipe.lam)
    if recipe.whiten:
        advantages_T = advantages.whiten(advantages_T, mask_T=mask_T,
                                         moments=advantages.moments(advantages_T, mask_T=mask_T))
    return advantages_T, returns_T


def _of_groups(recipe: Recipe, experience: Experience, mask_T: Tensor, reward_S: Tensor) -> Tensor:
    """Advantages from rewards of a prompt's samples."""
    group_S, valid_S, sequence_T = (experience.group_S, experience.complete_S,
                                    experience.sequence_T)
    if recipe.advantage == "reinforce_pp_baseline":
        return advantages.reinforce_pp_baseline(
            reward_S=reward_S, group_S=group_S, valid_S=valid_S, mask_T=mask_T,
            sequence_T=sequence_T)
    if recipe.advantage == "grpo":
        advantage_S = advantages.grpo(reward_S=reward_S, group_S=group_S, valid_S=valid_S,
                                      ddof=recipe.std_ddof)
    else:
        function = advantages.dr_grpo if recipe.advantage == "dr_grpo" else advantages.rloo
        advantage_S = function(reward_S=reward_S, group_S=group_S, valid_S=valid_S)
    return to_tokens(advantage_S, mask_T=mask_T, sequence_T=sequence_T)


def policy_losses(recipe: Recipe, *, logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor,
                  mask_T: Tensor, sequence_T: Tensor, num_seqs: int) -> PolicyLoss:
    """The recipe's loss per token."""
    given = partial(_KINDS[recipe.loss], logprobs_T=logprobs_T, old_logprobs_T=old_T,
                    advantages_T=advantages_T, mask_T=mask_T)
    if recipe.loss == "reinforce":
        return given()
    clipped = partial(given, eps_low=recipe.eps_low, eps_high=recipe.eps_high)
    if recipe.loss == "ppo":
        return clipped(dual_clip=recipe.dual_clip or None)
    if recipe.loss == "gspo":
        return clipped(sequence_T=sequence_T, num_seqs=num_seqs)
    return clipped()


_KINDS: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}


def _importance(recipe: Recipe, now_T: Tensor, experience: Experience, mask_T: Tensor) -> Tensor:
    behaviour_T = experience.logprobs_T
    low, high = recipe.correction_low, recipe.correction_high
    if recipe.correction == "tis":
        return truncated_weights(old_logprobs_T=now_T, behaviour_T=behaviour_T, mask_T=mask_T,
                                 cap=high)
    if recipe.correction == "geometric":
        return geometric_weights(old_logprobs_T=now_T, behaviour_T=behaviour_T, mask_T=mask_T,
                                 low=low, high=high, sequence_T=experience.sequence_T,
                                 num_seqs=experience.num_seqs)
    return banded_weights(old_logprobs_T=now_T, behaviour_T=behaviour_T, mask_T=mask_T, low=low,
                          high=high)
