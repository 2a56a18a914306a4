"""From a model source to a `Decoder` in memory, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from kilter.models.decoder import Decoder
from kilter.models.linear import Embedding, Linear
from kilter.ops.cpu import library
from kilter.ops.packed import PackedWeight, QuantTensor, pack
from kilter.weights.bridge import ModelSource

Storage = Literal["auto", "fp32", "bf16", "int8", "int4"]
STORAGES: tuple[Storage, ...] = ("auto", "fp32", "bf16", "int8", "int4")


def load_decoder(source: ModelSource, *, storage: Storage = "auto",
                 device: torch.device | str = "cpu", exact: bool = True,
                 kv_dtype: torch.dtype = torch.float32, products: str = "fp32",
                 max_positions: int | None = None,
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
    check_storage(storage, exact, device)
    check_products(products, device)
    with torch.device("meta"):
        model = Decoder(source.spec, exact=exact, kv_dtype=kv_dtype, products=products,
                        max_positions=max_positions)
    names = [name for name, _ in model.named_parameters()]
    for done, name in enumerate(names):
        put_weight(model, name, source.read(name), storage, device)
        if progress is not None:
            progress(done + 1, len(names))
    return model.eval()


def replace_weights(model: Decoder, weights: ModelSource | Mapping[str, Tensor],
                    storage: Storage = "auto") -> None:
    """Puts other weights of the same architecture into a loaded model.

    Args:
        weights: a source, or tensors by our parameter names, all or some of them.

    Raises:
        ValueError: for a name or shape that is not the model's, all listed; nothing was changed.
    """
    device = model.norm.weight.device
    check_storage(storage, model.exact, device)
    shapes = parameter_shapes(model)
    if isinstance(weights, ModelSource):
        found = {name: weights.info(name).shape for name in weights.names()}
    elif isinstance(weights, Mapping) and weights:
        wrong = [name for name, value in weights.items() if not isinstance(value, Tensor)
                 or not value.is_floating_point() or value.is_meta]
        if wrong:
            raise ValueError(f"New weights must be floating-point tensors with data, but these are "
                             f"not: {', '.join(map(str, wrong))}.")
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    else:
        raise ValueError(f"New weights must be a ModelSource (kilter.weights.bridge.open_model "
                         f"gives one) or tensors by name, and not {type(weights).__name__} or "
                         f"nothing.")
    problems = [f"{name} {list(shape)} is not a parameter of this model" if name not in shapes
                else f"{name} has shape {list(shape)} but the model's is {list(shapes[name])}"
                for name, shape in found.items() if shapes.get(name) != shape]
    if problems:
        raise ValueError(f"These weights do not fit the model: {'; '.join(problems)}.")
    for name in found:
        value = weights.read(name) if isinstance(weights, ModelSource) else weights[name].detach()
        put_weight(model, name, value, storage, device)


def parameter_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by name, packed ones included."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, Linear | Embedding) and isinstance(module.weight, PackedWeight):
            shapes[f"{path}.weight"] = tuple(module.weight.shape)
    return shapes


def put_weight(model: Decoder, name: str, value: Tensor | QuantTensor, storage: Storage,
               device: torch.device) -> None:
    """Stores one weight the way this model holds it."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf == "weight" and isinstance(module, Linear | Embedding):
        if model.exact and device.type == "cpu" and library.available():
            gated = isinstance(module, Linear) and module.gated
            if isinstance(value, QuantTensor) and storage not in ("auto", f"int{value.bits}"):
                value = value.dequantize()
            module.use_packed(pack(value, storage, gated=gated))
        else:
            dense = _dense(value)
            if storage == "bf16":  # rounded, even where it is held in more bits
                dense = dense.to(torch.bfloat16)
            setattr(module, leaf, _frozen(dense.to(device, _plain_dtype(value, storage, device))))
    else:
        setattr(module, leaf, _frozen(_dense(value).to(device, torch.float32)))


def check_storage(storage: Storage, exact: bool, device: torch.device) -> None:
    """Raises ValueError for a storage that this device or path does not have."""
    packed = exact and device.type == "cpu" and library.available()
    if storage not in STORAGES:
        raise ValueError(f"Weights cannot be stored as {storage!r}; choose one of "
                         f"{', '.join(STORAGES)}.")
    if not packed and storage in ("int8", "int4"):
        raise ValueError(f"Weights stored as {storage} are computed by the compiled exact CPU "
                         f"kernels only; use fp32, bf16 or auto on a GPU, with --fast or without a "
                         f"C++ compiler.")


def check_products(products: str, device: torch.device) -> None:
    """Raises ValueError where the products of `Decoder` cannot be so on this device."""
    if products != "fp32" and device.type == "cuda":
        raise ValueError(f"products is {products}, which only CPUs compute so; leave it at fp32 on "
                         "a GPU, whose products are in bf16 where the weights are.")


def _dense(value: Tensor | QuantTensor) -> Tensor:
    return value.dequantize() if isinstance(value, QuantTensor) else value


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _plain_dtype(value: Tensor | QuantTensor, storage: Storage, device: torch.device
                 ) -> torch.dtype:
    """Most CPUs emulate bf16 arithmetic, slowly, so there plain weights are fp32."""
    if storage == "bf16" and device.type == "cuda":
        return torch.bfloat16
    if storage == "auto" and device.type == "cuda" and isinstance(value, Tensor):
        return value.dtype
    return torch.float32
