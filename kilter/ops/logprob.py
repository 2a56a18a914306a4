"""Log-probabilities over the vocabulary, and the most likely token.

`token_logprobs` is `log_softmax` at one target per row, to the bit, without the [T, V] result.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kilter.ops import reference
from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched


class _LogprobArgs(ctypes.Structure):
    _fields_ = [("logits", ctypes.c_void_p), ("targets", ctypes.c_void_p),
                ("out", ctypes.c_void_p), ("status", ctypes.c_void_p), ("rows", ctypes.c_int64),
                ("vocab", ctypes.c_int64), ("stride", ctypes.c_int64)]


class _ArgmaxArgs(ctypes.Structure):
    _fields_ = [("logits", ctypes.c_void_p), ("out", ctypes.c_void_p), ("rows", ctypes.c_int64),
                ("vocab", ctypes.c_int64), ("stride", ctypes.c_int64)]


_log_softmax_kernel = Kernel("kt_log_softmax", _LogprobArgs)
_token_logprobs_kernel = Kernel("kt_token_logprobs", _LogprobArgs)
_argmax_kernel = Kernel("kt_argmax", _ArgmaxArgs)


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
    if (targets_T.dtype != torch.int64 or targets_T.shape != logits_TV.shape[:1]
            or not targets_T.is_contiguous()):
        raise ValueError(f"token_logprobs needs contiguous int64 targets [{logits_TV.shape[0]}]; "
                         f"it got {targets_T.dtype} {tuple(targets_T.shape)}.")
    if watched(logits_TV, targets_T):
        return _token_logprobs_op(logits_TV, targets_T)
    return _token_logprobs(logits_TV, targets_T)


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


def _log_softmax(logits: Tensor) -> Tensor:
    if logits.is_cuda:
        from kilter.ops.cuda import logprob as cuda

        return cuda.log_softmax(logits)
    if not available():
        return reference.log_softmax(logits)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _log_softmax_kernel.call(logits.data_ptr(), None, out.data_ptr(), None, *logits.shape,
                             logits.stride(0), keep=(logits, out))
    return out


def _token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.is_cuda:
        from kilter.ops.cuda import logprob as cuda

        return cuda.token_logprobs(logits, targets)
    if not available():
        return reference.token_logprobs(logits, targets)
    out = logits.new_empty(logits.shape[0])
    status = ctypes.c_int32(0)
    _token_logprobs_kernel.call(logits.data_ptr(), targets.data_ptr(), out.data_ptr(),
                                ctypes.addressof(status), *logits.shape, logits.stride(0),
                                keep=(logits, targets, out, status))
    if status.value:
        raise ValueError(f"A target is outside the vocabulary of {logits.shape[1]} tokens: the "
                         f"targets lie between {int(targets.min())} and {int(targets.max())}.")
    return out


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
def _token_logprobs_op(logits: Tensor, targets: Tensor) -> Tensor:
    return _token_logprobs(logits, targets)


@_token_logprobs_op.register_fake
def _(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def _save_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _token_logprobs_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    logits, targets = ctx.saved_tensors
    dlogits = torch.softmax(logits.float(), dim=-1).mul_(-grad[:, None])
    dlogits.scatter_add_(1, targets[:, None], grad[:, None])
    return dlogits.to(logits.dtype), None


_token_logprobs_op.register_autograd(_token_logprobs_backward, setup_context=_save_inputs)


@torch.library.custom_op("kilter::argmax", mutates_args=())
def _argmax_op(logits: Tensor) -> Tensor:
    return _argmax(logits)


@_argmax_op.register_fake
def _(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)
