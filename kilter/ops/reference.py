"""Every op in plain torch: what runs where there is no compiler, and the tests' second opinion.

Slow, and row-invariant by construction. torch's own reductions and transcendental functions may
treat an element by where it stands (vector body or tail, thread boundary), so here a sum is a
tree of elementwise adds, an exponential is a polynomial in elementwise double arithmetic, and a
matrix product is always taken on blocks of exactly `ROWS` rows.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8  # rows of every matrix product
_TILE = 1 << 22  # elements of an intermediate held at a time


class Packed(Protocol):
    """A packed weight, as far as this file knows it."""

    def dequantize(self) -> Tensor: ...


def _dense(weight: Tensor | Packed) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, element i with i + n/2, then i + n/4, ...; n is the next power
    of two. Padding is -0.0, which leaves every number as it is, so a longer padding changes
    nothing."""
    n = 1 << max(0, (x.shape[-1] - 1).bit_length())
    x = F.pad(x, (0, n - x.shape[-1]), value=-0.0)
    while n > 1:
        n //= 2
        x = x[..., :n] + x[..., n:]
    return x[..., 0]


def exp(x: Tensor) -> Tensor:
    """e^x in double: x = n ln 2 + r, a Taylor polynomial in r, and 2^n by its bits."""
    x = x.double().clamp(-708.0, 709.0)
    n = torch.round(x * 1.4426950408889634)
    r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
    p = torch.full_like(r, 1.0 / math.factorial(13))
    for k in range(12, -1, -1):
        p = p * r + 1.0 / math.factorial(k)
    bits = (n.nan_to_num().long() + 1023) << 52
    return p * bits.view(torch.float64)


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of a few numbers, each by itself."""
    logs = [math.log(v) if 0.0 < v < math.inf else v if v > 0.0 else math.nan
            for v in x.flatten().tolist()]
    return torch.tensor(logs, dtype=torch.float64, device=x.device).view(x.shape)


def linear(x_TK: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """[T, N] in float32."""
    weight_NK = _dense(weight)
    tokens, features = x_TK.shape
    out_TN = x_TK.new_empty(tokens, weight_NK.shape[0])
    for t in range(0, tokens, ROWS):
        block = x_TK.new_zeros(ROWS, features)
        rows = x_TK[t:t + ROWS]
        block[:len(rows)] = rows
        out_TN[t:t + ROWS] = (block @ weight_NK.mT)[:len(rows)]
    return out_TN if bias is None else out_TN + bias


def gated_linear(x_TK: Tensor, weight: Tensor | Packed, bias: Tensor | None = None,
                 activation: str = "silu") -> Tensor:
    """[T, F]: activation(gate) * up of a linear whose rows are [gate; up]."""
    return gated_activation(linear(x_TK, weight, bias), activation)


def embed(tokens_T: Tensor, weight: Tensor | Packed, scale: float = 1.0) -> Tensor:
    """[T, D]: rows of the table, times `scale`.

    Raises:
        ValueError: for an id outside the vocabulary.
    """
    table_VD = weight if isinstance(weight, Tensor) else weight.dequantize()
    check_range("token id", tokens_T, table_VD.shape[0])
    return table_VD[tokens_T].float() * scale


def gated_activation(gate_up_TF2: Tensor, activation: str) -> Tensor:
    """[T, F]."""
    gate, up = gate_up_TF2.double().chunk(2, dim=-1)
    if activation == "silu":
        twice_u = gate
    else:
        twice_u = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))
    return (gate / (1.0 + exp(-twice_u))).float() * up.float()


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, zero_centred: bool = False,
             residual: Tensor | None = None) -> Tensor:
    """Over the last dimension of any shape."""
    mean = tree_sum(x * x) / x.shape[-1]
    y = (x * (1.0 / torch.sqrt(mean + eps))[..., None]) * (
        1.0 + weight_D if zero_centred else weight_D)
    return y if residual is None else residual + y


def rope_qkv_into(qkv_TGXd: Tensor, positions_T: Tensor, cos_Pe: Tensor, sin_Pe: Tensor,
                  q_norm: Tensor | None, k_norm: Tensor | None, eps: float, zero_centred: bool,
                  keys: Tensor, values: Tensor, slots_T: Tensor | None) -> Tensor:
    """q [T, H, d]; keys and values are written at the slots (None: slot t for token t)."""
    check_range("position", positions_T, cos_Pe.shape[0])
    tokens, groups, parts, dim = qkv_TGXd.shape
    cos = cos_Pe[positions_T.long()][:, None, None]
    sin = sin_Pe[positions_T.long()][:, None, None]

    def turn(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = rms_norm(x, norm, eps, zero_centred)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    index = torch.arange(tokens, device=keys.device) if slots_T is None else slots_T.long()
    check_range("slot", index, keys.shape[0])
    keys[index] = turn(qkv_TGXd[:, :, -2:-1], k_norm)[:, :, 0].to(keys.dtype)
    values[index] = qkv_TGXd[:, :, -1].to(values.dtype)
    return turn(qkv_TGXd[:, :, :-2], q_norm).reshape(tokens, groups * (parts - 2), dim)


def attention(q_THd: Tensor, keys: Tensor, values: Tensor, cu_seqlens_S1: Tensor,
              context_S: Tensor | None, page_table_SP: Tensor | None, page_size: int,
              scale: float, window: int) -> tuple[Tensor, Tensor]:
    """([T, H, d], log-sum-exp [T, H]); window 0 is none."""
    check_lengths(q_THd, keys, cu_seqlens_S1, context_S, page_table_SP, page_size)
    tokens, heads, dim = q_THd.shape
    groups = keys.shape[1]
    out_THd, lse_TH = torch.empty_like(q_THd), q_THd.new_empty(tokens, heads)
    for s, (start, end) in enumerate(pairwise(cu_seqlens_S1.tolist())):
        if start == end:
            continue
        if context_S is None or page_table_SP is None:
            context, slots = end - start, torch.arange(start, end, device=keys.device)
        else:
            context = int(context_S[s])
            index = torch.arange(context, device=keys.device)
            slots = page_table_SP[s].long()[index // page_size] * page_size + index % page_size
        k_GCd = keys[slots].float().transpose(0, 1)
        v_GdC = values[slots].float().permute(1, 2, 0)
        step = max(1, _TILE // (heads * dim * context))
        for t in range(start, end, step):
            rows = slice(t, min(t + step, end))
            q = q_THd[rows].view(-1, groups, heads // groups, 1, dim) * scale
            position = torch.arange(rows.start, rows.stop, device=keys.device) - end + context
            column = torch.arange(context, device=keys.device)
            seen = column <= position[:, None]
            if window:
                seen &= column > position[:, None] - window
            seen = seen[:, None, None]  # [t, 1, 1, C]
            score = torch.where(seen, tree_sum(q * k_GCd[None, :, None]), -math.inf)
            top = score.amax(-1, keepdim=True)
            p = torch.where(seen, exp(score - top).float(), -0.0)
            total = tree_sum(p)
            weighted = torch.where(seen[..., None, :], p[..., None, :] * v_GdC[None, :, None],
                                   -0.0)
            out = tree_sum(weighted) / total[..., None]
            out_THd[rows] = out.reshape(-1, heads, dim)
            lse_TH[rows] = (top[..., 0].double() + _log(total)).float().reshape(-1, heads)
    return out_THd, lse_TH


def vocab_chunk(vocab: int) -> int:
    """Neighbouring tokens whose exponentials are summed apart: a power of two up to 128, at least
    eight times in the vocabulary where that is possible."""
    return min(128, 1 << (max(1, vocab // 8).bit_length() - 1))


def chunk_sums(logits_TV: Tensor, top_T: Tensor, chunk: int) -> Tensor:
    """float32 [T, ceil(V / chunk)]: sums of exp(logits - top), each a tree over its chunk."""
    e = exp(logits_TV - top_T[:, None])
    return tree_sum(F.pad(e, (0, -e.shape[1] % chunk)).unflatten(1, (-1, chunk))).float()


def _log_sum_exp(top_T: Tensor, sums_TC: Tensor) -> Tensor:
    """double [T]."""
    return top_T.double() + _log(tree_sum(sums_TC.double()))


def _tops_and_sums(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    top_T = logits_TV.amax(-1)
    return top_T, chunk_sums(logits_TV, top_T, vocab_chunk(logits_TV.shape[1]))


def logprobs_from_sums(chosen_T: Tensor, top_T: Tensor,
                       sums_TC: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, log-sum-exp), float32 [T]."""
    lse_T = _log_sum_exp(top_T, sums_TC)
    return (chosen_T.double() - lse_T).float(), lse_T.float()


