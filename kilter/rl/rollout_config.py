"""What rollouts are asked for: prompts, how the engine holds the model, and which sampling settings
give samples that can be learned from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kilter.ops.packed import FLOATS
from kilter.serve.engine_config import EngineConfig
from kilter.serve.params import SamplingParams
from kilter.train.lora import LoraConfig


@dataclass(frozen=True)
class Prompt:
    """What n samples are made of.

    Attributes:
        ids: token ids.
        group: samples of one prompt share it.
        id: names the prompt; its samples are ``id/0``, ``id/1``, ...
        n: how many.
    """

    ids: Sequence[int]
    group: int
    id: str
    n: int = 1


@dataclass(frozen=True)
class RolloutConfig:
    """How the engine holds a model. The first five are the trainer's own settings: where they
    differ, the two compute different numbers.

    Attributes:
        precision: large matrices are held so (`TrainJob.precision`).
        kv_dtype: keys and values are held so (`ModelConfig.kv_dtype`).
        exact: row-invariant arithmetic (`ModelConfig.exact`).
        products: what factors of matrix products are rounded to (`ModelConfig.products`).
        lora: adapters, which are held as such and not merged: W + s B A is rounded otherwise than
            the products the trainer adds.
        engine: sizes of the cache and of a step.
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    kv_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    exact: bool = True
    products: str = "fp32"
    lora: LoraConfig | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        problems = []
        if self.precision not in ("fp32", "bf16"):
            problems.append(f"precision is {self.precision!r} but must be fp32 or bf16")
        if self.kv_dtype not in FLOATS:
            problems.append(f"kv_dtype is {self.kv_dtype!r} but must be fp32, bf16 or fp16")
        if problems:
            raise ValueError(f"Rollouts cannot be made so: {'; '.join(problems)}.")


def check_params(params: SamplingParams) -> None:
    """Whether samples drawn so can be learned from.

    Raises:
        ValueError: listing every setting that draws from another distribution than the trainer
            scores, or that `RolloutEngine` sets itself.
    """
    problems = []
    support = [name for name, neutral in (
        ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0), ("repetition_penalty", 1.0), ("logit_bias", {}),
        ("min_tokens", 0), ("grammar", None)) if getattr(params, name) != neutral]
    if support:
        problems.append(
            f"{', '.join(support)} would draw from another distribution than the policy's: ratios "
            "of probabilities to the trainer's, which knows the temperature alone, would be wrong "
            "from the first step; leave them at their defaults")
    if params.greedy:
        problems.append(f"the temperature is {params.temperature}, which takes the likeliest token "
                        "and so has no probability to learn from; set it above 1e-4")
    if params.max_tokens < 1:
        problems.append("max_tokens is 0, but there is nothing to learn from an empty answer")
    own = [name for name, neutral in (("n", 1), ("best_of", None), ("seed", None),
                                      ("logprobs", None), ("prompt_logprobs", None))
           if getattr(params, name) != neutral]
    if own:
        problems.append(f"{', '.join(own)} must be left alone: a prompt says how many samples it "
                        "wants, their seeds come from the run's, and each token's own "
                        "log-probability is always kept")
    if problems:
        raise ValueError(f"Rollouts cannot be sampled so: {'; '.join(problems)}.")


def sample_seed(seed: int, step: int, sample: str) -> int:
    """The seed of a sample's random stream: 64 bits of a hash of run, step and sample."""
    told = f"{seed}/{step}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
