"""activation(gate) * up on CUDA; `gated` is also the epilogue of the gated linear."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from kilter.ops.cuda.launch import EXACT, check, jit, on_device, plain, tl

ACTIVATIONS = ("silu", "gelu_tanh")
_BLOCK = 1024


def gated_activation(gate_up_T2F: Tensor, activation: str = "silu") -> Tensor:
    """[T, F] in the input's dtype: activation(gate) * up, computed in fp32, rounded once.

    Args:
        gate_up_T2F: [T, 2F], columns [gate; up].
        activation: "silu" (x sigmoid(x)) or "gelu_tanh" (arXiv 1606.08415, tanh form).

    Raises:
        ValueError: for another activation, an odd width, or a dtype or device without kernels.
    """
    problems = unknown_activation(activation)
    if gate_up_T2F.ndim != 2 or gate_up_T2F.shape[1] % 2:
        problems.append(f"gate_up has shape {list(gate_up_T2F.shape)}; it must be [T, 2F]")
    check("gated_activation", problems, gate_up_T2F)
    gate_up_T2F = plain(gate_up_T2F)
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(rows, width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if out_TF.numel():
        with on_device(out_TF):
            _gated_activation[(rows, -(-width // _BLOCK))](
                gate_up_T2F, out_TF, width, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4,
                **EXACT)
    return out_TF


def unknown_activation(activation: str) -> list[str]:
    """A problem, if the activation is not one of ours."""
    if activation in ACTIVATIONS:
        return []
    return [f"activation is {activation!r}; use one of {', '.join(ACTIVATIONS)}"]


@jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in fp32. tanh(z) = 2 sigmoid(2z) - 1, so gelu_tanh(x) is
    x sigmoid(2z)."""
    z = gate
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-z)) * up


@jit
def _gated_activation(gate_up, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gated(gate, up, ACTIVATION), mask=inside)
