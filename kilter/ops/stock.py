"""The same functions through torch's own kernels (MKL or cuBLAS, SDPA): the ``--fast`` path.

These may pick an order of summation by shape, so a row's bits can change with its neighbours.
Weights are plain tensors; index tensors are read on the host once per call.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from kilter.ops import head

head_logprobs = functools.partial(head.head_logprobs, exact=False)
head_loss = functools.partial(head.head_loss, exact=False)


def linear(x_TK: Tensor, weight: Tensor, bias: Tensor | None = None,
           residual: Tensor | None = None, *, splits: int = 1) -> Tensor:
    """[T, N]. ``splits`` asks for an order of summation, and there is none to choose here."""
    y_TN = F.linear(x_TK, weight, bias)
    return y_TN if residual is None else residual + y_TN


def gated_linear(x_TK: Tensor, weight: Tensor, bias: Tensor | None = None,
                 activation: str = "silu", *, splits: int = 1) -> Tensor:
    """[T, F]: activation(gate) * up, weight rows [gate; up]; ``splits`` as in `linear`."""
    return gated_activation(F.linear(x_TK, weight, bias), activation)


def gated_activation(gate_up_TF2: Tensor, activation: str) -> Tensor:
    """[T, F] of rows [gate | up]."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate_TF) * up_TF
    return F.gelu(gate_TF, approximate="tanh") * up_TF


def embed(tokens_T: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """[T, D]. Raises ValueError for an id outside the vocabulary (checked on the CPU only: on a
    GPU the check would wait for the device)."""
    vocab = weight.shape[0]
    if tokens_T.device.type == "cpu" and tokens_T.numel():
        low, high = int(tokens_T.min()), int(tokens_T.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"Token id {low if low < 0 else high} is outside the vocabulary of "
                             f"{vocab} tokens.")
    x_TD = F.embedding(tokens_T, weight)
    return x_TD if scale == 1.0 else x_TD * scale


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, zero_centred: bool = False,
             residual: Tensor | None = None) -> Tensor:
    """[T, D]."""
    weight_D = 1.0 + weight_D if zero_centred else weight_D
    y_TD = F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D.to(x_TD.dtype), eps)
    return y_TD if residual is None else residual + y_TD


def _rotate(x_THd: Tensor, cos_T1e: Tensor, sin_T1e: Tensor) -> Tensor:
    a_THe, b_THe = x_THd.float().chunk(2, dim=-1)
    return torch.cat((a_THe * cos_T1e - b_THe * sin_T1e,
                      b_THe * cos_T1e + a_THe * sin_T1e), dim=-1).to(x_THd.dtype)


def rope_qkv(qkv_TGXd: Tensor, positions_T: Tensor, cos_Pe: Tensor, sin_Pe: Tensor, *,
             q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6,
             zero_centred: bool = False,
             kv: tuple[Tensor, Tensor, Tensor] | None = None,
             kv_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H, d], keys, values): the cache tensors when ``kv`` is given, else [T, G, d]."""
    tokens, groups, parts, dim = qkv_TGXd.shape
    q_THd = qkv_TGXd[:, :, :-2].reshape(tokens, groups * (parts - 2), dim)
    k_TGd, v_TGd = qkv_TGXd[:, :, -2], qkv_TGXd[:, :, -1]
    if q_norm is not None and k_norm is not None:
        q_THd = rms_norm(q_THd, q_norm, eps, zero_centred)
        k_TGd = rms_norm(k_TGd, k_norm, eps, zero_centred)
    index = positions_T.long()
    cos_T1e, sin_T1e = cos_Pe[index].unsqueeze(1), sin_Pe[index].unsqueeze(1)
    q_THd = _rotate(q_THd, cos_T1e, sin_T1e)
    k_TGd = _rotate(k_TGd, cos_T1e, sin_T1e)
    if kv is None:
        return q_THd, k_TGd.to(kv_dtype), v_TGd.to(kv_dtype)
    keys, values, slots_T = kv
    keys[slots_T.long()] = k_TGd.to(keys.dtype)
    values[slots_T.long()] = v_TGd.to(values.dtype)
    return q_THd, keys, values


def attention(q_THd: Tensor, keys: Tensor, values: Tensor, cu_seqlens_S1: Tensor, *,
              context_S: Tensor | None = None, page_table_SP: Tensor | None = None,
              page_size: int = 0, scale: float, window: int | None = None,
              max_seqlen: int = 0) -> Tensor:
    """[T, H, d]: causal SDPA, one call per sequence over its gathered keys."""
    heads, groups = q_THd.shape[1], keys.shape[1]
    bounds = cu_seqlens_S1.tolist()
    contexts = None if context_S is None else context_S.tolist()
    out_THd = torch.empty_like(q_THd)
    for s, (start, end) in enumerate(itertools.pairwise(bounds)):
        length = end - start
        if page_table_SP is None or contexts is None:
            k_CGd, v_CGd, context = keys[start:end], values[start:end], length
        else:
            context = contexts[s]
            index = torch.arange(context, device=keys.device)
            slots = page_table_SP[s].long()[index // page_size] * page_size + index % page_size
            k_CGd, v_CGd = keys[slots], values[slots]
        mask = None
        causal = length > 1 and length == context
        if (length > 1 and not causal) or (window is not None and window < context):
            row = torch.arange(context - length, context, device=keys.device)[:, None]
            column = torch.arange(context, device=keys.device)[None]
            mask = column <= row
            if window is not None:
                mask &= column > row - window
            causal = False
        out = F.scaled_dot_product_attention(
            q_THd[start:end].transpose(0, 1)[None], k_CGd.to(q_THd.dtype).transpose(0, 1)[None],
            v_CGd.to(q_THd.dtype).transpose(0, 1)[None], attn_mask=mask, is_causal=causal,
            scale=scale, enable_gqa=heads != groups)
        out_THd[start:end] = out[0].transpose(0, 1)
    return out_THd


def log_softmax(logits_TV: Tensor) -> Tensor:
    """[T, V]."""
    return F.log_softmax(logits_TV.float(), dim=-1)


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """[T]."""
    return log_softmax(logits_TV).gather(1, targets_T[:, None])[:, 0]


def argmax(logits_TV: Tensor) -> Tensor:
    """int64 [T]."""
    return logits_TV.argmax(dim=-1)
