"""Log-probabilities over the vocabulary, and the most likely token.

`token_logprobs` is `log_softmax` at one target per row, to the bit, without the [T, V] result.

A row's sum of exponentials is cut in chunks of `vocab_chunk` neighbouring tokens. Whoever holds
whole chunks of the vocabulary computes their `chunk_sums` about the row's maximum;
`logprobs_from_sums` of all of them, side by side, has the bits of `token_logprobs`.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched
from kilter.ops.reference import vocab_chunk

__all__ = ["argmax", "check_temperature", "chunk_sums", "log_softmax", "logprob_grad",
           "logprobs_from_sums", "tempered", "token_logprobs", "vocab_chunk"]


def _struct(pointers: str, numbers: str) -> type[ctypes.Structure]:
    fields = [*((name, ctypes.c_void_p) for name in pointers.split()),
              *((name, ctypes.c_int64) for name in numbers.split())]
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


_LogprobArgs = _struct("logits targets out lse status", "rows vocab stride chunk")
_log_softmax_kernel = Kernel("kt_log_softmax", _LogprobArgs)
_token_logprobs_kernel = Kernel("kt_token_logprobs", _LogprobArgs)
_chunk_sums_kernel = Kernel("kt_chunk_sums", _struct("logits top sums", "rows vocab stride chunk"))
_from_sums_kernel = Kernel("kt_logprobs_from_sums",
                           _struct("chosen top sums out lse", "rows chunks"))
_grad_kernel = Kernel("kt_logprob_grad", _struct("logits lse targets grad out",
                                                 "rows vocab stride out_stride"))
_argmax_kernel = Kernel("kt_argmax", _struct("logits out", "rows vocab stride"))


def log_softmax(logits_TV: Tensor) -> Tensor:
    """Log-softmax of each row of [T, V], as float32; on the CPU the sum's logarithm is taken in
    double. Logits are float32 (on CUDA bfloat16 and float16 too); rows may be strided.

    Raises:
        ValueError: for other shapes, dtypes or layouts.
    """
    _check(logits_TV)
    if watched(logits_TV):
        return _log_softmax_op(logits_TV)
    return _log_softmax(logits_TV)


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """``log_softmax(logits)[t, targets[t]]`` as float32 [T], with the same bits.

    Args:
        logits_TV: [T, V] as for `log_softmax`.
        targets_T: int64 [T].

    Raises:
        ValueError: for other shapes, dtypes or layouts, or a target outside the vocabulary (on
            CUDA, where looking would wait for the device, that gives NaN).
    """
    _check(logits_TV)
    check_targets("token_logprobs", logits_TV, targets_T)
    if watched(logits_TV, targets_T):
        return _token_logprobs_op(logits_TV, targets_T)[0]
    return token_logprobs_and_lse(logits_TV, targets_T)[0]


def chunk_sums(logits_TV: Tensor, top_T: Tensor, chunk: int) -> Tensor:
    """Sums of ``exp(logits - top)`` over every ``chunk`` columns (the last may be shorter).

    Args:
        logits_TV: [T, V] as for `log_softmax`; columns of a larger vocabulary that start at a
            multiple of the chunk.
        top_T: float32 [T], contiguous: each row's maximum over the whole vocabulary.
        chunk: `vocab_chunk` of the whole vocabulary.

    Returns:
        float32 [T, ceil(V / chunk)]. It carries no gradient.

    Raises:
        ValueError: for other shapes, dtypes or layouts.
    """
    _check(logits_TV)
    rows = logits_TV.shape[0]
    if (top_T.shape != (rows,) or top_T.dtype != torch.float32 or not top_T.is_contiguous()
            or chunk not in (1, 2, 4, 8, 16, 32, 64, 128)):
        raise ValueError(f"chunk_sums needs contiguous float32 tops [{rows}] and a chunk that is "
                         f"a power of two up to 128; it got {top_T.dtype} {tuple(top_T.shape)} "
                         f"and {chunk}.")
    if watched(logits_TV, top_T):
        return _chunk_sums_op(logits_TV, top_T, chunk)
    return _chunk_sums(logits_TV, top_T, chunk)


def logprobs_from_sums(chosen_T: Tensor, top_T: Tensor,
                       sums_TC: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of a token per row from the `chunk_sums` of the whole vocabulary.

    Args:
        chosen_T: float32 [T], contiguous: the token's logit.
        top_T: as in `chunk_sums`.
        sums_TC: float32 [T, C], contiguous: the chunks' sums in the order of the vocabulary.

    Returns:
        ``(logprobs, lse)``, float32 [T]: the bits of `token_logprobs`, and the log of the row's
        sum of exponentials. They carry no gradient.

    Raises:
        ValueError: for other shapes, dtypes or layouts.
    """
    rows = chosen_T.shape[0]
    for name, x, shape in (("chosen", chosen_T, (rows,)), ("tops", top_T, (rows,)),
                           ("sums", sums_TC, (rows, *sums_TC.shape[1:2]))):
        if x.shape != shape or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"logprobs_from_sums needs contiguous float32 chosen [T], tops [T] "
                             f"and sums [T, C]; the {name} are {x.dtype} {tuple(x.shape)}.")
    if watched(chosen_T, top_T, sums_TC):
        return _from_sums_op(chosen_T, top_T, sums_TC)
    return _from_sums(chosen_T, top_T, sums_TC)


