"""Log-probabilities of given tokens, with the vocabulary whole or spread over ranks.

Logits exist for a block of tokens at a time; backward computes them again. With the vocabulary
spread, no rank ever has all of a token's logits: the ranks agree on the largest one, each sums the
exponentials of its own vocabulary chunks, and the chunk sums are gathered and added in the order of
one rank, so the exact path gives one rank's bits (arXiv 1909.08053 §3, with chunk sums in place of
one sum). The entropy of the same distribution comes beside it where it is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_gather_rows, all_reduce_sum
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.linear import through
from kilter.ops import Ops
from kilter.ops.linear import grad_input, weight_grad
from kilter.ops.logprob import (
    check_temperature,
    chunk_sums,
    logprob_grad,
    logprobs_from_sums,
    tempered,
    vocab_chunk,
)
from kilter.parallel.heads import vocab_chunks
from kilter.parallel.tensor import whole_rows

BLOCK = 1024  # tokens whose logits are held at a time
_LOWEST = -1e30  # a log-probability that times its probability, 0, is 0


class TokenLogprobs(nn.Module):
    """A decoder seen as what training wants of it: log p(target | tokens before) per token.

    The module that data parallelism wraps: its forward is the only way into the model.

    Args:
        tensor: the tensor-parallel axis the decoder was spread over.
        sequence: whether it was spread with sequence parallelism.
    """

    def __init__(self, decoder: Decoder, tensor: Axis, sequence: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self._tensor = tensor
        self._sequence = sequence

    def forward(self, batch: Batch, targets_T: Tensor, counts_T: Tensor | None = None, *,
                x_TD: Tensor | None = None, temperature: float = 1.0,
                with_entropy: bool = False) -> Any:
        """float32 [T]. Where a target is negative (no label) the result is 0 and no gradient
        flows.

        With ``counts_T``, float32 [T], the loss instead: minus the sum of the log-probabilities
        times what each counts, a scalar. Its gradient is made beside it where the vocabulary is
        whole, which spares a product (`kilter.ops.head.head_loss`).

        With ``temperature`` the distribution is that of the logits divided by it, by the bits what
        a sampler reports that draws at this temperature. ``with_entropy`` returns (log-
        probabilities, entropies) of it, nats, both [T] with gradients.

        Raises:
            ValueError: for a token or target outside the vocabulary, a temperature that is not
                positive, or counts together with ``with_entropy``.
        """
        check_temperature(temperature)
        if with_entropy and counts_T is not None:
            raise ValueError("with_entropy gives the entropies of tokens, and counts_T a loss of "
                             "their log-probabilities alone; leave one of the two out.")
        decoder = self.decoder
        kept_T = targets_T >= 0
        targets_T = torch.where(kept_T, targets_T, 0)
        x_TD = decoder.hidden(batch, x_TD)
        head = decoder.embed if decoder.head is None else decoder.head
        weight = through(head.uses, head.weight)
        assert isinstance(weight, Tensor)
        if counts_T is not None:
            counts_T = torch.where(kept_T, counts_T, 0.0)
        if self._tensor.size > 1:
            x_TD = whole_rows(x_TD, self._tensor, self._sequence)
        # With the vocabulary spread, what ranks send is not to depend on which labels there are.
        place_N = _places(kept_T) if self._tensor.size == 1 else None
        if place_N is not None:
            x_TD, targets_T = x_TD.index_select(0, place_N), targets_T[place_N]
            counts_T = None if counts_T is None else counts_T[place_N]
        if self._tensor.size == 1 and counts_T is not None:
            return decoder.ops.head_loss(x_TD, weight, targets_T, counts_T,
                                         temperature=temperature)[0]
        vocab, axis = decoder.spec.vocab_size, self._tensor
        first = vocab_chunk(vocab) * sum(vocab_chunks(vocab, axis.size)[:axis.index])
        logprobs_T, entropy_T = _Logprobs.apply(
            x_TD, weight, targets_T, first, vocab, axis, decoder.ops, temperature, with_entropy)
        if counts_T is not None:
            return -(counts_T * logprobs_T).sum(dtype=torch.float64).float()
        if place_N is not None:
            logprobs_T, entropy_T = (
                values_N.new_zeros(kept_T.shape).index_copy(0, place_N, values_N)
                if len(values_N) else values_N for values_N in (logprobs_T, entropy_T))
        logprobs_T = torch.where(kept_T, logprobs_T, 0.0)
        return (logprobs_T, torch.where(kept_T, entropy_T, 0.0)) if with_entropy else logprobs_T


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, first: int,
                vocab: int, axis: Axis, ops: Ops, temperature: float,
                with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T] and entropies, [T] or, where they are not wanted, [0]."""
        chunk = vocab_chunk(vocab)
        rows = weight_VD.shape[0]
        counts = vocab_chunks(vocab, axis.size)
        logprobs_T, lse_T = x_TD.new_empty(2, x_TD.shape[0])
        entropy_T = x_TD.new_empty(x_TD.shape[0] if with_entropy else 0)
        for block in _blocks(x_TD.shape[0], with_entropy):
            logits_TV = tempered(ops.linear(x_TD[block], weight_VD, None, None), temperature,
                                 in_place=True)
            local_T = targets_T[block] - first
            mine_T = (local_T >= 0) & (local_T < rows)
            chosen_T = logits_TV.gather(1, torch.where(mine_T, local_T, 0)[:, None])[:, 0]
            both = torch.stack([logits_TV.amax(-1), torch.where(mine_T, chosen_T, -torch.inf)])
            if axis.size > 1:
                dist.all_reduce(both, dist.ReduceOp.MAX, group=axis.members)
            top_T, chosen_T = both
            sums_TC = _gathered(chunk_sums(logits_TV, top_T, chunk), counts, axis)
            logprobs_T[block], lse_T[block] = logprobs_from_sums(chosen_T, top_T, sums_TC)
            if with_entropy:
                logs_TV, probs_TV = _distribution(logits_TV, lse_T[block])
                own_T = -(probs_TV * logs_TV).sum(-1, dtype=torch.float64)
                entropy_T[block] = all_reduce_sum(own_T, axis).float()
        ctx.save_for_backward(x_TD, weight_VD, targets_T, lse_T, entropy_T)
        ctx.first, ctx.ops = first, ops
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_TD, weight_VD, targets_T, lse_T, entropy_T = ctx.saved_tensors
        grad_T, entropy_grad_T = (g if ctx.temperature == 1.0 else g / ctx.temperature
                                  for g in grads)
        dx_TD, dw_VD = torch.empty_like(x_TD), torch.zeros_like(weight_VD)
        for block in _blocks(x_TD.shape[0], ctx.with_entropy):
            logits_TV = tempered(ctx.ops.linear(x_TD[block], weight_VD, None, None),
                                 ctx.temperature, in_place=True)
            if ctx.with_entropy:
                # dH / dlogit = -p (log p + H)
                logs_TV, probs_TV = _distribution(logits_TV, lse_T[block])
                other_TV = probs_TV.mul_(logs_TV.add_(entropy_T[block, None])).mul_(
                    -entropy_grad_T[block, None])
            d_TV = logprob_grad(logits_TV, lse_T[block], targets_T[block] - ctx.first,
                                grad_T[block], logits_TV)
            if ctx.with_entropy:
                d_TV = d_TV.add_(other_TV)
            if ctx.ops.products == "bf16":
                dx_TD[block] = grad_input(d_TV, weight_VD, halved=True)
                dw_VD.add_(weight_grad(x_TD[block].bfloat16(), d_TV))
            else:
                dx_TD[block] = d_TV @ weight_VD
                dw_VD.addmm_(d_TV.t(), x_TD[block])
        return dx_TD, dw_VD, *[None] * 7


