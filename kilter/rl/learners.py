"""The models of a run: the policy and the critic, which learn, and those that only look.

    policy      log-probabilities; learns from a `Lesson`
    critic      values of states; learns from its returns
    frozen      the reference's log-probabilities, a reward model's verdicts

Each is a spread model on its own ranks and is called on all of them. A minibatch is one step of the
optimizer: its losses are weighed by counts of the whole of it, so that micro-batches and ranks
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kilter.comm.collectives import all_reduce_sum
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread
from kilter.parallel.context.plan import counted_once
from kilter.rl.aggregation import Counts, aggregation_weights, weighted_sum
from kilter.rl.algorithms import Recipe
from kilter.rl.experience import Experience
from kilter.rl.gate import Agreement, agreement
from kilter.rl.kl import kl_losses
from kilter.rl.lesson import Lesson, policy_losses
from kilter.rl.masks import only, sequence_sums
from kilter.rl.policy_loss import DIAGNOSTICS, diagnostic_means, entropy_bonus
from kilter.rl.scoring import (
    MicroBatch,
    at_actions,
    deal,
    logprob_rows,
    places,
    rows_of,
    together,
    value_rows,
)
from kilter.rl.value_loss import value_losses
from kilter.train.lora import adapters_off
from kilter.train.optimizer import Optimizer
from kilter.train.preference.losses import dpo
from kilter.train.step import Phase, local_rows, update


@dataclass
class Learner:
    """A model that an optimizer steps.

    Attributes:
        token_budget: tokens of a micro-batch; 0: see `kilter.rl.scoring.deal`.
        max_norm: what the gradient's norm is clipped to; None: not at all.
    """

    spread: Spread
    optimizer: Optimizer
    token_budget: int
    max_norm: float | None

    @property
    def device(self) -> torch.device:
        return torch.device(self.spread.mesh.device_type)

    def _descend(self, mine: Sequence[MicroBatch], losses: Callable[..., Tensor], factor: float,
                 phase: Phase) -> tuple[float, float]:
        """One step: ``losses(forward, batch, targets_T, k)`` is the loss of a micro-batch, the same
        on all context-parallel ranks."""
        given = [local_rows(self.spread, part, self.device) for part in mine]
        context = self.spread.mesh.axis("cp")
        own = self.spread.backward_all(
            [batch for batch, _ in given],
            lambda forward, k: counted_once(losses(forward, *given[k], k), context), phase)
        return update(self.spread, self.optimizer, own, factor=factor, max_norm=self.max_norm,
                      phase=phase)

    def _sums(self, sums: Tensor) -> Tensor:
        mesh = self.spread.mesh
        if mesh.axis("cp").index:  # the first has the same
            sums = torch.zeros_like(sums)
        return all_reduce_sum(sums, mesh.axis("pp_dp_cp"))


@dataclass
class PolicyReport:
    """What a minibatch was: means over its tokens, and how rollout and trainer agreed; the entropy
    where it was computed, which only its bonus needs."""

    loss: float
    grad_norm: float
    kl_loss: float
    diagnostics: dict[str, float]
    agreement: Agreement | None = None
    entropy: float | None = None


@dataclass
class Policy(Learner):
    """The actor."""

    recipe: Recipe = field(kw_only=True)
    temperature: float = field(kw_only=True)

    def logprobs(self, experience: Experience) -> Tensor:
        """float32 [T] at actions, NaN elsewhere; on every rank."""
        return at_actions(experience, rows_of(
            self.spread, experience, self.token_budget, logprob_rows(self.temperature)))

    def reference_logprobs(self, experience: Experience) -> Tensor:
        """The same of the model without its adapters."""
        with adapters_off(self.spread.model):
            return self.logprobs(experience)

    def learn(self, lesson: Lesson, *, factor: float, version: int | None, phase: Phase
              ) -> PolicyReport:
        """One step on a whole lesson.

        Args:
            version: of the weights; then what the forward computes is compared with what actions
                of that version were sampled with.
        """
        recipe, experience = self.recipe, lesson.experience
        counts = Counts.of(mask_T=lesson.mask_T, sequence_T=experience.sequence_T,
                           group_S=experience.group_S)
        if recipe.loss == "dpo":
            weights_T = torch.ones(experience.num_tokens, dtype=torch.float64)
        else:
            weights_T = aggregation_weights(
                recipe.aggregation, mask_T=lesson.mask_T, sequence_T=experience.sequence_T,
                group_S=experience.group_S, counts=counts,
                norm_length=recipe.norm_length or None)
        if lesson.weights_T is not None:
            weights_T = weights_T * only(lesson.weights_T, lesson.mask_T).double()
        mine = deal(self.spread, experience, self.token_budget)
        sums = torch.zeros(len(DIAGNOSTICS) + 2, dtype=torch.float64)
        seen: list[Tensor | None] = [None] * len(mine)

        rows_of_part = logprob_rows(self.temperature, recipe.entropy != 0.0)

        def losses(forward: Callable[..., Any], batch: Batch, targets_T: Tensor, k: int) -> Tensor:
            rows = rows_of_part(forward, batch, targets_T)
            rows_T, entropy_T = rows if isinstance(rows, tuple) else (rows, None)
            seen[k] = rows_T.detach()
            if mine[k].experience is None:
                return rows_T.sum() * 0.0
            return self._loss(lesson, mine[k], weights_T, rows_T, entropy_T, sums)

        loss, norm = self._descend(mine, losses, factor, phase)
        sums = self._sums(sums)
        tokens = max(float(sums[0]), 1.0)
        report = PolicyReport(loss, norm, float(sums[-1]) / tokens,
                              diagnostic_means(sums[:len(DIAGNOSTICS)]))
        if recipe.entropy:
            report.entropy = float(sums[-2]) / tokens
        if version is not None:
            now_T = at_actions(experience, together(self.spread, experience, mine, seen))
            report.agreement = agreement(experience, now_T, version=version)
        return report

    def _loss(self, lesson: Lesson, part: MicroBatch, weights_T: Tensor, rows_T: Tensor,
              entropy_T: Tensor | None, sums: Tensor) -> Tensor:
        """A micro-batch's part of the loss; adds to the sums."""
        recipe, own = self.recipe, part.experience
        assert own is not None
        where = places(lesson.experience, part)
        device = rows_T.device

        def here(values_T: Tensor) -> Tensor:
            return values_T[where].to(device)

        mask_T, sequence_T = here(lesson.mask_T), own.sequence_T.to(device)
        logprobs_T = part.at_actions(rows_T)
        if recipe.loss == "dpo":  # the advantages are the loss's own slope, see `pair_slopes`
            losses_T = -here(lesson.advantages_T) * only(logprobs_T, mask_T)
            sums[0] += float(mask_T.sum())
        else:
            found = policy_losses(recipe, logprobs_T=logprobs_T, old_T=here(lesson.old_T),
                                  advantages_T=here(lesson.advantages_T), mask_T=mask_T,
                                  sequence_T=sequence_T, num_seqs=own.num_seqs)
            losses_T = found.losses_T
            sums[:len(DIAGNOSTICS)] += found.sums.cpu()
        if recipe.kl == "loss":
            assert lesson.ref_T is not None
            kl_T = kl_losses(recipe.kl_estimator, logprobs_T=logprobs_T,
                             ref_logprobs_T=here(lesson.ref_T), mask_T=mask_T)
            losses_T = losses_T + recipe.kl_beta * kl_T
            sums[-1] += kl_T.detach().double().sum().cpu()
        if entropy_T is not None:
            at_T = part.at_actions(entropy_T)
            losses_T = losses_T + entropy_bonus(at_T, mask_T=mask_T, coefficient=recipe.entropy)
            sums[-2] += only(at_T, mask_T).detach().double().sum().cpu()
        return weighted_sum(losses_T, weights_T=here(weights_T))