def logprob_grad(logits_TV: Tensor, lse_T: Tensor, targets_T: Tensor, grad_T: Tensor,
                 out_TV: Tensor) -> Tensor:
    """Writes ``grad * (one_hot(target) - softmax)``, the gradient of a log-probability by its
    logits, into ``out_TV`` and returns it.

    Args:
        logits_TV: [T, V] as for `log_softmax`, or some columns of a larger vocabulary.
        lse_T: float32 [T], the log of each row's whole sum of exponentials.
        targets_T: int64 [T], columns of these logits; one outside stands in somebody else's.
        grad_T: float32 [T].
        out_TV: [T, V] in the logits' dtype; may be ``logits_TV`` itself.
    """
    if logits_TV.is_cuda or not available():
        softmax = (logits_TV.float() - lse_T[:, None]).exp_().mul_(-grad_T[:, None])
        inside = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
        softmax.scatter_add_(1, targets_T.where(inside, 0)[:, None],
                             grad_T.where(inside, 0.0)[:, None])
        return out_TV.copy_(softmax)
    lse_T, targets_T, grad_T = lse_T.contiguous(), targets_T.contiguous(), grad_T.contiguous()
    _grad_kernel.call(logits_TV.data_ptr(), lse_T.data_ptr(), targets_T.data_ptr(),
                      grad_T.data_ptr(), out_TV.data_ptr(), *logits_TV.shape, logits_TV.stride(0),
                      out_TV.stride(0), keep=(logits_TV, lse_T, targets_T, grad_T, out_TV))
    torch.autograd.graph.increment_version(out_TV)
    return out_TV


def tempered(logits_TV: Tensor, temperature: float | Tensor, *, in_place: bool = False) -> Tensor:
    """Float32 logits divided by a temperature, also float32: one rounding each, so that whoever
    samples and whoever scores have the same bits. 1.0 leaves them as they are. No gradient.

    Args:
        temperature: one for all rows, or of each, [T, 1].
        in_place: writes into ``logits_TV``.
    """
    if isinstance(temperature, float | int):
        if temperature == 1.0:
            return logits_TV
        # As a tensor beside the logits: by a number a GPU multiplies with its reciprocal.
        temperature = torch.full((), temperature, dtype=torch.float32, device=logits_TV.device)
    return torch.div(logits_TV, temperature, out=logits_TV if in_place else None)


def check_temperature(temperature: float) -> None:
    """Raises ValueError for a temperature that no logits can be divided by."""
    if not 1e-4 < temperature < math.inf:
        raise ValueError(f"The temperature is {temperature}, but log-probabilities are of logits "
                         "divided by it: it must be finite and above 1e-4 (up to there the "
                         "sampler takes the likeliest token).")


def argmax(logits_TV: Tensor) -> Tensor:
    """Index of each row's largest element as int64 [T]: the lowest of equal ones; the first NaN
    where there is one, as `torch.argmax` has it on the CPU.

    Raises:
        ValueError: for other shapes, dtypes or layouts than `log_softmax` takes.
    """
    _check(logits_TV)
    if watched(logits_TV):
        return _argmax_op(logits_TV)
    return _argmax(logits_TV)


def _check(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"Logits must be [T, V] with V > 0; they are {tuple(logits.shape)}.")
    if not logits.is_cuda and (logits.dtype != torch.float32 or logits.stride(1) != 1):
        raise ValueError(f"Logits must be float32 in contiguous rows; they are {logits.dtype} with "
                         f"strides {logits.stride()}.")


