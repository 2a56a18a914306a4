"""The output head and the log-probabilities of given tokens together, some tokens at a time, so
that the logits of a whole pack, [T, V], are never held.

Forward bits are those of `token_logprobs(linear(x, weight), targets)`. For the gradient there are
two ways. `head_logprobs` takes any gradient of its result and computes the logits again in the
backward pass: four products where keeping the logits would take three. `head_loss` knows what
each log-probability counts, so it computes the gradients beside the loss, from the same logits:
three products, at the price of holding a gradient of the head from forward to backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kilter.ops.linear import grad_input, linear, weight_grad
from kilter.ops.logprob import (
    check_targets,
    check_temperature,
    logprob_grad,
    tempered,
    token_logprobs_and_lse,
)
from kilter.ops.packed import PackedWeight

_LOGITS = 1 << 26  # of a block: 256 MB


def head_logprobs(x_TD: Tensor, weight_VD: Tensor | PackedWeight, targets_T: Tensor, *,
                  block: int | None = None, exact: bool = True,
                  temperature: float = 1.0, products: str = "fp32") -> Tensor:
    """Log-probability of ``targets[t]`` under ``softmax(x W^T / temperature)``, float32 [T].

    Args:
        x_TD: float32 [T, D], contiguous (on CUDA also the weight's dtype).
        weight_VD: [V, D], as in `linear`; a packed one gets no gradient.
        targets_T: int64 [T].
        block: most tokens whose logits are held at a time; None: about 256 MB of them.
        exact: row-invariant logits; False: torch's own product.
        temperature: what the logits are divided by (`kilter.ops.logprob.tempered`).
        products: of the exact product, see `kilter.ops.linear`.

    Raises:
        ValueError: for other shapes, dtypes or layouts, a block below 1, a temperature that is not
            positive, or a target outside the vocabulary.
    """
    block = _check("head_logprobs", x_TD, weight_VD, targets_T, block, temperature)
    if isinstance(weight_VD, PackedWeight):
        return _head_logprobs_op(x_TD, weight_VD.data, targets_T, block, exact, weight_VD.facts(),
                                 temperature, products)[0]
    return _head_logprobs_op(x_TD, weight_VD, targets_T, block, exact, [], temperature,
                             products)[0]


def head_loss(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, counts_T: Tensor, *,
              block: int | None = None, exact: bool = True,
              temperature: float = 1.0, products: str = "fp32") -> tuple[Tensor, Tensor]:
    """``-sum(counts * logprobs)`` and the log-probabilities, as of `head_logprobs`.

    Only the loss has a gradient, and only for ``x_TD`` and ``weight_VD``, once: it is handed over
    in the backward pass, not kept.

    Args:
        x_TD, weight_VD, targets_T, block, exact, temperature, products: as in `head_logprobs`, the
            weight not packed.
        counts_T: float32 [T], what each token counts: 1 / tokens for a mean, 0 to leave one out.

    Returns:
        (float32 scalar, summed in float64; float32 [T]).

    Raises:
        ValueError: as `head_logprobs`.
    """
    block = _check("head_loss", x_TD, weight_VD, targets_T, block, temperature)
    if counts_T.shape != targets_T.shape or counts_T.dtype != torch.float32:
        raise ValueError(f"head_loss needs float32 counts {list(targets_T.shape)}; it got "
                         f"{counts_T.dtype} {list(counts_T.shape)}.")
    grads = torch.is_grad_enabled()
    loss, logprobs, _, _ = _head_loss_op(
        x_TD, weight_VD, targets_T, counts_T, block, exact,
        grads and x_TD.requires_grad, grads and weight_VD.requires_grad, temperature, products)
    return loss, logprobs.detach()


def _check(op: str, x: Tensor, weight: Tensor | PackedWeight, targets: Tensor,
           block: int | None, temperature: float) -> int:
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{op} needs x [T, D] and a weight [V, D]; it got {list(x.shape)} and "
                         f"{list(weight.shape)}.")
    check_targets(op, x, targets)
    check_temperature(temperature)
    if block is not None and block < 1:
        raise ValueError(f"{op} cannot work through the tokens {block} at a time; the block must "
                         "be positive.")
    block = block or max(64, _LOGITS // weight.shape[0])
    blocks = -(-x.shape[0] // block)
    return -(-x.shape[0] // blocks) if blocks else block  # of equal size


def _logits(x: Tensor, weight: Tensor | PackedWeight, exact: bool, temperature: float,
            products: str) -> Tensor:
    if exact:
        return tempered(linear(x, weight, products=products), temperature, in_place=True)
    dense = weight if isinstance(weight, Tensor) else weight.dequantize()
    return tempered(F.linear(x, dense), temperature, in_place=True)


def _weight(weight: Tensor, facts: list[int]) -> Tensor | PackedWeight:
    return PackedWeight.of(weight, facts) if facts else weight


class _Grads:
    """Gathers the gradients of x [T, D] and of the weight [V, D] block by block."""

    def __init__(self, x: Tensor, weight: Tensor | PackedWeight, for_x: bool,
                 for_weight: bool, products: str) -> None:
        self.x, self.weight = x, weight
        self.halved = products == "bf16"
        self.dx = torch.empty_like(x) if for_x else x.new_empty(0)
        self.dw = x.new_zeros(weight.shape if for_weight and not len(x) else 0)
        self.for_x, self.for_weight = for_x, for_weight

    def add(self, rows: slice, logits: Tensor, lse: Tensor, targets: Tensor,
            grad: Tensor) -> None:
        """Of rows with these logits (which are overwritten) and gradients of log-probability."""
        dlogits = logprob_grad(logits, lse, targets, grad, logits)
        if self.for_x:
            self.dx[rows] = grad_input(dlogits, self.weight, self.halved)
        if self.for_weight and self.halved:
            dw = weight_grad(self.x[rows].bfloat16(), dlogits)
            self.dw = dw if rows.start == 0 else self.dw.add_(dw)
        elif self.for_weight and rows.start == 0:
            self.dw = dlogits.t() @ self.x[rows]
        elif self.for_weight:
            self.dw.addmm_(dlogits.t(), self.x[rows])


def _blocks(tokens: int, block: int) -> list[slice]:
    return [slice(t, min(t + block, tokens)) for t in range(0, tokens, block)]


@torch.library.custom_op("kilter::head_logprobs", mutates_args=())
def _head_logprobs_op(x: Tensor, weight: Tensor, targets: Tensor, block: int, exact: bool,
                      facts: list[int], temperature: float = 1.0,
                      products: str = "fp32") -> tuple[Tensor, Tensor]:
    """Log-probabilities and log-sum-exp."""
    out, lse = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in "ab")
    for rows in _blocks(x.shape[0], block):
        logits = _logits(x[rows], _weight(weight, facts), exact, temperature, products)
        out[rows], lse[rows] = token_logprobs_and_lse(logits, targets[rows])
        del logits  # before the next are made
    return out, lse


@_head_logprobs_op.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, block: int, exact: bool,
      facts: list[int], temperature: float = 1.0,
      products: str = "fp32") -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], dtype=torch.float32)
    return out, torch.empty_like(out)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, targets, ctx.block, ctx.exact, ctx.facts, ctx.temperature, ctx.products = inputs
    ctx.save_for_backward(x, weight, targets, output[1])


def _backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
    for_x, for_weight = ctx.needs_input_grad[:2]
    dx, dw = _head_grad_op(grad, *ctx.saved_tensors, ctx.block, ctx.exact, ctx.facts, for_x,
                           for_weight, ctx.temperature, ctx.products)
    return dx if for_x else None, dw if for_weight else None, *[None] * 6


_head_logprobs_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("kilter::head_logprobs_grad", mutates_args=())
def _head_grad_op(grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor,
                  block: int, exact: bool, facts: list[int], for_x: bool, for_weight: bool,
                  temperature: float, products: str) -> tuple[Tensor, Tensor]:
    matrix = _weight(weight, facts)
    grad = grad if temperature == 1.0 else grad / temperature
    grads = _Grads(x, matrix, for_x, for_weight, products)
    for rows in _blocks(x.shape[0], block):
        logits = _logits(x[rows], matrix, exact, temperature, products)
        grads.add(rows, logits, lse[rows], targets[rows], grad[rows])
        del logits
    return grads.dx, grads.dw.to(weight.dtype)


@_head_grad_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, block: int,
      exact: bool, facts: list[int], for_x: bool, for_weight: bool,
      temperature: float, products: str) -> tuple[Tensor, Tensor]:
    return (torch.empty_like(x) if for_x else x.new_empty(0),
            torch.empty_like(weight) if for_weight else weight.new_empty(0))


@torch.library.custom_op("kilter::head_loss", mutates_args=())
def _head_loss_op(x: Tensor, weight: Tensor, targets: Tensor, counts: Tensor, block: int,
                  exact: bool, for_x: bool, for_weight: bool, temperature: float = 1.0,
                  products: str = "fp32") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-probabilities, and the gradients of x and of the weight."""
    scaled = counts if temperature == 1.0 else counts / temperature
    out = x.new_empty(x.shape[0], dtype=torch.float32)
    grads = _Grads(x, weight, for_x, for_weight, products)
    for rows in _blocks(x.shape[0], block):
        logits = _logits(x[rows], weight, exact, temperature, products)
        out[rows], lse = token_logprobs_and_lse(logits, targets[rows])
        if for_x or for_weight:
            grads.add(rows, logits, lse, targets[rows], -scaled[rows])
        del logits
    # A token that does not count may have probability 0: 0 times minus infinity is left out.
    terms = torch.where(counts == 0.0, 0.0, out.double() * counts.double())
    return -terms.sum().float(), out, grads.dx, grads.dw.to(weight.dtype)


@_head_loss_op.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, counts: Tensor, block: int, exact: bool,
      for_x: bool, for_weight: bool, temperature: float = 1.0,
      products: str = "fp32") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (x.new_empty((), dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32),
            torch.empty_like(x) if for_x else x.new_empty(0),
            torch.empty_like(weight) if for_weight else weight.new_empty(0))


def _save_grads(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.grads = output[2:]


def _loss_backward(ctx, grad: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
    if ctx.grads is None:
        raise RuntimeError("The gradient of this head_loss has been handed over already; compute "
                           "the loss again for a second backward pass.")
    dx, dw = ctx.grads
    ctx.grads = None
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    return (_times(dx, grad) if needs_x else None, _times(dw, grad) if needs_weight else None,
            *[None] * 8)


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """x, overwritten, times the factor; looks at it first where that is free and it is mostly 1."""
    if type(factor) is Tensor and factor.device.type == "cpu" and factor.item() == 1.0:
        return x
    return x.mul_(factor)


_head_loss_op.register_autograd(_loss_backward, setup_context=_save_grads)
