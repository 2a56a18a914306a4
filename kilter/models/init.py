"""Random initial weights, the same for a seed whatever the order or the device of creation."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from kilter.models.decoder import Decoder
from kilter.models.norm import RMSNorm


@torch.no_grad()
def init_weights(model: Decoder, seed: int, std: float = 0.02) -> Decoder:
    """Fills every parameter: matrices normal(0, std), biases zero, norms the identity.

    Each parameter has its own random stream, keyed by (seed, its name), so a model that is built
    in pieces on several ranks gets the numbers of one built whole.
    """
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(0.0 if module.zero_centred else 1.0)
            elif leaf == "bias":
                parameter.zero_()
            else:
                _fill_normal(parameter, zlib.crc32(f"{seed}/{path}.{leaf}".encode()), std)
    return model


def _fill_normal(parameter: nn.Parameter, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parameter.shape, generator=generator) * std
    parameter.copy_(values.to(parameter.dtype))
