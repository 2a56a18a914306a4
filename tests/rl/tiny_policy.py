"""A tiny random policy in both of its lives: on the trainer's ranks and in a rollout engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.apply import Spread, apply
from kilter.parallel.load import fill
from kilter.rl.config import EXACT_CONTEXT
from kilter.rl.experience import Experience, Rollout
from kilter.rl.gate import Agreement, agreement
from kilter.rl.rollout import Prompt, RolloutConfig, RolloutEngine, rollout_mesh
from kilter.rl.scoring import score
from kilter.serve.engine_config import EngineConfig
from kilter.serve.params import SamplingParams
from kilter.serve.scheduler import SchedulerConfig
from kilter.tokens import Tokenizer
from kilter.train.lora import LoraConfig, add_adapters
from tests.serve.tiny_tokenizer import save_byte_tokenizer

VOCAB, CONTEXT = 131, 96
ENDS = tuple(range(3, 9))  # so many end tokens that answers of different lengths come
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARAMS = SamplingParams(max_tokens=12)


def spec(**changes: Any) -> ModelSpec:
    """8 query and 4 KV heads, so 8 virtual shards."""
    rope = RopeSpec()
    facts: dict[str, Any] = dict(
        architecture="Qwen3ForCausalLM", vocab_size=VOCAB, hidden_size=32, ffn_size=64,
        num_heads=8, num_kv_heads=4, head_dim=8,
        layers=(LayerSpec(rope, window=11), LayerSpec(rope)), max_positions=CONTEXT, qk_norm=True)
    return ModelSpec(**{**facts, **changes})


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        save_byte_tokenizer(Path(folder), VOCAB)
        return Tokenizer.from_folder(Path(folder))


def whole(made: ModelSpec, seed: int, lora: LoraConfig | None = None) -> dict[str, Tensor]:
    """All parameters; adapters do something."""
    model = init_weights(Decoder(made), seed, std=0.15)
    if lora is not None:
        add_adapters(model, lora)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.data.copy_(values + 1 if name.endswith("magnitude") else values)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def config(*, kv_tokens: int = 4096, page_size: int = 4, ends: tuple[int, ...] = ENDS,
           scheduler: Mapping[str, Any] | None = None, **settings: Any) -> RolloutConfig:
    return RolloutConfig(engine=EngineConfig(
        kv_tokens, page_size, max_context=min(CONTEXT, kv_tokens), eos_token_ids=ends,
        scheduler=SchedulerConfig(**scheduler or {})), **settings)


def parts(engine: RolloutEngine, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """This rank's tensors of whole ones, one at a time."""
    for name, value in tensors.items():
        shard = engine.shards[name]
        local = torch.empty(shard.local_shape)
        fill(local, value, shard)
        yield {name: local}


def rollout_engine(settings: RolloutConfig | None = None, *, tp: int = 1, seed: int = 0,
                   made: ModelSpec | None = None, version: int = 0) -> RolloutEngine:
    made = made or spec()
    settings = settings or config()
    engine = RolloutEngine(made, tokenizer(), settings, rollout_mesh(tp))
    engine.update(parts(engine, whole(made, seed, settings.lora)), version)
    return engine


def trainer(settings: RolloutConfig | None = None, layout: Layout | None = None, *, seed: int = 0,
            made: ModelSpec | None = None) -> Spread:
    made, settings, layout = made or spec(), settings or config(), layout or Layout()
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        model = Decoder(made, exact=settings.exact, kv_dtype=DTYPES[settings.kv_dtype],
                        products=settings.products)
    if settings.lora is not None:
        add_adapters(model, settings.lora)
    spread = apply(model, mesh, weights=DTYPES[settings.precision], context=EXACT_CONTEXT)
    spread.fill(whole(made, seed, settings.lora))
    spread.updated()
    return spread


def prompts(count: int, n: int = 1, longest: int = 24) -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    return [Prompt(torch.randint(VOCAB, (1 + (5 * i) % longest,), generator=generator).tolist(),
                   i, f"p{i}", n) for i in range(count)]


def compared(rollouts: Sequence[Rollout], spread: Spread, *, temperature: float = 1.0,
             budget: int = 200, version: int | None = None) -> Agreement:
    """The gate, between rollouts and a trainer."""
    experience = Experience.of(rollouts)
    scores = score(spread, experience, token_budget=budget, temperature=temperature)
    return agreement(experience, scores.logprobs_T, version=version)
