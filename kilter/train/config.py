"""`TrainJob`: everything a training run is told, as the job file has it (see docs/training.md).

    output = "runs/shakespeare"
    steps = 200
    [model]
    path = "smollm2-135m"
    [data]
    seq_len = 512
    sources = [{ paths = ["shakespeare/*.txt"] }]
    [layout]
    dp = 2
    zero = 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kilter.job import FilePath
from kilter.mesh.layout import Layout
from kilter.parallel.context.plan import ContextConfig
from kilter.parallel.pipeline.executor import PipelineConfig
from kilter.parallel.recompute import Recompute
from kilter.train.checkpoint import CheckpointConfig
from kilter.train.data.config import ChatConfig, DataConfig
from kilter.train.lora import LoraConfig
from kilter.train.optimizer import OptimizerConfig
from kilter.train.preference.config import DpoConfig
from kilter.train.schedule import ScheduleConfig

Kind = Literal["pretrain", "sft", "reward", "dpo"]
OF_PAIRS: tuple[Kind, ...] = ("reward", "dpo")
Precision = Literal["fp32", "bf16"]
KVFormat = Literal["fp32", "bf16", "fp16"]
Products = Literal["fp32", "bf16"]
Device = Literal["auto", "cpu", "cuda"]
_YEAR = 365 * 24 * 3600  # seconds


@dataclass(frozen=True)
class ModelConfig:
    """What is trained: a model to start from, or a new one.

    Attributes:
        path: a pulled model's name, a folder or a .gguf file to start from.
        config: a new model instead: the path of a config.json, or a table of its fields; there,
            ``architectures`` is LlamaForCausalLM and ``vocab_size`` the tokenizer's unless said.
        tokenizer: a name, a folder or a .gguf file to take the tokenizer from; default ``path``.
        std: standard deviation of a new model's matrices.
        exact: the row-invariant arithmetic that the engine has; false takes torch's own kernels.
        kv_dtype: the format keys and values are rounded to before attention, as an engine that
            holds its cache so does.
        products: ``bf16`` rounds the factors of every matrix product to bfloat16, forward and
            backward: on CPUs that multiply such numbers faster, and with exact arithmetic.
    """

    path: str | None = None
    config: FilePath | Mapping[str, Any] | None = None
    tokenizer: str | None = None
    std: float = 0.02
    exact: bool = True
    kv_dtype: KVFormat = "fp32"
    products: Products = "fp32"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise ValueError("A model needs either path, to start from one, or config, to start "
                             "anew; give one of the two.")
        if self.path is None and self.tokenizer is None:
            raise ValueError("A new model needs a tokenizer; set tokenizer to a model's name or "
                             "folder.")
        if self.std <= 0.0:
            raise ValueError(f"std is {self.std} but must be positive.")
        if self.products != "fp32" and not self.exact:
            raise ValueError(f"products is {self.products}, which only exact arithmetic knows; "
                             "leave exact at true, or products at fp32.")
        if self.path is not None and self.std != ModelConfig.std:
            raise ValueError(f"std is {self.std}, but path says to start from a model's own "
                             "weights; leave std out.")


@dataclass(frozen=True)
class EvalConfig:
    """How often the held-out data is scored.

    Attributes:
        every: steps between two; 0: only after the last step, and not at all without held-out data.
        batches: packs that are scored, over all ranks; 0: all.
    """

    every: int = 0
    batches: int = 0

    def __post_init__(self) -> None:
        if self.every < 0 or self.batches < 0:
            raise ValueError(f"every is {self.every} and batches {self.batches}, but neither may "
                             "be negative.")


@dataclass(frozen=True)
class LogConfig:
    """What a run tells.

    Attributes:
        every: steps between two lines, on the console and in the files.
        jsonl: write ``metrics.jsonl``.
        tensorboard: write ``tensorboard/`` (needs the extra ``tensorboard``).
        profile: first and last step of a trace by torch's profiler, ``profile/``.
        peak_flops: FLOP/s a rank could do at best, which MFU is a share of; default: measured at
            the start, as the rate of one large matrix product.
    """

    every: int = 10
    jsonl: bool = True
    tensorboard: bool = False
    profile: tuple[int, int] | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every} but must be at least 1.")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(f"profile is {list(self.profile)} but must be a first step from 1 and "
                             "a last one that is no less.")
        if self.peak_flops is not None and self.peak_flops <= 0.0:
            raise ValueError(f"peak_flops is {self.peak_flops} but must be positive.")


@dataclass(frozen=True)
class LaunchConfig:
    """How the ranks run on this machine.

    Attributes:
        device: ``cpu``, ``cuda`` (rank i has GPU i), or ``auto``: cuda where there is one.
        threads: CPU threads of each rank; default: the cores divided by the ranks.
        max_restarts: how often the ranks are started again from the last checkpoint after one of
            them died.
        timeout: seconds a collective waits for the other ranks before it fails.
        grace: seconds the ranks have to write a checkpoint when they are told to stop.
    """

    device: Device = "auto"
    threads: int | None = None
    max_restarts: int = 3
    timeout: float = 1800.0
    grace: int = 300

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ValueError(f"threads is {self.threads} but must be from 1 to 1024.")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts} but cannot be negative.")
        for name, least in (("grace", 0), ("timeout", 1)):
            value = getattr(self, name)
            if not least <= value <= _YEAR:
                raise ValueError(f"{name} is {value} but must be from {least} to {_YEAR} seconds.")


@dataclass(frozen=True)
class TrainJob:
    """A training run.

    Attributes:
        output: folder of checkpoints, metrics and the finished model.
        kind: ``pretrain`` learns every token of texts; ``sft`` what the assistant says in
            conversations (sources with ``chat = true``); ``reward`` and ``dpo`` which of two
            answers is better (sources with ``pairs = true``, docs/preference.md).
        steps, epochs: how long; one of the two.
        micro_batches: packs in a step, over all ranks; a multiple of the layout's dp.
        max_norm: what the gradient's norm is clipped to; 0: not at all.
        seed: of a new model's weights (the order of the data has ``data.seed``).
        precision: ``bf16`` rounds matrices to bfloat16 where they are used, as an engine holds
            them; what the optimizer steps stays float32.
        export: write the finished model to ``output/model``, and adapters to ``output/adapter``.
        lora: train adapters, and leave the model's own weights as they are (docs/lora.md).
        dpo: how ``dpo`` compares answers.
    """

    output: FilePath
    model: ModelConfig
    data: DataConfig
    kind: Kind = "pretrain"
    steps: int | None = None
    epochs: int | None = None
    micro_batches: int = 8
    max_norm: float = 1.0
    seed: int = 0
    precision: Precision = "fp32"
    export: bool = True
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    layout: Layout = field(default_factory=Layout)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    recompute: Recompute = field(default_factory=Recompute)
    lora: LoraConfig | None = None
    dpo: DpoConfig = field(default_factory=DpoConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        problems = []
        if not self.output:
            problems.append("output is empty; name a folder")
        if (self.steps is None) == (self.epochs is None):
            problems.append("give either steps or epochs")
        for name in ("steps", "epochs", "micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value} but must be at least 1")
        if self.max_norm < 0.0:
            problems.append(f"max_norm is {self.max_norm} but cannot be negative; 0 turns "
                            "clipping off")
        if self.steps is not None and self.log.profile and self.log.profile[0] > self.steps:
            problems.append(f"log.profile is {list(self.log.profile)}, but the run has "
                            f"{self.steps} steps; let it begin before")
        problems += self._layout_problems() + self._data_problems()
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def _layout_problems(self) -> list[str]:
        layout = self.layout
        problems = [f"layout.{name} is {getattr(layout, name)}, but {what} parallelism is not "
                    "there yet; it must be 1" for name, what in
                    (("ep", "expert"), ("etp", "expert"))
                    if getattr(layout, name) != 1]
        if self.micro_batches % layout.dp:
            problems.append(f"micro_batches is {self.micro_batches}, which {layout.dp} "
                            f"data-parallel ranks cannot share; make it a multiple of {layout.dp}")
        elif layout.pp > 1:
            try:
                self.pipeline.make(layout.pp, self.micro_batches // layout.dp)
            except ValueError as error:
                whose = "the pipeline" if layout.dp == 1 else (
                    f"the pipeline of each of the {layout.dp} data-parallel ranks, which has "
                    f"{self.micro_batches // layout.dp} of the {self.micro_batches} micro_batches,")
                problems.append(f"{whose} cannot be so: {str(error).rstrip('.')}")
        if layout.cp == 1 and self.context != ContextConfig():
            problems.append("context is set, but layout.cp is 1; leave it out, or set layout.cp")
        if layout.pp == 1 and self.pipeline != PipelineConfig():
            problems.append("pipeline is set, but layout.pp is 1; leave it out, or set layout.pp")
        return problems

    def _data_problems(self) -> list[str]:
        sources = (*self.data.sources, *self.data.eval_sources)
        chats = [source.chat for source in sources]
        if self.kind != "dpo" and self.dpo != DpoConfig():
            return [f"dpo is set, but kind is {self.kind}; leave it out, or set kind to dpo"]
        if self.kind in OF_PAIRS and not all(source.pairs for source in sources):
            return [f"kind is {self.kind}, but a data source has no pairs; set pairs = true, or "
                    "leave it out"]
        if self.kind not in OF_PAIRS and any(source.pairs for source in sources):
            return [f"kind is {self.kind}, but a data source has pairs, of which only reward and "
                    "dpo learn; set kind to one of them"]
        if self.kind == "sft" and not any(chats):
            return ["kind is sft, but no data source has chat = true"]
        if self.kind == "pretrain" and any(chats):
            return ["kind is pretrain, but a data source has conversations (chat = true), of "
                    "which only the assistant's turns are learned; set kind to sft"]
        if self.data.chat != ChatConfig() and not any(
                source.chat or source.pairs for source in sources):
            return ["data.chat is set, but no data source has conversations; leave it out, or set "
                    "chat = true in a source"]
        held_out = self.data.eval_fraction or self.data.eval_sources
        if self.eval != EvalConfig() and not held_out:
            return ["eval is set, but the data has nothing held out; set data.eval_fraction or "
                    "data.eval_sources"]
        return []


# What may differ between a checkpoint's job and the one that goes on from it.
FREE = ("output", "steps", "epochs", "export", "layout", "pipeline", "context", "recompute",
        "checkpoint", "eval", "log", "launch")
# What a run is steered with on its way, say after a NaN: it may differ too, and is told.
STEERING = ("optimizer.lr", "optimizer.muon_lr", "schedule", "max_norm", "update.max_norm",
            "critic.optimizer.lr", "critic.optimizer.muon_lr")  # the last three of RL


def differences(before: Mapping[str, Any], after: Mapping[str, Any],
                free: Sequence[str] = (*FREE, *STEERING)) -> list[str]:
    """Dotted names of the settings (of `kilter.job.dump`) by which a run is another run; ``free``
    are those, tables or single ones, that may differ."""
    old, new = _flat(before), _flat(after)
    return [key for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and not _within(key, free)]


def steered(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What of `STEERING` differs: ``, with max_norm 0.5 in place of 1.0``, or nothing."""
    old, new = _flat(before), _flat(after)
    changes = [f"{key} {new[key]} in place of {old[key]}" for key in sorted(old.keys() & new.keys())
               if old[key] != new[key] and _within(key, STEERING)]
    return f", with {' and '.join(changes)}" if changes else ""


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {
            f"{prefix}{key}": value}
    return found
