"""Small models, and what resharding them should move, counted element by element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bench.parity import everything, tiny
from kilter.mesh.layout import Layout
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.rl.reshard_layout import (
    consecutive_groups,
    nested_groups,
    rollout_formats,
    rollout_needs,
    rollout_parts,
    trainer_shards,
)
from kilter.rl.reshard_plan import Plan, make_plan
from kilter.train.lora import LoraConfig, add_adapters

F32, BF16 = torch.float32, torch.bfloat16


def three() -> ModelSpec:
    """3 KV heads: at degree 2, one rank has two of them and the other one."""
    return ModelSpec("LlamaForCausalLM", 200, 24, 48, 9, 3, 8, (LayerSpec(RopeSpec()),) * 2, 64)


def short(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=spec.layers[:2])


SPECS = {"tied": short(tiny(True)), "untied": short(tiny(False)),
         "everything": short(everything()), "three": three()}


def meta(spec: ModelSpec, lora: LoraConfig | None = None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    if lora is not None:
        add_adapters(model, lora)
    return model


def whole_weights(model: Decoder) -> dict[str, Tensor]:
    """Numbers in which every element can be told from every other."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=generator)
            for name, p in model.named_parameters()}


def plan_of(spec: ModelSpec, layout: Layout, degree: int, dtype: torch.dtype = F32,
            nested: bool = False) -> Plan:
    model = meta(spec)
    held, parts = trainer_shards(model, layout), rollout_parts(model, degree)
    groups = nested_groups(held, parts) if nested else consecutive_groups(layout.world, degree)
    return make_plan(held, rollout_needs(parts, groups), rollout_formats(model, dtype))


def missing_bytes(plan: Plan, rank: int) -> int:
    """Counted element by element."""
    total = 0
    for name, shard in plan.needed[rank].items():
        mask = np.zeros(shard.shape, bool)
        for box in shard.boxes:
            mask[box.slices] = True
        if name in plan.held[rank]:
            for box in plan.held[rank][name].boxes:
                mask[box.slices] = False
        total += int(mask.sum()) * plan.formats[name].itemsize
    return total