@torch.no_grad()
def pair_slopes(recipe: Recipe, experience: Experience, now_T: Tensor, ref_T: Tensor,
                chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, dict[str, float]]:
    """DPO's loss of pairs, and its slope in each sequence's log-probability, negated: with these as
    advantages the policy gradient is DPO's gradient, and the two sequences of a pair need not meet
    in a micro-batch, nor on a rank.

    Args:
        now_T: the policy's log-probabilities at actions.

    Returns:
        (float32 [T], metrics).
    """
    with torch.enable_grad():
        mask_T, sequence_T = experience.is_action_T, experience.sequence_T
        both = [sequence_sums(x_T, mask_T=mask_T, sequence_T=sequence_T,
                              num_seqs=experience.num_seqs) for x_T in (now_T, ref_T)]
        now_S = both[0].detach().requires_grad_()
        pairs = dpo(chosen_P=now_S[chosen_P], rejected_P=now_S[rejected_P],
                    ref_chosen_P=both[1][chosen_P], ref_rejected_P=both[1][rejected_P],
                    beta=recipe.beta, kind=recipe.dpo_loss)
        loss = pairs.losses_P.mean()
        (slope_S,) = torch.autograd.grad(loss, now_S)
    right = float((pairs.margins_P > 0).float().mean())
    return -only(slope_S[sequence_T], mask_T), {
        "dpo_loss": float(loss), "dpo_margin": float(pairs.margins_P.mean()),
        "dpo_accuracy": right}


