"""Random initial weights, the same for a seed whatever the order or the device of creation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kilter.models.adapter import LowRank
from kilter.models.decoder import Decoder
from kilter.models.norm import RMSNorm
from kilter.models.value import ValueHead


@torch.no_grad()
def init_weights(model: Decoder, seed: int, std: float = 0.02) -> Decoder:
    """Fills every parameter: matrices normal(0, std), biases and value heads zero, norms the
    identity; of adapters A uniform within 1 / sqrt(K) and B zero.

    Each parameter has its own random stream, keyed by (seed, its name), so a model that is built
    in pieces on several ranks gets the numbers of one built whole.
    """
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            whole = initial(module, f"{path}.{leaf}", parameter.shape, seed, std)
            parameter.copy_(whole.to(parameter.dtype))
    return model


def initial(module: nn.Module, name: str, shape: Sequence[int], seed: int, std: float = 0.02
            ) -> Tensor:
    """The initial value of one whole parameter, float32: of ``module``, called ``name`` in the
    model, of this shape however much of it a rank holds."""
    if isinstance(module, RMSNorm):
        return torch.full(tuple(shape), 0.0 if module.zero_centred else 1.0)
    if name.endswith(".bias") or isinstance(module, ValueHead):
        return torch.zeros(tuple(shape))
    if isinstance(module, LowRank) and not name.endswith(".lora_a"):
        # DoRA's magnitudes are norms of what the weights turn out to be; see `kilter.train.lora`.
        return torch.full(tuple(shape), 0.0 if name.endswith(".lora_b") else torch.nan)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if isinstance(module, LowRank):
        return (2.0 * torch.rand(tuple(shape), generator=generator) - 1.0) / shape[1] ** 0.5
    return torch.randn(tuple(shape), generator=generator) * std