def _places(kept_T: Tensor) -> Tensor | None:
    """int64 [N]: the rows that have a label, which are the only ones whose logits are needed; None
    where that would spare nothing, or where a trace without data cannot tell."""
    if kept_T.is_meta or isinstance(kept_T, FakeTensor):
        return None
    place_N = kept_T.nonzero()[:, 0]
    return place_N if 0 < len(place_N) < len(kept_T) else None


def _blocks(tokens: int, with_entropy: bool) -> list[slice]:
    """Fewer tokens at a time where there are three matrices of a block's size and not one."""
    size = BLOCK // 4 if with_entropy else BLOCK
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _distribution(logits_TV: Tensor, lse_T: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, probabilities), [T, V] both."""
    logs_TV = (logits_TV - lse_T[:, None]).clamp_(min=_LOWEST)
    return logs_TV, logs_TV.exp()


def _gathered(sums_TC: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """[T, all chunks]: every rank's columns side by side."""
    padded = torch.nn.functional.pad(sums_TC, (0, max(counts) - sums_TC.shape[1])).contiguous()
    every = all_gather_rows(padded, axis, [padded.shape[0]] * axis.size).chunk(axis.size)
    return torch.cat([part[:, :count] for part, count in zip(every, counts, strict=True)], dim=1)


