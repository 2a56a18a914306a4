"""Log-probabilities and argmax over the vocabulary, on CUDA: one program per row, read in blocks
of a fixed size from column 0."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from kilter.ops.cuda.launch import EXACT, check, jit, on_device, plain, tl

_BLOCK = 2048


def log_softmax(logits_TV: Tensor) -> Tensor:
    """fp32 [T, V].

    Raises:
        ValueError: if logits are not [T, V], or for a dtype or device without kernels.
    """
    logits_TV = _checked("log_softmax", logits_TV)
    out_TV = torch.empty(logits_TV.shape, dtype=torch.float32, device=logits_TV.device)
    _launch(_log_softmax, logits_TV, out_TV)
    return out_TV


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """fp32 [T]: ``log_softmax(logits)[t, targets[t]]``, the same bits, without storing [T, V].

    A target outside the vocabulary gives NaN: raising would wait for the GPU.

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    logits_TV = _checked("token_logprobs", logits_TV)
    if targets_T.shape != logits_TV.shape[:1] or targets_T.is_floating_point():
        raise ValueError(f"The CUDA token_logprobs cannot run: targets are {targets_T.dtype} "
                         f"{list(targets_T.shape)}; they must be integers "
                         f"[{logits_TV.shape[0]}], one per row of logits.")
    out_T = torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
    _launch(_token_logprobs, logits_TV, plain(targets_T), out_T)
    return out_T


def argmax(logits_TV: Tensor) -> Tensor:
    """int64 [T]: the first column that holds the largest value of the row, or its first NaN.

    Raises:
        ValueError: if logits are not [T, V], or for a dtype or device without kernels.
    """
    logits_TV = _checked("argmax", logits_TV)
    out_T = torch.empty(logits_TV.shape[0], dtype=torch.int64, device=logits_TV.device)
    _launch(_argmax, logits_TV, out_T)
    return out_T


def _checked(op: str, logits_TV: Tensor) -> Tensor:
    problems = []
    if logits_TV.ndim != 2 or logits_TV.shape[1] == 0:
        problems.append(f"logits have shape {list(logits_TV.shape)}; they must be [T, V], V > 0")
    check(op, problems, logits_TV)
    return plain(logits_TV)


def _launch(kernel, logits_TV: Tensor, *others: Tensor) -> None:
    rows, vocab = logits_TV.shape
    if rows:
        with on_device(logits_TV):
            kernel[(rows,)](logits_TV, *others, vocab, BLOCK=_BLOCK, num_warps=8, **EXACT)


@jit
def _maximum_and_log_sum(row, vocab, BLOCK: tl.constexpr):
    """max and log(sum(exp(x - max))) of a row: a running pair per lane, lanes combined last."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, v)
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.exp(v - base)
        top = new
    best = tl.max(top, 0)
    return best, tl.log(tl.sum(total * tl.exp(top - best), 0))


@jit
def _log_softmax(logits, out, vocab, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * vocab
    best, log_sum = _maximum_and_log_sum(logits + at, vocab, BLOCK)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(logits + at + column, mask=column < vocab, other=0.0).to(tl.float32)
        tl.store(out + at + column, v - best - log_sum, mask=column < vocab)


@jit
def _token_logprobs(logits, targets, out, vocab, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    best, log_sum = _maximum_and_log_sum(logits + t * vocab, vocab, BLOCK)
    target = tl.load(targets + t).to(tl.int64)
    known = (target >= 0) & (target < vocab)
    v = tl.load(logits + t * vocab + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(out + t, v - best - log_sum)


@jit
def _argmax(logits, out, vocab, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    best = float("-inf")
    where = tl.zeros((), tl.int32)
    first_nan = vocab
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(logits + t * vocab + column, mask=column < vocab, other=float("-inf"))
        v = v.to(tl.float32)
        first_nan = tl.minimum(first_nan, tl.min(tl.where(v == v, vocab, column), 0))
        top, index = tl.max(tl.where(v == v, v, float("-inf")), 0, return_indices=True)
        where = tl.where(top > best, start + index, where)
        best = tl.maximum(best, top)
    tl.store(out + t, tl.where(first_nan < vocab, first_nan, where))
