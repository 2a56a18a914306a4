"""`RLJob`: everything a run of reinforcement learning is told (see docs/rl.md).

    output = "runs/sums"
    algorithm = "grpo"
    steps = 50
    [model]
    path = "smollm2-135m"
    [task.gym]
    dataset = "chain_sum"
    [[rewards]]
    kind = "reasoning_gym"
    [rollout]
    prompts = 8
    samples = 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from kilter.job import FilePath
from kilter.mesh.layout import Layout
from kilter.parallel.context.plan import ContextConfig
from kilter.parallel.pipeline.executor import PipelineConfig
from kilter.parallel.recompute import Recompute
from kilter.rl.algorithms import ALGORITHMS, Recipe, RecipeConfig
from kilter.rl.placement import PlacementConfig
from kilter.rl.rewards.config import RewardConfig, build_rewards
from kilter.rl.rollout import RolloutConfig, check_params
from kilter.rl.tasks import TaskConfig
from kilter.serve.engine_config import EngineConfig
from kilter.serve.params import SamplingParams
from kilter.train.checkpoint import CheckpointConfig
from kilter.train.config import LaunchConfig, ModelConfig, Precision
from kilter.train.lora import LoraConfig
from kilter.train.optimizer import OptimizerConfig
from kilter.train.schedule import ScheduleConfig

PromptFormat = Literal["chat", "text"]
Gate = Literal["training", "pass", "off"]

EXACT_CONTEXT = ContextConfig("all_gather", "zigzag")  # a ring's bits are not the rollout's


@dataclass(frozen=True)
class SamplingConfig:
    """What a step samples, and how.

    Attributes:
        prompts: of a step.
        samples: of each prompt.
        max_tokens: of an answer, over all its turns.
        temperature: of sampling, and of every log-probability of the run.
        stop: texts that end an answer.
        format: how a task's messages become tokens: by the model's ``chat`` template, or as
            ``text``, one after the other.
        environment: "package.module:name" of a function (rollout, tokenizer) -> what follows a
            stop: tokens, a text, or None where the answer is over.
        tp: ranks that a rollout replica is spread over.
        engine: sizes of the engine's cache and of its steps.
    """

    prompts: int = 8
    samples: int = 8
    max_tokens: int = 256
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    format: PromptFormat = "chat"
    environment: str | None = None
    tp: int = 1
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        problems = [f"{name} is {getattr(self, name)} but must be at least 1"
                    for name in ("prompts", "samples", "tp") if getattr(self, name) < 1]
        if self.format not in get_args(PromptFormat):
            problems.append(f"format is {self.format!r} but must be chat or text")
        try:
            check_params(self.params())
        except ValueError as error:
            problems.append(str(error).rstrip("."))
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature,
                              stop=self.stop)


@dataclass(frozen=True)
class UpdateConfig:
    """How a step learns from its experience.

    Attributes:
        epochs: times it goes through all of it.
        minibatches: optimizer steps in each.
        token_budget: tokens of a micro-batch, of which one that samples share counts once; 0: 2048,
            or the longest sequence if that is longer.
        max_norm: what the gradient's norm is clipped to; 0: not at all.
        gate: where rollout and trainer are compared, token by token: in the ``training`` forward
            of the first minibatch, which costs nothing; in a ``pass`` over all before it; ``off``.
    """

    epochs: int = 1
    minibatches: int = 1
    token_budget: int = 0
    max_norm: float = 1.0
    gate: Gate = "training"

    def __post_init__(self) -> None:
        problems = [f"{name} is {getattr(self, name)} but must be at least 1"
                    for name in ("epochs", "minibatches") if getattr(self, name) < 1]
        if self.token_budget < 0 or self.max_norm < 0.0:
            problems.append(f"token_budget is {self.token_budget} and max_norm {self.max_norm}, "
                            "but neither may be negative")
        if self.gate not in get_args(Gate):
            problems.append(f"gate is {self.gate!r} but must be {', '.join(get_args(Gate))}")
        if problems:
            raise ValueError("; ".join(problems) + ".")


@dataclass(frozen=True)
class CriticConfig:
    """The critic of PPO.

    Attributes:
        path: a reward model (or another model) it starts from; default the actor's model.
        optimizer: its own.
        layout: its own; default the actor's.
        warmup: steps in which the critic learns alone.
    """

    path: str | None = None
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    layout: Layout | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup} but must not be negative.")


@dataclass(frozen=True)
class ReferenceConfig:
    """The model that the divergence is measured from, where the recipe has one.

    Attributes:
        path: default the actor's own starting point.
        layout: of its ranks; default the actor's.
    """

    path: str | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class RewardModelConfig:
    """A model that judges answers, beside the rewards that verify them.

    Attributes:
        path: a folder of a sequence classifier with one label.
        weight: of its reward in the total.
        layout: of its ranks; default the actor's.
    """

    path: str
    weight: float = 1.0
    layout: Layout | None = None


@dataclass(frozen=True)
class EvalConfig:
    """How often held-out prompts are answered and judged, beside before the first step and after
    the last.

    Attributes:
        every: steps between two; 0: only then.
        prompts: of the held-out split that are asked; 0: none, and no evaluation at all.
        samples: of each.
    """

    every: int = 0
    prompts: int = 0
    samples: int = 1

    def __post_init__(self) -> None:
        if self.every < 0 or self.prompts < 0 or self.samples < 1:
            raise ValueError(f"every is {self.every}, prompts {self.prompts} and samples "
                             f"{self.samples}; the first two may not be negative, and samples must "
                             "be at least 1.")
        if self.every and not self.prompts:
            raise ValueError("every is set, but prompts is 0; say how many held-out prompts are "
                             "asked.")


@dataclass(frozen=True)
class LogConfig:
    """What a run tells.

    Attributes:
        every: steps between two lines on the console and in ``metrics.jsonl``.
        samples: rollouts of a told step that are written to ``rollouts.jsonl``.
        tensorboard: write ``tensorboard/`` (needs the extra ``tensorboard``).
    """

    every: int = 1
    samples: int = 4
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.every < 1 or self.samples < 0:
            raise ValueError(f"every is {self.every} but must be at least 1, and samples "
                             f"{self.samples} may not be negative.")


@dataclass(frozen=True)
class RLJob:
    """A run of reinforcement learning.

    Attributes:
        output: folder of checkpoints, metrics, rollouts and the finished model.
        algorithm: a name of `kilter.rl.algorithms.ALGORITHMS`.
        recipe: what differs from the algorithm's own settings.
        steps: each samples, judges and learns once; 0: held-out prompts are answered and judged,
            and nothing is learned or saved.
        seed: of a new model's weights, of the order of prompts and of all sampling.
        precision: as for training: what the trainer computes with and the rollout holds.
        context: as for training, of all roles' layouts with cp.
        export: write the finished model to ``output/model``.
        lora: train adapters; the reference is then the model without them.
    """

    output: FilePath
    model: ModelConfig
    task: TaskConfig
    steps: int
    rewards: tuple[RewardConfig, ...] = ()
    algorithm: str = "grpo"
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    rollout: SamplingConfig = field(default_factory=SamplingConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    critic: CriticConfig | None = None
    reward_model: RewardModelConfig | None = None
    reference: ReferenceConfig | None = None
    seed: int = 0
    precision: Precision = "fp32"
    export: bool = True
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(
        lr=1e-6, weight_decay=0.0))
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    layout: Layout = field(default_factory=Layout)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = EXACT_CONTEXT
    recompute: Recompute = field(default_factory=Recompute)
    lora: LoraConfig | None = None
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=20))
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        problems = []
        if not self.output:
            problems.append("output is empty; name a folder")
        if self.steps < 0:
            problems.append(f"steps is {self.steps} but must not be negative")
        elif self.steps == 0 and not self.eval.prompts:
            problems.append("steps is 0, which only asks held-out prompts, but eval.prompts is 0; "
                            "say how many are asked, or take steps")
        if self.algorithm not in ALGORITHMS:
            problems.append(f"algorithm is {self.algorithm!r} but must be one of "
                            f"{', '.join(ALGORITHMS)}")
        else:
            problems += self._recipe_problems()
        if not self.rewards and self.reward_model is None:
            problems.append("there is no reward; give at least one of [[rewards]], or a "
                            "reward_model")
        try:
            build_rewards(self.rewards)
        except ValueError as error:
            problems.append(str(error).rstrip("."))
        problems += self._layout_problems()
        if problems:
            raise ValueError("; ".join(problems) + ".")

    @property
    def made(self) -> Recipe:
        """The algorithm with this job's changes."""
        return self.recipe.over(self.algorithm, self.rollout.max_tokens)

    def layout_of(self, role: str) -> Layout:
        """Of the critic, the reference or the reward model: what the job says; else the actor's on
        its ranks, and replicas (ZeRO 3 if there are several) on ranks of its own."""
        part = getattr(self, role, None)
        if part is not None and part.layout is not None:
            return part.layout
        ranks = len(self.placement.ranks_of(role, self.layout.world))
        if not getattr(self.placement, role):
            return self.layout
        return Layout(dp=ranks, zero=3 if ranks > 1 else 0)

    def rollout_config(self, eos_token_ids: Sequence[int] = ()) -> RolloutConfig:
        """``eos_token_ids``: those of the actor's model (`ModelSource`): an answer ends in RL with
        the tokens it will end with when the model is served."""
        engine = self.rollout.engine
        engine = replace(engine, eos_token_ids=(*engine.eos_token_ids, *eos_token_ids))
        return RolloutConfig(self.precision, self.model.kv_dtype, self.model.exact,
                             self.model.products, self.lora, engine)

    def _recipe_problems(self) -> list[str]:
        problems = []
        try:
            recipe = self.made
        except ValueError as error:
            return [f"recipe: {str(error).rstrip('.')}"]
        kept = recipe.reference and self.lora is None  # as a model of its own
        problems += self.placement.problems(recipe.critic, kept, self.reward_model is not None)
        if self.reference is not None and not kept:
            problems.append("there is a [reference], but " + (
                "with [lora] the reference is the model without its adapters" if recipe.reference
                else f"this {self.algorithm} has no use for one (see recipe.kl)")
                + "; leave it out")
        if recipe.critic != (self.critic is not None):
            problems.append(f"{self.algorithm} has {'a' if recipe.critic else 'no'} critic; "
                            + ("add [critic]" if recipe.critic else "leave [critic] out"))
        if recipe.groups and self.rollout.samples < 2:
            problems.append(f"{self.algorithm} compares the samples of a prompt, but "
                            f"rollout.samples is {self.rollout.samples}; take at least 2")
        if self.update.minibatches > self.rollout.prompts * self.rollout.samples:
            problems.append(f"update.minibatches is {self.update.minibatches}, more than the "
                            f"{self.rollout.prompts * self.rollout.samples} sequences of a step")
        return problems

    def _layout_problems(self) -> list[str]:
        layout = self.layout
        roles = {"": self, "critic.": self.critic, "reference.": self.reference,
                 "reward_model.": self.reward_model}
        layouts = {where: part.layout for where, part in roles.items()
                   if part is not None and part.layout is not None}
        problems = [f"{where}layout.{name} is {getattr(own, name)}, but here nothing is spread "
                    f"over experts yet; it must be 1" for where, own in layouts.items()
                    for name in ("ep", "etp") if getattr(own, name) != 1]
        spread = [f"{where}layout.cp" for where, own in layouts.items() if own.cp > 1]
        if spread and self.context.method == "ring" and self.model.exact:
            problems.append(
                f"context.method is ring, and with {' and '.join(spread)} above 1 its "
                "log-probabilities are the rollout's only within rounding, which no check could "
                "tell from a fault; set context.method = \"all_gather\", or \"ulysses\" (with "
                "context.placement = \"contiguous\"), or model.exact = false")
        if not spread and self.context != EXACT_CONTEXT:
            problems.append("context is set, but no layout has cp above 1; leave it out, or set "
                            "layout.cp")
        if layout.pp == 1 and self.pipeline != PipelineConfig():
            problems.append("pipeline is set, but layout.pp is 1; leave it out, or set layout.pp")
        ranks = len(self.placement.ranks_of("rollout", layout.world))
        if ranks % self.rollout.tp:
            problems.append(f"rollout.tp is {self.rollout.tp}, which does not divide the {ranks} "
                            "ranks that roll out")
        for role in ("critic", "reward_model", "reference"):
            there = len(self.placement.ranks_of(role, layout.world))
            if getattr(self, role) is not None and (own := self.layout_of(role).world) != there:
                problems.append(f"{role}.layout has {own} ranks, but {there} are placed for it; "
                                f"give {role}.layout for {there}")
        return problems
