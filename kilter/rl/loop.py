"""The loop of a run: send weights, sample, judge, look, learn, check, tell. Written once, whatever
the algorithm and wherever the roles are.

    output/
      checkpoints/step-…/    policy, critic, optimizers, and the place in the prompts
      metrics.jsonl, rollouts.jsonl, tensorboard/
      model/, adapter/       the finished model

All randomness is a function of the seed, the step and a sample's name, so a run that is resumed is
the run that was not: the step's number, the place in the prompts and the KL weight are the only
state beside the tensors.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter import __version__
from kilter.comm.collectives import all_reduce_max
from kilter.job import dump
from kilter.ops.packed import FLOATS
from kilter.rl.advantages import informative
from kilter.rl.algorithms import Recipe
from kilter.rl.config import RLJob
from kilter.rl.experience import Experience
from kilter.rl.gate import agreement
from kilter.rl.learners import CriticReport, PolicyReport, pair_slopes
from kilter.rl.lesson import Lesson, make_lesson, shaped_rewards
from kilter.rl.monitor import Monitor
from kilter.rl.preference import preference_pairs
from kilter.rl.prompts import Prompts, Question
from kilter.rl.reshard import RolloutWeights
from kilter.rl.rewards.score import TOTAL
from kilter.rl.roles import RLInputs, Roles, world_of
from kilter.rl.step_metrics import divergence, lesson_metrics, shown_rollouts, update_metrics
from kilter.rl.tasks import build_task
from kilter.train.checkpoint import (
    Checkpointer,
    CheckpointError,
    load_tensors,
    read_facts,
)
from kilter.train.config import steered
from kilter.train.data.order import Permutation
from kilter.train.export import export_model
from kilter.train.loop import Ending, last_checkpoint
from kilter.train.peft import told_of_start
from kilter.train.pieces import Pieces, pieces_of

# What may differ between a checkpoint's job and the one that goes on from it.
FREE = ("output", "steps", "export", "layout", "pipeline", "context", "recompute", "placement",
        "checkpoint", "eval", "log", "launch")


class RLRun:
    """A job on its way, in one rank.

    Args:
        closing: what the run opens is closed with this.
    """

    def __init__(self, job: RLJob, inputs: RLInputs, roles: Roles, closing: ExitStack) -> None:
        self.job, self.inputs, self.roles = job, inputs, roles
        self.recipe: Recipe = job.made
        self.output = Path(job.output)
        closing.callback(roles.close)
        samples, format = job.rollout.samples, job.rollout.format
        self.prompts = Prompts(build_task(job.task), roles.tokenizer, samples=samples,
                               format=format, seed=job.seed)
        self.held_out = None
        if job.eval.prompts:
            self.held_out = Prompts(build_task(job.task, "held_out"), roles.tokenizer, seed=None,
                                    samples=job.eval.samples, format=format, name="held-out-")
        self.checkpointer = Checkpointer(self.output / "checkpoints", job.checkpoint, roles.world)
        closing.callback(self.checkpointer.close)
        self.step = self.place = 0  # steps taken, prompts used
        self.kl = self.recipe.kl_controller()
        self._saved = -1
        resumed = self._restore()
        spreads = [role.spread for role in (roles.policy, roles.critic) if role is not None]
        meshes = [spread.mesh for spread in spreads]
        if roles.engine is not None:
            meshes.append(roles.engine.mesh)
        self.monitor = Monitor(
            self.output, job.log, meshes, roles.world, torch.device(roles.device_type),
            self.step if resumed else None, job.steps)
        closing.callback(self.monitor.close)
        what = (f"{job.steps} steps of {job.rollout.prompts} prompts x {samples} samples"
                if job.steps else "held-out prompts only")
        self.monitor.say(f"Going on from the checkpoint of step {self.step}"
                         f"{steered(resumed['job'], dump(job))}." if resumed else
                         f"{job.algorithm} on {world_of(job, roles.world)}; {what}.")
        for line in [] if resumed else told_of_start(job.lora, inputs.start.spec):
            self.monitor.say(line)

    def go(self, stop: threading.Event) -> Ending:
        """Steps until the last, or until a rank was told to stop.

        Raises:
            Disagreement: where rollout and trainer should agree and do not.
        """
        job = self.job
        if self.step == 0:
            self.evaluate()
        if job.steps == 0:
            return Ending(0, False, f"Asked {job.eval.prompts} held-out prompts and learned "
                          f"nothing; the result is in {self.output / 'metrics.jsonl'}.")
        while self.step < job.steps:
            # A checkpoint that failed says so in `save`.
            told_to = stop.is_set() or self.monitor.unread or self.checkpointer.failed
            if all_reduce_max(torch.tensor([int(told_to)]), self.roles.world):
                self.save()
                self.checkpointer.wait()
                return Ending(self.step, True, f"Stopped after step {self.step} of {job.steps}; "
                              "the same command goes on from there.")
            with self.monitor.step(self.step + 1):
                told, rollouts = self.take_step()
            self.step += 1
            self.monitor.tell(self.step, told, rollouts)
            if self.step < job.steps:
                if job.eval.every and self.step % job.eval.every == 0:
                    self.evaluate()
                if job.checkpoint.every and self.step % job.checkpoint.every == 0:
                    self.save()
        return self._finish()

    # ---- a step ----

    def take_step(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One step; what is told of it, and its rollouts."""
        roles, monitor, version = self.roles, self.monitor, self.step
        with monitor.phase("weights"):
            sent = roles.send_weights(version)
        experience, sampled = self.sample(version)
        told, shown = self.learn(experience, version, sent)
        return {**told, **sampled}, shown

    def sample(self, step: int) -> tuple[Experience, dict[str, float]]:
        """A step's experience with rewards; and of all that was sampled for it, kept or not, the
        mean reward and how many rounds of prompts it took."""
        job, recipe = self.job, self.recipe
        kept: list[Experience] = []
        groups = rounds = sequences = 0
        total = 0.0
        while rounds < (recipe.dynamic_rounds if recipe.dynamic else 1):
            rounds += 1
            missing = job.rollout.prompts - groups
            questions = [self.prompts.at(self.place + i) for i in range(missing)]
            self.place += missing
            with self.monitor.phase("rollout"):
                rollouts = self.roles.sample(questions, step, job.rollout.params(),
                                             partial(self._following, self.place))
            with self.monitor.phase("judge"):
                found = self.roles.judge(Experience.of(rollouts))
            total += float(found.rewards[TOTAL].double().sum())
            sequences += found.num_seqs
            if not recipe.dynamic:
                break
            telling_S = informative(reward_S=self._rewards(found), group_S=found.group_S,
                                    valid_S=found.complete_S)
            if bool(telling_S.any()):
                kept.append(found.select(telling_S.nonzero()[:, 0]))
                groups += len(kept[-1].group_S.unique())
            if groups == job.rollout.prompts:
                break
        return (Experience.concat(kept) if kept else found), {
            "reward": total / sequences, "rounds": rounds}

    def _following(self, place: int, i: int) -> Question:
        return self.prompts.at(place + i)

    def learn(self, experience: Experience, version: int, sent: RolloutWeights | None
              ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Learns from a step's experience.

        Args:
            version: of the actor's weights.
        """
        job, recipe, roles, phase = self.job, self.recipe, self.roles, self.monitor.phase
        ref_T = values_T = bootstrap_S = now_T = None
        if recipe.reference:
            with phase("reference"):
                ref_T = roles.reference_logprobs(experience)
        if recipe.critic:
            with phase("values"):
                values_T, bootstrap_S = roles.values(experience)
        if job.update.gate == "pass" or recipe.correction != "none":
            with phase("gate"):
                now_T = roles.logprobs(experience)
        reward_S = self._rewards(experience)
        lesson = make_lesson(recipe, experience, reward_S, kl_beta=self.kl.beta, ref_T=ref_T,
                             values_T=values_T, bootstrap_S=bootstrap_S, now_T=now_T)
        told = lesson_metrics(lesson, reward_S, version)
        if now_T is not None and job.update.gate == "pass":
            self._check(told, experience, now_T, version)
        factor = job.schedule.factor(self.step, job.steps)
        told |= self._descend(lesson, reward_S, factor, version)
        self._tell_kl(told, lesson)
        told |= roles.told()
        told |= {"lr": job.optimizer.lr * factor}
        if sent is not None:
            told["sent"] = {"bytes": sum(sent.received_bytes), "seconds": sent.seconds,
                            "changed": sent.changed, "tensors": sent.tensors,
                            "checksum": f"{sent.checksum:016x}"}
        return told, shown_rollouts(lesson, roles.tokenizer, job.log.samples)

    def _descend(self, lesson: Lesson, reward_S: Tensor, factor: float, version: int
                 ) -> dict[str, Any]:
        """Epochs and minibatches of one lesson."""
        job, roles, phase = self.job, self.roles, self.monitor.phase
        told: dict[str, Any] = {}
        reports: list[PolicyReport] = []
        critic: list[CriticReport] = []
        units = self._units(lesson, reward_S)
        for epoch in range(job.update.epochs if units else 0):
            for number, chosen in enumerate(self._minibatches(units, epoch)):
                part = lesson.select(chosen)
                first = epoch == number == 0
                if self.recipe.loss == "dpo":
                    part, extra = self._pairs(part, reward_S[chosen], first)
                    told |= extra if first else {}
                if job.critic is not None:
                    with phase("learn values"):
                        critic.append(roles.learn_values(part, factor, phase))
                    if self.step < job.critic.warmup:
                        continue
                gate = first and job.update.gate == "training"
                with phase("learn"):
                    report = roles.learn(part, factor, version if gate else None, phase)
                if report.agreement is not None:
                    told["gate"] = self._agreed(report.agreement)
                reports.append(report)
        return told | update_metrics(self.recipe, reports, critic)

    def _units(self, lesson: Lesson, reward_S: Tensor) -> list[list[int]]:
        """What a minibatch is made of: sequences, or pairs of them."""
        experience = lesson.experience
        if self.recipe.loss != "dpo":
            return [[s] for s in range(experience.num_seqs)]
        both = preference_pairs(reward_S=reward_S, group_S=experience.group_S,
                                valid_S=experience.complete_S)
        return [list(pair) for pair in zip(*(x.tolist() for x in both), strict=True)]

    def _minibatches(self, units: list[list[int]], epoch: int) -> list[list[int]]:
        """Sequences of each minibatch of an epoch, ascending."""
        count = min(self.job.update.minibatches, len(units))
        order = np.arange(len(units))
        if count > 1:
            order = Permutation(len(units), self.job.seed, "minibatches", self.step, epoch)(order)
        return [sorted(s for unit in part for s in units[unit])
                for part in np.array_split(order, count)]

    def _pairs(self, part: Lesson, reward_S: Tensor, first: bool
               ) -> tuple[Lesson, dict[str, float]]:
        """With DPO's slopes as advantages. The policy's log-probabilities are those it sampled
        with, until it has learned."""
        experience = part.experience
        now_T = experience.logprobs_T
        fresh = bool((experience.version_T[experience.is_action_T] == self.step).all())
        if not (first and fresh and self.job.model.exact):
            now_T = self.roles.logprobs(experience)
        chosen_P, rejected_P = preference_pairs(
            reward_S=reward_S, group_S=experience.group_S, valid_S=experience.complete_S)
        assert part.ref_T is not None
        slopes_T, told = pair_slopes(self.recipe, experience, now_T, part.ref_T, chosen_P,
                                     rejected_P)
        return replace(part, advantages_T=slopes_T), told

    # ---- rewards, checks and what is told ----

    def _rewards(self, experience: Experience) -> Tensor:
        return shaped_rewards(self.recipe, experience, experience.rewards[TOTAL],
                              self.job.rollout.max_tokens)

    def _check(self, told: dict[str, Any], experience: Experience, now_T: Tensor, version: int
               ) -> None:
        told["gate"] = self._agreed(agreement(experience, now_T, version=version))

    def _agreed(self, found: Any) -> dict[str, float]:
        """What is told of the gate.

        Raises:
            Disagreement: on the exact path, unless it is exact.
        """
        if self.job.model.exact:
            found.check()
        return {"max": found.max_abs, "mean": found.mean_abs, "tokens": found.count,
                "skipped": found.skipped}

    def _tell_kl(self, told: dict[str, Any], lesson: Lesson) -> None:
        """The divergence from the reference, and the weight of the next step."""
        if lesson.ref_T is None:
            return
        sums, sequences = divergence(lesson, lesson.ref_T), lesson.experience.num_seqs
        tokens = max(int(lesson.mask_T.sum()), 1)
        told["kl"], told["kl_k1"] = sums["k3"] / tokens, sums["k1"] / tokens
        told["kl_beta"] = self.kl.beta
        self.kl = self.kl.updated(kl=sums["k1"] / sequences, count=sequences)

    # ---- evaluation, checkpoints, the end ----

    def evaluate(self) -> float | None:
        """Mean reward of held-out prompts, with the same random numbers every time; None if there
        are none."""
        if self.held_out is None:
            return None
        job = self.job
        with self.monitor.phase("evaluation"):
            self.roles.send_weights(self.step)
            questions = [self.held_out.at(i) for i in range(job.eval.prompts)]
            rollouts = self.roles.sample(questions, 0, job.rollout.params())
            found = self.roles.judge(Experience.of(rollouts))
        reward = float(found.rewards[TOTAL].mean())
        parts = {name: float(r_S.mean()) for name, r_S in found.rewards.items() if name != TOTAL}
        self.monitor.evaluated(self.step, reward, parts, job.eval.prompts)
        return reward

    def pieces(self) -> dict[str, Pieces]:
        """What a checkpoint holds of this rank."""
        found: dict[str, Pieces] = {}
        for prefix, learner in (("", self.roles.policy), ("critic.", self.roles.critic)):
            if learner is not None:
                found |= pieces_of(learner.spread.held, learner.optimizer.states(),
                                   f"{prefix}model", f"{prefix}optimizer")
        return found

    def save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self._saved == self.step:
            return
        with self.monitor.phase("checkpoint"):
            self.checkpointer.save(self.step, self.pieces(), {
                "place": self.place, "kl_beta": self.kl.beta, "steps": self.job.steps,
                "start": self.roles.start_checksum, "job": dump(self.job),
                "layout": str(self.job.layout),
                "versions": {"kilter": __version__, "torch": torch.__version__}})
        self._saved = self.step

    def _restore(self) -> dict[str, Any] | None:
        """Weights, states and place of the last whole checkpoint, whose facts it returns, if there
        is one."""
        checkpoint = last_checkpoint(self.job, FREE)
        if checkpoint is None:
            return None
        facts = read_facts(checkpoint)
        if facts["step"] > self.job.steps:
            raise CheckpointError(f"{checkpoint} is past the {self.job.steps} steps of this job. "
                                  "Ask for more steps, or name another output folder.")
        if facts["start"] != self.roles.start_checksum:
            raise CheckpointError(
                f"The run in {self.output} started from other weights than {self.job.model.path} "
                "has now, so its reference would be another one. Put the model back as it was, or "
                "name another output folder.")
        load_tensors(checkpoint, self.pieces(), self.roles.world)
        for learner in (self.roles.policy, self.roles.critic):
            if learner is not None:
                learner.spread.updated()
                learner.optimizer.reloaded()
        self.step = self._saved = facts["step"]
        self.place = facts["place"]
        self.kl = replace(self.kl, beta=facts["kl_beta"])
        return facts

    def _finish(self) -> Ending:
        if self._saved != self.step:  # else the run was finished before
            self.evaluate()
            self.save()
        self.checkpointer.wait()
        place = self.output / "checkpoints"
        if self.job.export:
            place = self.output / "model"
            if self.roles.policy is not None:
                export_model(self.roles.policy.spread, self.inputs.start, self.output,
                             FLOATS[self.job.precision], lora=self.job.lora,
                             base=self.job.model.path)
        return Ending(self.step, False, f"Finished {self.job.steps} steps; the result is in "
                      f"{place}.")
