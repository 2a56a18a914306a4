"""The registry of model families, by the `architectures` entry of config.json."""

from __future__ import annotations

from kilter.weights.families import gemma3, llama, mistral, qwen2, qwen3
from kilter.weights.families.family import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, gemma3.FAMILY)}
REWARD_FAMILIES: dict[str, Family] = {family.reward: family for family in FAMILIES.values()}

__all__ = ["FAMILIES", "REWARD_FAMILIES", "Family"]
