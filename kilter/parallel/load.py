"""From a model source into a rank's part of a model: only the rank's own bytes are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kilter.ops.packed import QuantTensor
from kilter.parallel.shards import Box, Shard
from kilter.weights.bridge import ModelSource
from kilter.weights.mappings import Weight, common_format, concatenate, convert, format_of


def read_shard(source: ModelSource, name: str, shard: Shard) -> Weight:
    """This rank's part of a parameter in the file's own format."""
    parts = [_read_box(source, name, box, shard.shape) for box in shard.boxes]
    if not parts:
        parts = [source.read(name, slice(0, 0))]
    to = common_format([format_of(part) for part in parts])
    return concatenate([convert(part, to) for part in parts])


@torch.no_grad()
def load_shards(parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard],
                source: ModelSource) -> int:
    """Fills parameters (a rank's local tensors) from a source, in place.

    Returns:
        Bytes taken from the files, in the files' own formats.

    Raises:
        ValueError: for a parameter that the source does not have, or has in another shape.
    """
    taken = 0
    for name, parameter in parameters.items():
        if name not in source.maps or source.info(name).shape != shards[name].shape:
            raise ValueError(f"{source.path} does not hold the parameter {name} "
                             f"{list(shards[name].shape)} of this model.")
        weight = read_shard(source, name, shards[name])
        taken += nbytes(weight)
        parameter.copy_(weight.dequantize() if isinstance(weight, QuantTensor) else weight)
    return taken


@torch.no_grad()
def fill(local: Tensor, whole: Tensor, shard: Shard) -> None:
    """Copies a rank's part of a whole tensor that is in memory."""
    for box, _, view in shard.parts(local):
        view.copy_(whole[box.slices])


def nbytes(weight: Weight) -> int:
    """Bytes a weight takes in its own format (4-bit values as half bytes)."""
    if isinstance(weight, Tensor):
        return weight.numel() * weight.element_size()
    lows = 0 if weight.min is None else weight.min.numel() * 4
    return weight.q.numel() * weight.bits // 8 + weight.scale.numel() * 4 + lows


def _read_box(source: ModelSource, name: str, box: Box, shape: tuple[int, ...]) -> Weight:
    rows = slice(box.start[0], box.start[0] + box.size[0])
    if len(shape) < 2 or box.size[1] == shape[1]:
        return source.read(name, rows)
    return source.read(name, rows, slice(box.start[1], box.start[1] + box.size[1]))
