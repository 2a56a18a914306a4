"""What a kernel needs before it starts: Triton itself, and tensors that it can take.

`jit` and `tl` are Triton's when it is installed. When it is not, modules of kernels still import,
and starting one says what to install.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:
    triton = None
    tl = None
    INTERPRETED = False

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EXACT: dict[str, Any] = {"enable_fp_fusion": False}  # compile option: a*b+c rounds twice


class _Absent:
    """Stands for a kernel when Triton is not installed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"The CUDA kernel {self.name.strip('_')} needs Triton, which is not "
                           "installed. Install it (pip install triton), or run on the CPU.")


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, with or without options."""
    if triton is None:
        return _Absent if function is None else _Absent(function)
    return triton.jit(function, **options)


def dtype_of(dtype: torch.dtype) -> Any:
    """Triton's name of a torch float dtype."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16,
            torch.float16: tl.float16}[dtype]


def dot_dtype(dtype: torch.dtype) -> Any:
    """The operand type of a matrix product on values of ``dtype``. Triton's interpreter multiplies
    bfloat16 operands as if they were integers, so there they are widened: products of two
    16-bit floats are exact in fp32, as they are in the tensor cores."""
    return tl.float32 if INTERPRETED else dtype_of(dtype)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def plain(x: Tensor) -> Tensor:
    """x itself, or a copy if it is not contiguous or not at a 16-byte boundary: one layout and
    one alignment, hence one compiled kernel and one order of summation, for any view."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes x's GPU the current one, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory one block may have."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks it takes to give the whole GPU work."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check(op: str, problems: list[str], *tensors: Tensor | None) -> None:
    """Raises ValueError with all problems of a call: those found, and tensors of a type or a place
    that no kernel takes."""
    found = list(problems)
    present = [x for x in tensors if x is not None]
    for dtype in sorted({str(x.dtype) for x in present if x.dtype not in FLOATS}):
        found.append(f"a tensor is {dtype}; use float32, bfloat16 or float16")
    devices = sorted({str(x.device) for x in present})
    if len(devices) > 1:
        found.append(f"the tensors are on {', '.join(devices)}; move them to one device")
    elif not INTERPRETED and present and not present[0].is_cuda:
        found.append(f"the tensors are on {devices[0]}; move them to a GPU")
    if found:
        raise ValueError(f"The CUDA {op} cannot run: " + "; ".join(found) + ".")