def check_targets(op: str, rows: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless targets are contiguous int64, one per row."""
    if (targets.dtype != torch.int64 or targets.shape != rows.shape[:1]
            or not targets.is_contiguous()):
        raise ValueError(f"{op} needs contiguous int64 targets [{rows.shape[0]}]; it got "
                         f"{targets.dtype} {tuple(targets.shape)}.")


def _log_softmax(logits: Tensor) -> Tensor:
    if logits.is_cuda:
        from kilter.ops.cuda import logprob as cuda

        return cuda.log_softmax(logits)
    if not available():
        return reference.log_softmax(logits)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _log_softmax_kernel.call(logits.data_ptr(), None, out.data_ptr(), None, None, *logits.shape,
                             logits.stride(0), vocab_chunk(logits.shape[1]), keep=(logits, out))
    return out


def token_logprobs_and_lse(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and the log of each row's sum of exponentials, float32 [T] both, of
    arguments that have been checked; without autograd."""
    if logits.is_cuda:
        from kilter.ops.cuda import logprob as cuda

        return cuda.token_logprobs(logits, targets)
    if not available():
        return reference.token_logprobs(logits, targets)
    out = torch.empty(logits.shape[0], dtype=torch.float32)
    lse = torch.empty_like(out)
    status = ctypes.c_int32(0)
    _token_logprobs_kernel.call(logits.data_ptr(), targets.data_ptr(), out.data_ptr(),
                                lse.data_ptr(), ctypes.addressof(status), *logits.shape,
                                logits.stride(0), vocab_chunk(logits.shape[1]),
                                keep=(logits, targets, out, lse, status))
    if status.value:
        raise ValueError(f"A target is outside the vocabulary of {logits.shape[1]} tokens: the "
                         f"targets lie between {int(targets.min())} and {int(targets.max())}.")
    return out, lse


def _chunk_sums(logits: Tensor, top: Tensor, chunk: int) -> Tensor:
    if logits.is_cuda:
        from kilter.ops.cuda import logprob as cuda

        return cuda.chunk_sums(logits, top, chunk)
    if not available():
        return reference.chunk_sums(logits, top, chunk)
    sums = _empty_sums(logits, chunk)
    _chunk_sums_kernel.call(logits.data_ptr(), top.data_ptr(), sums.data_ptr(), *logits.shape,
                            logits.stride(0), chunk, keep=(logits, top, sums))
    return sums


def _empty_sums(logits: Tensor, chunk: int) -> Tensor:
    return logits.new_empty(logits.shape[0], -(-logits.shape[1] // chunk), dtype=torch.float32)


def _from_sums(chosen: Tensor, top: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    if sums.is_cuda:
        from kilter.ops.cuda import logprob as cuda

        return cuda.logprobs_from_sums(chosen, top, sums)
    if not available():
        return reference.logprobs_from_sums(chosen, top, sums)
    out, lse = torch.empty_like(chosen), torch.empty_like(chosen)
    _from_sums_kernel.call(chosen.data_ptr(), top.data_ptr(), sums.data_ptr(), out.data_ptr(),
                           lse.data_ptr(), *sums.shape, keep=(chosen, top, sums, out, lse))
    return out, lse


def _argmax(logits: Tensor) -> Tensor:
    if logits.is_cuda:
        from kilter.ops.cuda import logprob as cuda

        return cuda.argmax(logits)
    if not available():
        return reference.argmax(logits)
    out = logits.new_empty(logits.shape[0], dtype=torch.int64)
    _argmax_kernel.call(logits.data_ptr(), out.data_ptr(), *logits.shape, logits.stride(0),
                        keep=(logits, out))
    return out


@torch.library.custom_op("kilter::log_softmax", mutates_args=())
def _log_softmax_op(logits: Tensor) -> Tensor:
    return _log_softmax(logits)


@_log_softmax_op.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


def _save_output(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output)


def _log_softmax_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    (logprobs,) = ctx.saved_tensors
    return (grad - logprobs.exp() * grad.sum(-1, keepdim=True)).to(ctx.dtype)


_log_softmax_op.register_autograd(_log_softmax_backward, setup_context=_save_output)


@torch.library.custom_op("kilter::token_logprobs", mutates_args=())
def _token_logprobs_op(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return token_logprobs_and_lse(logits, targets)


@_token_logprobs_op.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    out = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return out, torch.empty_like(out)


def _save_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, output[1])


def _token_logprobs_backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
    return _logprob_grad_op(*ctx.saved_tensors, grad), None


_token_logprobs_op.register_autograd(_token_logprobs_backward, setup_context=_save_inputs)


@torch.library.custom_op("kilter::logprob_grad", mutates_args=())
def _logprob_grad_op(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    return logprob_grad(logits, lse, targets, grad,
                        torch.empty(logits.shape, dtype=logits.dtype, device=logits.device))


@_logprob_grad_op.register_fake
def _(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("kilter::chunk_sums", mutates_args=())
def _chunk_sums_op(logits: Tensor, top: Tensor, chunk: int) -> Tensor:
    return _chunk_sums(logits, top, chunk)


@_chunk_sums_op.register_fake
def _(logits: Tensor, top: Tensor, chunk: int) -> Tensor:
    return _empty_sums(logits, chunk)


@torch.library.custom_op("kilter::logprobs_from_sums", mutates_args=())
def _from_sums_op(chosen: Tensor, top: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    return _from_sums(chosen, top, sums)


@_from_sums_op.register_fake
def _(chosen: Tensor, top: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(chosen), torch.empty_like(chosen)


@torch.library.custom_op("kilter::argmax", mutates_args=())
def _argmax_op(logits: Tensor) -> Tensor:
    return _argmax(logits)


@_argmax_op.register_fake
def _(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)
