"""From a model source to a `Decoder` in memory, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from kilter.models.decoder import Decoder
from kilter.models.linear import Embedding, Linear
from kilter.ops.packed import QuantTensor, pack
from kilter.weights.bridge import ModelSource

Storage = Literal["auto", "fp32", "bf16", "int8", "int4"]
STORAGES: tuple[Storage, ...] = ("auto", "fp32", "bf16", "int8", "int4")


def load_decoder(source: ModelSource, *, storage: Storage = "auto",
                 device: torch.device | str = "cpu", exact: bool = True,
                 kv_dtype: torch.dtype = torch.float32, max_positions: int | None = None,
                 progress: Callable[[int, int], None] | None = None) -> Decoder:
    """A decoder for inference with the source's weights.

    Args:
        storage: how large matrices are held. ``auto`` is lossless: 16-bit files stay 16-bit,
            block-quantised GGUF tensors keep their own blocks; the others round to that format.
            Without ``exact`` and on CUDA the weights are plain tensors, fp32 or bf16.
        progress: called with (tensors done, tensors in all).

    Raises:
        ValueError: a storage that this device or path does not have.
    """
    device = torch.device(device)
    packed = exact and device.type == "cpu"
    if not packed and storage in ("int8", "int4"):
        raise ValueError(f"Weights stored as {storage} are computed by the exact CPU kernels only; "
                         f"use fp32, bf16 or auto on {device.type} or with --fast.")
    with torch.device("meta"):
        model = Decoder(source.spec, exact=exact, kv_dtype=kv_dtype, max_positions=max_positions)
    names = [name for name, _ in model.named_parameters()]
    for done, name in enumerate(names):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        value = source.read(name)
        if leaf == "weight" and isinstance(module, Linear | Embedding):
            if packed:
                gated = isinstance(module, Linear) and module.gated
                module.use_packed(pack(value, storage, gated=gated))
            else:
                dtype = _plain_dtype(value, storage, device)
                setattr(module, leaf, _frozen(_dense(value).to(device, dtype)))
        else:
            setattr(module, leaf, _frozen(_dense(value).to(device, torch.float32)))
        if progress is not None:
            progress(done + 1, len(names))
    return model.eval()


def _dense(value: Tensor | QuantTensor) -> Tensor:
    return value.dequantize() if isinstance(value, QuantTensor) else value


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _plain_dtype(value: Tensor | QuantTensor, storage: Storage, device: torch.device
                 ) -> torch.dtype:
    """bf16 arithmetic is emulated and slow on most CPUs, so a CPU computes plain weights in fp32."""
    if storage == "bf16" and device.type == "cuda":
        return torch.bfloat16
    if storage == "auto" and device.type == "cuda" and isinstance(value, Tensor):
        return value.dtype
    return torch.float32
