"""Rows of the embedding matrix, on CUDA."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from kilter.ops.cuda.launch import EXACT, check, jit, on_device, plain, tl

_BLOCK = 1024


def embed(tokens_T: Tensor, weight_VD: Tensor, scale: float = 1.0) -> Tensor:
    """[T, D] in the weight's dtype: rows of ``weight_VD`` times ``scale`` (in fp32, rounded once).

    A token id outside the vocabulary gives a row of NaN: raising would wait for the GPU.

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    problems = []
    if tokens_T.ndim != 1 or tokens_T.is_floating_point() or weight_VD.ndim != 2:
        problems.append(f"tokens are {tokens_T.dtype} {list(tokens_T.shape)} and weight "
                        f"{list(weight_VD.shape)}; they must be integers [T] and floats [V, D]")
    if tokens_T.device != weight_VD.device:
        problems.append(f"tokens are on {tokens_T.device} and weight on {weight_VD.device}; move "
                        "them to one device")
    check("embed", problems, weight_VD)
    weight_VD = plain(weight_VD)
    vocab, size = weight_VD.shape
    out_TD = torch.empty(tokens_T.shape[0], size, dtype=weight_VD.dtype, device=weight_VD.device)
    if out_TD.numel():
        with on_device(out_TD):
            _embed[(out_TD.shape[0], -(-size // _BLOCK))](
                plain(tokens_T), weight_VD, out_TD, scale, vocab, size, BLOCK=_BLOCK, num_warps=4,
                **EXACT)
    return out_TD


@jit
def _embed(tokens, weight, out, scale, vocab, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    readable = tl.where((token >= 0) & (token < vocab), size, 0)
    v = tl.load(weight + token * size + column, mask=column < readable, other=float("nan"))
    tl.store(out + row * size + column, v.to(tl.float32) * scale, mask=column < size)
