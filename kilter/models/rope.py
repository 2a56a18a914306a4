"""Rope frequencies and the cos/sin tables a model's layers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kilter.models.spec import RopeSpec

_BLOCK = 1024  # positions computed at a time


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """fp32 [head_dim/2]: radians per position of each rotated pair, after scaling.

    Formulas: RoFormer (arXiv 2104.09864); position interpolation (2306.15595); the Llama 3.1
    frequency ramp; NTK-by-parts of YaRN (2309.00071, section 3.2).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta ** exponent)
    if rope.scaling == "linear":
        return inv_freq / rope.factor
    if rope.scaling == "llama3":
        return _llama3(inv_freq, rope)
    if rope.scaling == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeSpec) -> Tensor:
    """Long wavelengths are slowed by ``factor``, short ones kept, a linear ramp between."""
    old = rope.original_max_positions
    wavelength = 2 * math.pi / inv_freq
    ramp = (old / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor)
    smooth = (1 - ramp) * inv_freq / rope.factor + ramp * inv_freq
    slowed = torch.where(wavelength > old / rope.low_freq_factor, inv_freq / rope.factor, inv_freq)
    between = (wavelength <= old / rope.low_freq_factor) & (
        wavelength >= old / rope.high_freq_factor)
    return torch.where(between, smooth, slowed)


def _yarn(inv_freq: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Dims that turn less than ``beta_slow`` times in the old context are interpolated, those
    that turn more than ``beta_fast`` times are kept, a linear ramp between."""

    def dim_of(turns: float) -> float:
        return (head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi))
                / (2 * math.log(rope.theta)))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return inv_freq / rope.factor * (1 - keep) + inv_freq * keep


def cos_sin_tables(rope: RopeSpec, head_dim: int, positions: int,
                   device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [P, head_dim/2] with P >= positions, times the attention factor.

    Always computed in blocks of the same shape on the CPU, so that a position's bits do not
    depend on how long the table is (a vectorised cos may treat a row's tail differently).
    """
    inv_freq = inverse_frequencies(rope, head_dim)
    cos, sin = [], []
    for start in range(0, max(positions, 1), _BLOCK):
        angles = torch.outer(torch.arange(start, start + _BLOCK, dtype=torch.float32), inv_freq)
        cos.append(angles.cos() * rope.attention_factor)
        sin.append(angles.sin() * rope.attention_factor)
    return torch.cat(cos).to(device), torch.cat(sin).to(device)