@dataclass
class CriticReport:
    """What a critic's minibatch was."""

    loss: float
    grad_norm: float
    clipped: float


@dataclass
class Critic(Learner):
    """Values of states, for generalised advantage estimation."""

    recipe: Recipe = field(kw_only=True)

    def values(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """(float32 [T], of the state each action was taken in, at the action, NaN elsewhere;
        float32 [S], of the state after a sequence's last token, 0 where nothing is to come)."""
        rows_T = rows_of(self.spread, experience, self.token_budget, value_rows)
        last_S = rows_T[experience.cu_seqlens_S1[1:].long() - 1]
        goes_on_S = experience.truncated_S & self.recipe.bootstrap
        return at_actions(experience, rows_T), only(last_S, goes_on_S)

    def learn(self, lesson: Lesson, *, factor: float, phase: Phase) -> CriticReport:
        """One step on a whole lesson: the mean loss over its tokens."""
        recipe, experience = self.recipe, lesson.experience
        tokens = max(int(lesson.mask_T.sum()), 1)
        mine = deal(self.spread, experience, self.token_budget)
        clipped = torch.zeros(1, dtype=torch.float64)

        def losses(forward: Callable[..., Any], batch: Batch, targets_T: Tensor, k: int) -> Tensor:
            part, rows_T = mine[k], value_rows(forward, batch, targets_T)
            if part.experience is None:
                found: Tensor = rows_T.sum() * 0.0
                return found
            where = places(experience, part)
            assert lesson.values_T is not None and lesson.returns_T is not None
            losses_T, cut = value_losses(
                values_T=part.at_actions(rows_T), old_values_T=lesson.values_T[where].to(rows_T),
                returns_T=lesson.returns_T[where].to(rows_T),
                mask_T=lesson.mask_T[where].to(rows_T.device), clip=recipe.value_clip or None)
            clipped.add_(cut.cpu())
            return recipe.value_weight * losses_T.sum() / tokens

        loss, norm = self._descend(mine, losses, factor, phase)
        return CriticReport(loss, norm, float(self._sums(clipped)) / tokens)


@dataclass
class Frozen:
    """A model that nobody steps: the reference, or a reward model."""

    spread: Spread
    token_budget: int

    @property
    def device(self) -> torch.device:
        return torch.device(self.spread.mesh.device_type)

    def logprobs(self, experience: Experience, temperature: float) -> Tensor:
        """As `Policy.logprobs`."""
        return at_actions(experience, rows_of(
            self.spread, experience, self.token_budget, logprob_rows(temperature)))

    def verdicts(self, experience: Experience) -> Tensor:
        """float32 [S]: a reward model's value at the last token of each sequence."""
        rows_T = rows_of(self.spread, experience, self.token_budget, value_rows)
        return rows_T[experience.cu_seqlens_S1[1:].long() - 1]
