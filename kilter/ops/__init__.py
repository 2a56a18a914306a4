"""HOW one device computes what a model asks for.

`Ops` is the set of functions a model is built from. There are two sets: `exact_ops()`, whose every
row depends on nothing but that row's own inputs (see docs/architecture.md), and `stock_ops()`,
torch's own kernels, which may choose an order of summation by shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kilter.ops.packed import PackedWeight, QuantTensor, pack

__all__ = ["Ops", "PackedWeight", "QuantTensor", "exact_ops", "pack", "stock_ops"]


@dataclass(frozen=True)
class Ops:
    """The forward functions of a decoder; shapes and meanings are documented at the exact ones."""

    name: str
    linear: Callable[..., Tensor]  # kilter.ops.linear
    gated_linear: Callable[..., Tensor]
    gated_activation: Callable[[Tensor, str], Tensor]  # kilter.ops.activation
    embed: Callable[..., Tensor]  # kilter.ops.embedding
    rms_norm: Callable[..., Tensor]  # kilter.ops.norm
    rope_qkv: Callable[..., tuple[Tensor, Tensor, Tensor]]  # kilter.ops.rope
    attention: Callable[..., Tensor]  # kilter.ops.attention
    log_softmax: Callable[[Tensor], Tensor]  # kilter.ops.logprob
    token_logprobs: Callable[[Tensor, Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]
    head_logprobs: Callable[..., Tensor]  # kilter.ops.head
    head_loss: Callable[..., tuple[Tensor, Tensor]]
    products: str = "fp32"  # what the factors of products are rounded to, in backward too


@functools.cache
def exact_ops(products: str = "fp32") -> Ops:
    """Row-invariant ops: compiled CPU kernels, Triton on CUDA, pure torch without a compiler.

    ``products``: what the factors of every matrix product are rounded to, `kilter.ops.linear`.
    """
    from kilter.ops.activation import gated_activation
    from kilter.ops.attention import attention
    from kilter.ops.embedding import embed
    from kilter.ops.head import head_logprobs, head_loss
    from kilter.ops.linear import gated_linear, linear
    from kilter.ops.logprob import argmax, log_softmax, token_logprobs
    from kilter.ops.norm import rms_norm
    from kilter.ops.rope import rope_qkv

    rounded = functools.partial(functools.partial, products=products)
    return Ops("exact", rounded(linear), rounded(gated_linear), gated_activation, embed, rms_norm,
               rope_qkv, attention, log_softmax, token_logprobs, argmax, rounded(head_logprobs),
               rounded(head_loss), products)


@functools.cache
def stock_ops() -> Ops:
    """torch's own kernels."""
    from kilter.ops import stock

    return Ops("stock", stock.linear, stock.gated_linear, stock.gated_activation, stock.embed,
               stock.rms_norm, stock.rope_qkv, stock.attention, stock.log_softmax,
               stock.token_logprobs, stock.argmax, stock.head_logprobs, stock.head_loss)
