"""Log-probabilities and argmax over the vocabulary, on CUDA: a row is read in blocks of a fixed
size from column 0, and its exponentials are summed chunk by chunk, then over the chunks."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from kilter.ops.cuda.launch import EXACT, check, jit, on_device, plain, tl
from kilter.ops.reference import vocab_chunk

_BLOCK = 2048


def log_softmax(logits_TV: Tensor) -> Tensor:
    """fp32 [T, V].

    Raises:
        ValueError: if logits are not [T, V], or for a dtype or device without kernels.
    """
    logits_TV = _checked("log_softmax", logits_TV)
    out_TV = torch.empty(logits_TV.shape, dtype=torch.float32, device=logits_TV.device)
    top_T, sums_TC = _tops_and_sums(logits_TV)
    _launch(_log_softmax, logits_TV, out_TV, top_T, sums_TC, chunks=sums_TC.shape[1])
    return out_TV


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [T] twice: ``log_softmax(logits)[t, targets[t]]``, the same bits, without storing
    [T, V]; and the log of each row's sum of exponentials.

    A target outside the vocabulary gives NaN: raising would wait for the GPU.

    Raises:
        ValueError: for shapes that do not fit, or a dtype or device without kernels.
    """
    logits_TV = _checked("token_logprobs", logits_TV)
    if targets_T.shape != logits_TV.shape[:1] or targets_T.is_floating_point():
        raise ValueError(f"The CUDA token_logprobs cannot run: targets are {targets_T.dtype} "
                         f"{list(targets_T.shape)}; they must be integers "
                         f"[{logits_TV.shape[0]}], one per row of logits.")
    known = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
    chosen_T = logits_TV.gather(1, targets_T.long().where(known, 0)[:, None])[:, 0].float()
    return logprobs_from_sums(chosen_T.where(known, float("nan")), *_tops_and_sums(logits_TV))


def chunk_sums(logits_TV: Tensor, top_T: Tensor, chunk: int) -> Tensor:
    """fp32 [T, ceil(V / chunk)]: sums of exp(logits - top) over every ``chunk`` columns.

    Raises:
        ValueError: if logits are not [T, V], or for a dtype or device without kernels.
    """
    logits_TV = _checked("chunk_sums", logits_TV)
    rows, vocab = logits_TV.shape
    chunks = -(-vocab // chunk)
    sums_TC = torch.empty(rows, chunks, dtype=torch.float32, device=logits_TV.device)
    if rows:
        together = _BLOCK // chunk
        with on_device(logits_TV):
            _chunk_sums[(rows, -(-chunks // together))](
                logits_TV, plain(top_T), sums_TC, vocab, chunks, CHUNK=chunk, CHUNKS=together,
                num_warps=8, **EXACT)
    return sums_TC


def logprobs_from_sums(chosen_T: Tensor, top_T: Tensor,
                       sums_TC: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, log-sum-exp), fp32 [T], from the chunks' sums of the whole vocabulary.

    Raises:
        ValueError: for a dtype or device without kernels.
    """
    check("logprobs_from_sums", [], chosen_T, top_T, sums_TC)
    out_T, lse_T = torch.empty_like(chosen_T), torch.empty_like(chosen_T)
    if out_T.numel():
        with on_device(sums_TC):
            _from_sums[(len(out_T),)](plain(chosen_T), plain(top_T), plain(sums_TC), out_T, lse_T,
                                      sums_TC.shape[1], BLOCK=_BLOCK, num_warps=8, **EXACT)
    return out_T, lse_T


def _tops_and_sums(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    top_T = logits_TV.amax(-1).float()
    return top_T, chunk_sums(logits_TV, top_T, vocab_chunk(logits_TV.shape[1]))


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


def _launch(kernel, logits_TV: Tensor, *others: Tensor, **sizes: int) -> None:
    rows, vocab = logits_TV.shape
    if rows:
        with on_device(logits_TV):
            kernel[(rows,)](logits_TV, *others, vocab, **sizes, BLOCK=_BLOCK, num_warps=8, **EXACT)


# The number of columns is not specialised on: part of a vocabulary must be summed as the whole is.
@jit(do_not_specialize=["vocab", "chunks"])
def _chunk_sums(logits, top, sums, vocab, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    v = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
    e = tl.exp(v.to(tl.float32) - tl.load(top + row))
    tl.store(sums + row * chunks + chunk, tl.sum(tl.where(column < vocab, e, 0.0), 1),
             mask=chunk < chunks)


@jit
def _log_sum(sums, chunks, BLOCK: tl.constexpr):
    """log of the sum of a row's chunks: a running sum per lane, lanes combined last."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        total += tl.load(sums + chunk, mask=chunk < chunks, other=0.0)
    return tl.log(tl.sum(total, 0))


@jit(do_not_specialize=["chunks"])
def _from_sums(chosen, top, sums, out, lse, chunks, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    log_sum = _log_sum(sums + t * chunks, chunks, BLOCK)
    best = tl.load(top + t)
    tl.store(out + t, tl.load(chosen + t) - best - log_sum)
    tl.store(lse + t, best + log_sum)


@jit(do_not_specialize=["vocab", "chunks"])
def _log_softmax(logits, out, top, sums, vocab, chunks, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    at = t * vocab
    log_sum = _log_sum(sums + t * chunks, chunks, BLOCK)
    best = tl.load(top + t)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(logits + at + column, mask=column < vocab, other=0.0).to(tl.float32)
        tl.store(out + at + column, v - best - log_sum, mask=column < vocab)


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