def log_softmax(logits_TV: Tensor) -> Tensor:
    """[T, V]."""
    return (logits_TV.double() - _log_sum_exp(*_tops_and_sums(logits_TV))[:, None]).float()


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, log-sum-exp), float32 [T]."""
    check_range("target", targets_T, logits_TV.shape[1])
    chosen_T = logits_TV.gather(1, targets_T[:, None])[:, 0]
    return logprobs_from_sums(chosen_T, *_tops_and_sums(logits_TV))


def argmax(logits_TV: Tensor) -> Tensor:
    """int64 [T]: the lowest index of the largest; the first NaN where there is one."""
    index = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    nan = logits_TV.isnan()
    best = torch.where(nan.any(-1, keepdim=True), nan,
                       logits_TV == logits_TV.amax(-1, keepdim=True))
    return torch.where(best, index, logits_TV.shape[1]).amin(-1)


def check_range(what: str, index: Tensor, size: int) -> None:
    """Raises ValueError if an index is not in [0, size)."""
    if index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= size:
            raise ValueError(f"A {what} is out of range: {low if low < 0 else high}, where they "
                             f"must be from 0 to {size - 1}.")


def check_lengths(q_THd: Tensor, keys: Tensor, cu_seqlens_S1: Tensor, context_S: Tensor | None,
                  page_table_SP: Tensor | None, page_size: int) -> None:
    """Raises ValueError if attention's index tensors make no sense."""
    cu = cu_seqlens_S1.tolist()
    lengths = [b - a for a, b in pairwise(cu)]
    if cu[0] != 0 or cu[-1] != q_THd.shape[0] or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, "
                         f"{q_THd.shape[0]}; it is {cu}.")
    if context_S is None or page_table_SP is None:
        return
    for s, (length, context) in enumerate(zip(lengths, context_S.tolist(), strict=True)):
        if context < length:
            raise ValueError(f"Sequence {s} has {length} new tokens but a context of {context}; "
                             f"the context counts them too.")
        pages = -(-context // page_size) if length else 0
        if pages > page_table_SP.shape[1]:
            raise ValueError(f"Sequence {s} has a context of {context} tokens, {pages} pages of "
                             f"{page_size}, but the page table has {page_table_SP.shape[1]}.")
        check_range(f"page of sequence {s}", page_table_SP[s, :pages],
                    keys.shape[0] // page_size)
