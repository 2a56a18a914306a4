"""RMSNorm on CUDA (arXiv 1910.07467): one program per row, the whole row in registers."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from kilter.ops.cuda.launch import EXACT, check, jit, on_device, plain, power_of_two, tl


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, zero_centred: bool = False,
             residual: Tensor | None = None) -> Tensor:
    """[T, D] in x's dtype: x / sqrt(mean(x²) + eps) * w, plus ``residual``; fp32 inside, rounded
    once at the end.

    Args:
        zero_centred: the weight is applied as 1 + w.

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    problems = []
    if x_TD.ndim != 2 or weight_D.shape != x_TD.shape[-1:]:
        problems.append(f"x has shape {list(x_TD.shape)} and weight {list(weight_D.shape)}; they "
                        "must be [T, D] and [D]")
    if residual is not None and residual.shape != x_TD.shape:
        problems.append(f"residual has shape {list(residual.shape)}; it must be x's, "
                        f"{list(x_TD.shape)}")
    check("rms_norm", problems, x_TD, weight_D, residual)
    x_TD = plain(x_TD)
    out_TD = torch.empty_like(x_TD)
    rows, size = x_TD.shape
    if out_TD.numel():
        block = power_of_two(size)
        with on_device(x_TD):
            _rms_norm[(rows,)](
                x_TD, plain(weight_D), None if residual is None else plain(residual), out_TD, size,
                eps, ZERO_CENTRED=zero_centred, BLOCK=block,
                num_warps=min(max(block // 512, 1), 16), **EXACT)
    return out_TD


@jit
def inverse_rms(square_sum, size, eps):
    """1 / sqrt(mean + eps), each step correctly rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(square_sum / size + eps))


@jit
def _rms_norm(x, weight, residual, out, size, eps, ZERO_CENTRED: tl.constexpr,
              BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    v = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        w = 1.0 + w
    y = v * inverse_rms(tl.sum(v * v, 0), size, eps) * w
    if residual is not None:
        y += tl.load(residual + at + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at + column, y, mask=inside)
