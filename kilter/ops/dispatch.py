"""How a public op gets to its kernel.

An op picks its side: the compiled CPU kernel, pure torch without one (`kilter.ops.reference`), or
Triton on CUDA; and its way there: a direct call where nobody is watching, the torch custom operator
under autograd, fake tensors or a compiler. The bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def watched(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors must go through torch's dispatcher: one needs a gradient,
    holds no data or is a tensor subclass, or a dispatch mode or the compiler is active."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling():
        return True
    grad = torch.is_grad_enabled()
    return any(t is not None and ((grad and t.requires_grad) or t.is_meta
                                  or type(t) not in (Tensor, torch.nn.Parameter))
               for t in tensors)
