"""The roles of a run on their ranks: who samples, judges, remembers and learns.

Every rank makes a `Roles` and calls its methods together with all others; a role's own ranks do the
work, and the result comes to all. Where roles share the actor's ranks (the default) nothing has to
be told to anybody, since all have done it. What is wrong with a job or its data (`SAID`) is raised
on every rank, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.objects import raise_first, share_result
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.spec import ModelSpec
from kilter.models.value import add_value_head
from kilter.ops.packed import FLOATS
from kilter.parallel.apply import Spread, apply, make_groups
from kilter.parallel.checksum import weights_checksum
from kilter.parallel.shards import Shard
from kilter.rl.config import RLJob
from kilter.rl.environment import environment_of
from kilter.rl.experience import Experience, Rollout
from kilter.rl.failures import SAID
from kilter.rl.judging import close_rewards, judged
from kilter.rl.learners import Critic, CriticReport, Frozen, Policy, PolicyReport
from kilter.rl.lesson import Lesson
from kilter.rl.prompts import Question
from kilter.rl.reshard import RolloutWeights, WeightSync, gather_holdings
from kilter.rl.reshard_layout import rollout_formats, rollout_parts
from kilter.rl.reshard_plan import Plan, make_plan
from kilter.rl.rewards import WeightedReward, build_rewards
from kilter.rl.rewards.score import TOTAL
from kilter.rl.rollout import RolloutEngine
from kilter.serve.params import SamplingParams
from kilter.tokens import Tokenizer
from kilter.train.inputs import Start
from kilter.train.lora import add_adapters
from kilter.train.optimizer import Optimizer
from kilter.train.peft import start_adapters
from kilter.train.step import Phase
from kilter.weights.bridge import ModelSource

T = TypeVar("T")

MODEL_REWARD = "reward_model"


@dataclass(frozen=True)
class RLInputs:
    """What a run starts from.

    Attributes:
        start: the actor's model and tokenizer.
        critic, reward, reference: the models that the job names for these, if it does.
    """

    start: Start
    critic: ModelSource | None = None
    reward: ModelSource | None = None
    reference: ModelSource | None = None


class Roles:
    """All of a job's roles, of which this rank has some.

    Args:
        device_type: ``cpu`` or ``cuda``.
    """

    def __init__(self, job: RLJob, inputs: RLInputs, device_type: str,
                 timeout: timedelta | None = None) -> None:
        self.job, self._inputs, self.device_type, self._timeout = (
            job, inputs, device_type, timeout)
        self.recipe = job.made
        spec, tokenizer = inputs.start.spec, inputs.start.tokenizer
        self.tokenizer: Tokenizer = tokenizer
        self.context = job.rollout.engine.context_of(spec.max_positions)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        inside = job.placement.inside(job.layout.world)
        self.world = self._mesh(Layout(dp=inside), range(inside)).axis("world")
        self._meshes = self._make_meshes()
        self.policy: Policy | None = None
        self.critic: Critic | None = None
        self.reference: Frozen | None = None
        self.reward_model: Frozen | None = None
        self.engine: RolloutEngine | None = None
        self._rewards: tuple[WeightedReward, ...] = ()
        if self._has("actor"):
            self.policy = self._make_policy()
        if self._learns_with("critic") and self._has("critic"):
            self.critic = self._make_critic()
        if self._learns_with("reference") and self._has("reference"):
            other = inputs.reference
            self.reference = Frozen(self._frozen(
                "reference", spec if other is None else other.spec, other or inputs.start.source),
                self._budget)
        if job.reward_model is not None and self._has("reward_model"):
            assert inputs.reward is not None
            self.reward_model = Frozen(self._frozen("reward_model", inputs.reward.spec,
                                                    inputs.reward, values=True), self._budget)
        if self._has("rollout"):
            config = job.rollout_config(inputs.start.eos_token_ids)
            self.engine = RolloutEngine(spec, tokenizer, config, self._meshes["rollout"])
            self._rewards = build_rewards(job.rewards)
        self.start_checksum: str = self._tell(
            "actor", lambda: weights_checksum(_made(self.policy).spread))
        self._environment = environment_of(job.rollout.environment, tokenizer, spec.vocab_size)
        self._movers: Axis | None = None  # ranks between which weights move, if this is one
        self._adapters: Plan | None = None
        self._version: int | None = None  # that the rollout has
        self._report: RolloutWeights | None = None
        self._sync = self._make_sync()

    # ---- weights ----

    def send_weights(self, version: int) -> RolloutWeights | None:
        """The actor's weights to the rollout's ranks, unless this version is there already; what
        that was, everywhere."""
        if version != self._version:
            report = self._send(version)
            self._version, self._report = version, self._tell("actor", lambda: report)
        return self._report

    def _send(self, version: int) -> RolloutWeights | None:
        if self._sync is None:
            return None
        local = {} if self.policy is None else self.policy.spread.local
        tensors = {name: (parameter.detach(), shard) for name, (parameter, shard) in local.items()}
        parts = self._sync.send(tensors, version)
        if self.engine is not None:
            self.engine.update(parts, version)
        else:
            for _ in parts:
                pass
        report = self._sync.report
        if self._adapters is not None and self._movers is not None:
            # From the second time on only what has been trained.
            self._sync, self._adapters = WeightSync(self._adapters, self._movers), None
        return report

    # ---- sampling and judging ----

    def sample(self, questions: Sequence[Question], step: int, params: SamplingParams,
               ahead: Callable[[int], Question] | None = None) -> list[Rollout]:
        """All questions' samples with their rewards, in order.

        Args:
            ahead: the questions that will follow these, for rollouts that go on while the trainer
                learns; here they do not.
        """

        def work() -> list[Rollout]:
            engine = self.engine
            assert engine is not None
            engine.wake()
            by_id = {question.prompt.id: question for question in questions}
            mine: list[Rollout] = []
            failure: Exception | None = None
            try:
                found = engine.generate(engine.share([q.prompt for q in questions]), params,
                                        seed=self.job.seed, step=step,
                                        environment=self._environment)
                mine = judged(found, by_id, self._rewards, self.tokenizer, engine.mesh.axis("tp"))
            except SAID as error:
                failure = error
            engine.sleep()
            raise_first(failure, engine.mesh.axis("dp"))
            return engine.gather(mine)

        return self._tell("rollout", work)

    def judge(self, experience: Experience) -> Experience:
        """The same with the reward model's verdicts, where there is one."""
        config = self.job.reward_model
        if config is None:
            return experience
        verdict_S = self._tell("reward_model",
                               lambda: _made(self.reward_model).verdicts(experience))
        total_S = experience.rewards[TOTAL] + config.weight * verdict_S
        return experience.with_reward(MODEL_REWARD, verdict_S).with_reward(TOTAL, total_S)

    # ---- looking and learning ----

    def logprobs(self, experience: Experience) -> Tensor:
        """The actor's, float32 [T] at actions."""
        return self._tell("actor", lambda: _made(self.policy).logprobs(experience))

    def reference_logprobs(self, experience: Experience) -> Tensor:
        if self.job.lora is not None:
            return self._tell("actor", lambda: _made(self.policy).reference_logprobs(experience))
        return self._tell("reference", lambda: _made(self.reference).logprobs(
            experience, self.job.rollout.temperature))

    def values(self, experience: Experience) -> tuple[Tensor, Tensor]:
        return self._tell("critic", lambda: _made(self.critic).values(experience))

    def learn(self, lesson: Lesson, factor: float, version: int | None, phase: Phase
              ) -> PolicyReport:
        """One step of the actor."""
        return self._tell("actor", lambda: _made(self.policy).learn(
            lesson, factor=factor, version=version, phase=phase))

    def learn_values(self, lesson: Lesson, factor: float, phase: Phase) -> CriticReport:
        """One step of the critic."""
        return self._tell("critic", lambda: _made(self.critic).learn(
            lesson, factor=factor, phase=phase))

    def told(self) -> dict[str, Any]:
        """What a step's metrics say of rollouts beside what is in its experience."""
        return {}

    def close(self) -> None:
        """Ends the processes that judge answers."""
        close_rewards(self._rewards)

    # ---- making ----

    @property
    def _budget(self) -> int:
        return self.job.update.token_budget

    def _ranks(self, role: str) -> range:
        return self.job.placement.ranks_of(role, self.job.layout.world)

    def _has(self, role: str) -> bool:
        return self._rank in self._ranks(role)

    def _learns_with(self, role: str) -> bool:
        """Whether there is a critic, or a reference that is a model of its own."""
        needed = {"critic": self.recipe.critic,
                  "reference": self.recipe.reference and self.job.lora is None}
        return self.job.steps > 0 and needed[role]

    def _mesh(self, layout: Layout, ranks: range) -> Mesh:
        if not dist.is_initialized():
            return Mesh(layout, self.device_type, alone=True)
        return Mesh(layout, self.device_type, timeout=self._timeout, ranks=ranks)

    def _make_meshes(self) -> dict[str, Mesh]:
        """Of every role there is, and of the ranks between which weights move: made by all ranks in
        one order, with all groups their work will ask for."""
        job, inputs = self.job, self._inputs
        spec = inputs.start.spec
        wanted: dict[str, tuple[Layout, range, ModelSpec]] = {
            "actor": (job.layout, self._ranks("actor"), spec)}
        if self._learns_with("critic"):
            source = inputs.critic
            wanted["critic"] = (job.layout_of("critic"), self._ranks("critic"),
                                spec if source is None else source.spec)
        if self._learns_with("reference"):
            source = inputs.reference
            wanted["reference"] = (job.layout_of("reference"), self._ranks("reference"),
                                   spec if source is None else source.spec)
        if inputs.reward is not None:
            wanted["reward_model"] = (job.layout_of("reward_model"), self._ranks("reward_model"),
                                      inputs.reward.spec)
        if not job.placement.apart:
            ranks, tp = self._ranks("rollout"), job.rollout.tp
            wanted["rollout"] = (Layout(dp=len(ranks) // tp, tp=tp, sequence_parallel=False),
                                 ranks, spec)
            movers = range(ranks.stop)
            wanted["movers"] = (Layout(dp=len(movers)), movers, spec)
        made = {}
        for name, (layout, ranks, of) in wanted.items():
            made[name] = self._mesh(layout, ranks)
            make_groups(of, made[name], job.pipeline)
        return made

    def _decoder(self, spec: ModelSpec) -> Decoder:
        model = self.job.model
        with torch.device("meta"):
            return Decoder(spec, exact=model.exact, kv_dtype=FLOATS[model.kv_dtype],
                           products=model.products, max_positions=self.context)

    def _actor(self) -> Decoder:
        """The actor's model, with its adapters."""
        model = self._decoder(self._inputs.start.spec)
        if self.job.lora is not None:
            add_adapters(model, self.job.lora)
        return model

    def _spread(self, model: Decoder, layout: Layout, role: str) -> Spread:
        return apply(model, self._meshes[role], recompute=self.job.recompute,
                     weights=FLOATS[self.job.precision],
                     pipeline=self.job.pipeline if layout.pp > 1 else None,
                     context=self.job.context)

    def _make_policy(self) -> Policy:
        job, start = self.job, self._inputs.start
        spread = self._spread(self._actor(), job.layout, "actor")
        optimizer = Optimizer(spread.held, job.optimizer, spread.mesh.axis("dp_cp_tp"))
        self._fill(spread, start.source)
        if job.lora is not None:
            start_adapters(spread, job.lora)
        optimizer.reloaded()
        return Policy(spread, optimizer, self._budget, job.update.max_norm or None,
                      recipe=self.recipe, temperature=job.rollout.temperature)

    def _make_critic(self) -> Critic:
        job, start = self.job, self._inputs.start
        assert job.critic is not None
        source = self._inputs.critic or start.source
        spec = start.spec if source is None else source.spec
        model = self._decoder(spec)
        add_value_head(model)
        spread = self._spread(model, job.layout_of("critic"), "critic")
        optimizer = Optimizer(spread.held, job.critic.optimizer, spread.mesh.axis("dp_cp_tp"))
        self._fill(spread, source)
        optimizer.reloaded()
        return Critic(spread, optimizer, self._budget, job.update.max_norm or None,
                      recipe=self.recipe)

    def _frozen(self, role: str, spec: ModelSpec, source: ModelSource | None, values: bool = False
                ) -> Spread:
        model = self._decoder(spec)
        if values:
            add_value_head(model)
        model.requires_grad_(False)
        spread = self._spread(model, self.job.layout_of(role), role)
        self._fill(spread, source)
        return spread

    def _fill(self, spread: Spread, source: ModelSource | None) -> None:
        spread.initialise(self.job.seed, self.job.model.std)
        if source is not None:
            spread.load(source)

    def _make_sync(self) -> WeightSync | None:
        """The way of the weights, on the ranks that train or roll out."""
        rollout = self._ranks("rollout")
        ranks = range(rollout.stop)
        if self._rank not in ranks:
            return None
        self._movers = self._meshes["movers"].axis("world")
        held = gather_holdings({} if self.policy is None else self.policy.spread.local,
                               self._movers)
        parts, formats = self._replica()
        nothing: dict[str, Shard] = {}
        needed = [parts[(rank - rollout.start) % len(parts)] if rank in rollout else nothing
                  for rank in ranks]
        if self.job.lora is not None:
            self._adapters = make_plan(held, needed, formats, adapters_only=True)
        return WeightSync(make_plan(held, needed, formats), self._movers)

    def _replica(self) -> tuple[list[dict[str, Shard]], dict[str, torch.dtype]]:
        """What each rank of a rollout replica has of the actor, and in which formats."""
        whole = self._actor()
        return (rollout_parts(whole, self.job.rollout.tp),
                rollout_formats(whole, FLOATS[self.job.precision]))

    # ---- telling ----

    def _tell(self, role: str, work: Callable[[], T]) -> T:
        """A role's work on its ranks, and its result on all, or what they raise of `SAID`."""
        ranks = self._ranks(role)
        if len(ranks) == self.world.size:
            return work()
        return share_result(work if self._rank in ranks else None, self.world, ranks.start, SAID)


def _made(role: T | None) -> T:
    assert role is not None  # only its own ranks are asked
    return role


def world_of(job: RLJob, axis: Axis) -> str:
    """The placement as a line."""
    parts = [f"actor on {job.layout.world} ({job.layout})"]
    parts += [f"{role} on {n}" for role in ("rollout", "critic", "reference", "reward_model")
              if (n := getattr(job.placement, role))]
    return f"{axis.size} ranks: " + ", ".join(parts) if axis.size > 1 else str(job.layout)
