"""Attention of query rows to the keys that bands name: what context parallelism is made of.

A rank has some rows of a pack and meets the keys of others a part at a time. `band_attention` gives
a part's result with its log-sum-exp, `merge_` joins two parts, and `band_attention_grad` gives a
part's gradients once the log-sum-exp of the whole is known. The compiled kernels are deterministic
whatever the threads, and a row's result depends on nothing but the row and its runs. On a causal
pack the results are those of `kilter.ops.attention` within rounding; its gradients are these.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from kilter.ops.cpu.library import Kernel, available
from kilter.ops.dispatch import watched
from kilter.ops.rope import KV_TYPES

NO_LOW, NO_HIGH = -2**62, 2**62  # a band without a lower, an upper bound
_ROWS, _KEYS = 256, 2048  # query tokens and keys of a tile of the pure-torch side


@dataclass(frozen=True)
class Bands:
    """Which keys each query row sees; made once per batch, on the host.

    Attributes:
        runs: int64 [n, 6] on the CPU, rows (q0, q1, k0, k1, low, high): query q0 + i, for i from 0
            to q1 - q0, sees key k0 + j, for j from 0 to k1 - k0, where low <= j - i <= high. Sorted
            by q0. Runs of the same queries add up, and their key ranges are disjoint; other query
            ranges are disjoint. Runs without queries or keys are dropped, and bounds beyond NO_LOW
            and NO_HIGH are brought back to them.

    Raises:
        ValueError: for anything else, saying all that is wrong.
    """

    runs: Tensor

    def __post_init__(self) -> None:
        runs = self.runs
        if runs.dim() != 2 or runs.shape[1] != 6 or runs.dtype != torch.int64 or runs.is_cuda:
            raise ValueError(f"Bands: runs must be int64 [n, 6] on the CPU, but are {runs.dtype} "
                             f"{list(runs.shape)} on {runs.device}.")
        if not _has_data(runs):
            return
        array = runs.numpy()
        live = array[(array[:, 0] < array[:, 1]) & (array[:, 2] < array[:, 3])]
        if problems := _bad_ranges(array) or _bad_pairs(live):
            raise ValueError(f"Bands: {'; '.join(problems)}.")
        live[:, 4:] = live[:, 4:].clip(NO_LOW, NO_HIGH)
        object.__setattr__(self, "runs", torch.from_numpy(live))

    @staticmethod
    def causal(cu_seqlens_S1: Tensor, window: int = 0) -> Bands:
        """Of flat sequences whose tokens see themselves and those before them, all or, with a
        window, the window - 1 nearest."""
        cu = cu_seqlens_S1.cpu().numpy()
        runs = np.empty((len(cu) - 1, 6), np.int64)
        runs[:, 0] = runs[:, 2] = cu[:-1]
        runs[:, 1] = runs[:, 3] = cu[1:]
        runs[:, 4:] = 1 - window if window else NO_LOW, 0
        return Bands(torch.from_numpy(runs))

    @cached_property
    def queries(self) -> int:
        """How many query rows the runs reach to."""
        return int(self.runs.numpy()[:, 1].max(initial=0))

    @cached_property
    def keys(self) -> int:
        """How many key rows the runs reach to."""
        return int(self.runs.numpy()[:, 3].max(initial=0))


def band_attention(q_THd: Tensor, k_NGd: Tensor, v_NGd: Tensor, bands: Bands, *,
                   scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row to the keys it sees; query head h reads KV head h // (H / G).

    Args:
        q_THd: [T, H, d], float32 on the CPU; bfloat16 and float16 too on CUDA.
        k_NGd, v_NGd: [N, G, d], float32, bfloat16 or float16, widened exactly.
        bands: which keys each row sees.
        scale: multiplies the scores.

    Returns:
        [T, H, d] in q's dtype, and float32 [T, H], the natural log of each row's sum of
        exponentials. A row that sees nothing has 0 and -inf.

    Raises:
        ValueError: for other shapes or dtypes, or bands that reach beyond the rows. Autograd does
            not go through: the backward pass is `band_attention_grad`.
    """
    _check(q_THd, k_NGd, v_NGd, bands)
    op = _forward_op if watched(q_THd, k_NGd, v_NGd) else _forward
    return op(q_THd, k_NGd, v_NGd, bands.runs, scale)


def band_attention_grad(dout_THd: Tensor, q_THd: Tensor, k_NGd: Tensor, v_NGd: Tensor,
                        out_THd: Tensor, lse_TH: Tensor, bands: Bands, *,
                        scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """What the keys at hand add to the gradients of an attention over these and other keys.

    With P = exp(S - lse) and D = rowsum(dO * O): dV = P' dO, dS = P (dO V' - D), dQ = scale dS K,
    dK = scale dS' Q (arXiv 2205.14135). Rows whose lse is -inf add nothing.

    Args:
        dout_THd: the gradient of the merged output.
        out_THd, lse_TH: the merged output and its log-sum-exp, over all keys of each row.
        q_THd, k_NGd, v_NGd, bands, scale: as in `band_attention`.

    Returns:
        (dq [T, H, d], dk [N, G, d], dv [N, G, d]), float32 whatever the inputs are: these are
        terms of sums.

    Raises:
        ValueError: as `band_attention`.
    """
    _check(q_THd, k_NGd, v_NGd, bands)
    if dout_THd.shape != q_THd.shape or out_THd.shape != q_THd.shape or (
            lse_TH.shape != q_THd.shape[:2] or lse_TH.dtype != torch.float32):
        raise ValueError(f"Band attention: for q {list(q_THd.shape)} the gradient needs dout and "
                         f"out of the same shape and float32 lse [T, H], but got "
                         f"{list(dout_THd.shape)}, {list(out_THd.shape)} and {lse_TH.dtype} "
                         f"{list(lse_TH.shape)}.")
    tensors = (dout_THd, q_THd, k_NGd, v_NGd, out_THd, lse_TH)
    op = _gradient_op if watched(*tensors) else _gradient
    return op(*tensors, bands.runs, scale)


def merge_(out_THd: Tensor, lse_TH: Tensor, more_out_THd: Tensor, more_lse_TH: Tensor) -> None:
    """Joins, in place, two results of the same rows over disjoint keys (arXiv 2310.01889).

    Args:
        out_THd, lse_TH: contiguous [T, H, d] and float32 [T, H], overwritten by the whole.
        more_out_THd, more_lse_TH: the other part's, of the same shapes. A log-sum-exp of -inf on
            either side leaves the other's numbers.

    Raises:
        ValueError: for shapes or dtypes that do not fit.
    """
    if (more_out_THd.shape != out_THd.shape or lse_TH.shape != out_THd.shape[:2]
            or more_lse_TH.shape != lse_TH.shape or lse_TH.dtype != torch.float32
            or more_lse_TH.dtype != torch.float32
            or not (out_THd.is_contiguous() and lse_TH.is_contiguous())):
        raise ValueError(
            f"Merging needs contiguous out [T, H, d] and float32 lse [T, H], twice, but got "
            f"{list(out_THd.shape)}, {lse_TH.dtype} {list(lse_TH.shape)}, "
            f"{list(more_out_THd.shape)} and {more_lse_TH.dtype} {list(more_lse_TH.shape)}.")
    tensors = (out_THd, lse_TH, more_out_THd, more_lse_TH)
    (_merge_op if watched(*tensors) else _merge)(*tensors)


class _BandAttentionArgs(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("q", "k", "v", "runs", "out", "lse")),
                *((name, ctypes.c_int64) for name in ("num_runs", "heads", "groups", "dim")),
                ("scale", ctypes.c_float)]


class _BandAttentionGradArgs(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in
                  ("q", "k", "v", "out", "dout", "lse", "runs", "dq", "dk", "dv")),
                *((name, ctypes.c_int64) for name in
                  ("tokens", "num_runs", "heads", "groups", "dim")),
                ("scale", ctypes.c_float)]


class _BandMergeArgs(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("out", "lse", "more_out", "more_lse")),
                ("rows", ctypes.c_int64), ("dim", ctypes.c_int64)]


_kernel = Kernel("kt_band_attention", _BandAttentionArgs)
_grad_kernel = Kernel("kt_band_attention_grad", _BandAttentionGradArgs)
_merge_kernel = Kernel("kt_band_merge", _BandMergeArgs)


def _has_data(x: Tensor) -> bool:
    return type(x) is Tensor and not x.is_meta


def _bad_ranges(runs: np.ndarray) -> list[str]:
    """What is wrong with runs by themselves."""
    q0, q1, k0, k1 = runs.T[:4]
    good = (q0 >= 0) & (q1 >= q0) & (k0 >= 0) & (k1 >= k0)
    return [] if good.all() else [
        f"ranges of queries [q0, q1) and keys [k0, k1) must be 0 <= q0 <= q1 and 0 <= k0 <= k1, "
        f"but there is {runs[good.argmin()].tolist()}"]


def _bad_pairs(runs: np.ndarray) -> list[str]:
    """What is wrong between runs that follow each other, as given and in the order of keys."""
    found = []

    def look(rule: str, a: np.ndarray, b: np.ndarray, good: np.ndarray) -> None:
        if not good.all():
            r = int(good.argmin())
            found.append(f"{rule}, but there are {a[r].tolist()} and {b[r].tolist()}")

    a, b = runs[:-1], runs[1:]
    same = (a[:, :2] == b[:, :2]).all(1)
    look("runs must be sorted by q0, with equal or disjoint ranges of queries", a, b,
         same | (b[:, 0] >= a[:, 1]))
    by_keys = runs[np.lexsort((runs[:, 2], runs[:, 0]))]
    a, b = by_keys[:-1], by_keys[1:]
    look("runs of the same queries must have disjoint keys", a, b,
         (a[:, 0] != b[:, 0]) | (b[:, 2] >= a[:, 3]))
    return found


def _check(q: Tensor, k: Tensor, v: Tensor, bands: Bands) -> None:
    problems = []
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or (
            k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        problems.append(f"it needs q [T, H, d] and keys and values [N, G, d] with H a multiple of "
                        f"G, but got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    elif _has_data(bands.runs) and (bands.queries > q.shape[0] or bands.keys > k.shape[0]):
        problems.append(f"the bands reach to query {bands.queries} and key {bands.keys}, but "
                        f"there are {q.shape[0]} queries and {k.shape[0]} keys")
    if q.dtype not in (KV_TYPES if q.is_cuda else (torch.float32,)):
        problems.append(f"queries on {q.device.type} must not be {q.dtype}; make them float32")
    if k.dtype not in KV_TYPES or v.dtype != k.dtype:
        problems.append(f"keys and values must be one of {', '.join(map(str, KV_TYPES))}, but are "
                        f"{k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        problems.append(f"queries, keys and values must be on one device, but are on {q.device}, "
                        f"{k.device}, {v.device}")
    if problems:
        raise ValueError(f"Band attention: {'; '.join(problems)}.")


def _forward(q: Tensor, k: Tensor, v: Tensor, runs: Tensor,
             scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type != "cpu" or not available():
        return _forward_in_torch(q, k, v, runs, scale)
    q, k, v = q.contiguous(), k.float().contiguous(), v.float().contiguous()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)
    tensors = (q, k, v, runs, out, lse)
    _kernel.call(*(x.data_ptr() for x in tensors), runs.shape[0], q.shape[1], k.shape[1],
                 q.shape[2], scale, keep=tensors)
    return out, lse


@torch.library.custom_op("kilter::band_attention", mutates_args=())
def _forward_op(q: Tensor, k: Tensor, v: Tensor, runs: Tensor,
                scale: float) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, runs, scale)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, runs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _gradient(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
              runs: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (x.float().contiguous() for x in (dout, q, k, v, out))
    lse = lse.contiguous()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.device.type != "cpu" or not available():
        _gradient_in_torch(dout, q, k, v, out, lse, runs, scale, dq, dk, dv)
    else:
        tensors = (q, k, v, out, dout, lse, runs, dq, dk, dv)
        _grad_kernel.call(*(x.data_ptr() for x in tensors), q.shape[0], runs.shape[0], q.shape[1],
                          k.shape[1], q.shape[2], scale, keep=tensors)
    return dq, dk, dv


@torch.library.custom_op("kilter::band_attention_grad", mutates_args=())
def _gradient_op(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                 runs: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _gradient(dout, q, k, v, out, lse, runs, scale)


@_gradient_op.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: Tensor,
      scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return (q.new_empty(q.shape, dtype=torch.float32), k.new_empty(k.shape, dtype=torch.float32),
            v.new_empty(v.shape, dtype=torch.float32))


def _merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    if out.device.type == "cpu" and out.dtype == more_out.dtype == torch.float32 and available():
        tensors = (out, lse, more_out.contiguous(), more_lse.contiguous())
        _merge_kernel.call(*(x.data_ptr() for x in tensors), lse.numel(), out.shape[-1],
                           keep=tensors)
        return
    whole = torch.logaddexp(lse, more_lse)
    shift = whole.masked_fill(whole == -math.inf, 0.0)[..., None]
    keep, add = (lse[..., None] - shift).exp(), (more_lse[..., None] - shift).exp()
    out.copy_(torch.addcmul(out.float() * keep, more_out.float(), add))
    lse.copy_(whole)


@torch.library.custom_op("kilter::band_merge", mutates_args=("out", "lse"))
def _merge_op(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    _merge(out, lse, more_out, more_lse)


@_merge_op.register_fake
def _(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    return None


# The same formulas in torch, a tile of scores at a time.


def _tiles(runs: Tensor, device: torch.device
           ) -> Iterator[tuple[slice, Iterator[tuple[slice, Tensor | None]]]]:
    """Query rows, and the key rows they see with a mask of what they do not, bool [rows, keys],
    None where they see all."""
    for (q0, q1), same in groupby(runs.tolist(), key=lambda run: (run[0], run[1])):
        parts = list(same)
        for first in range(0, q1 - q0, _ROWS):
            last = min(first + _ROWS, q1 - q0)
            yield slice(q0 + first, q0 + last), _key_tiles(parts, first, last, device)


def _key_tiles(runs: list[list[int]], first: int, last: int, device: torch.device
               ) -> Iterator[tuple[slice, Tensor | None]]:
    """Of tokens [first, last) of a query range."""
    for _, _, k0, k1, low, high in runs:
        begin, end = max(0, first + low), min(k1 - k0, last + high)
        for start in range(begin, end, _KEYS):
            stop = min(start + _KEYS, end)
            hidden = None
            if start - (last - 1) < low or stop - 1 - first > high:
                distance = (torch.arange(start, stop, device=device)
                            - torch.arange(first, last, device=device)[:, None])
                hidden = (distance < low) | (distance > high)
            yield slice(k0 + start, k0 + stop), hidden


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[m, G * R, d] as float32 [G, R * m, d], row r * m + t for head r of a group and token t."""
    return x.float().unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_token(x: Tensor, tokens: int) -> Tensor:
    """The inverse: [G, R * m, d] as [m, G * R, d]."""
    return x.unflatten(1, (-1, tokens)).permute(2, 0, 1, 3).flatten(1, 2)


def _hide(score: Tensor, hidden: Tensor | None, value: float) -> None:
    """Puts a value where a row [G, R * m] does not see a key."""
    if hidden is not None:
        score.unflatten(1, (-1, hidden.shape[0])).masked_fill_(hidden, value)


def _forward_in_torch(q: Tensor, k: Tensor, v: Tensor, runs: Tensor,
                      scale: float) -> tuple[Tensor, Tensor]:
    groups = k.shape[1]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    for rows, tiles in _tiles(runs, q.device):
        query = _by_group(q[rows], groups) * scale
        acc = torch.zeros_like(query)
        top, total = torch.full_like(acc[..., :1], -math.inf), torch.zeros_like(acc[..., :1])
        for keys, hidden in tiles:
            score = torch.bmm(query, k[keys].float().permute(1, 2, 0))
            _hide(score, hidden, -math.inf)
            new = torch.maximum(top, score.amax(-1, keepdim=True))
            shift = new.masked_fill(new == -math.inf, 0.0)
            p, keep = score.sub_(shift).exp_(), (top - shift).exp()
            total = total * keep + p.sum(-1, keepdim=True)
            acc = acc.mul_(keep).baddbmm_(p, v[keys].float().movedim(0, 1))
            top = new
        tokens = rows.stop - rows.start
        out[rows] = _by_token(acc / total.masked_fill(total == 0.0, 1.0), tokens).to(q.dtype)
        lse[rows] = _by_token(top + total.log(), tokens)[..., 0]
    return out, lse


def _gradient_in_torch(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                       runs: Tensor, scale: float, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    groups, nothing = k.shape[1], (lse == -math.inf)[..., None]
    delta = (dout * out).sum(-1, keepdim=True).masked_fill_(nothing, 0.0)
    lse = lse[..., None].masked_fill(nothing, math.inf)
    q, dout = q.masked_fill(nothing, 0.0), dout.masked_fill(nothing, 0.0)
    for rows, tiles in _tiles(runs, q.device):
        query, grad, row_lse, row_delta = (_by_group(x[rows], groups)
                                           for x in (q, dout, lse, delta))
        dquery = torch.zeros_like(query)
        for keys, hidden in tiles:
            key = k[keys].movedim(0, 1)
            p = torch.bmm(query, key.mT).mul_(scale).sub_(row_lse).exp_()
            _hide(p, hidden, 0.0)
            dv[keys] += torch.bmm(p.mT, grad).movedim(0, 1)
            ds = torch.bmm(grad, v[keys].permute(1, 2, 0)).sub_(row_delta).mul_(p).mul_(scale)
            dquery.baddbmm_(ds, key)
            dk[keys] += torch.bmm(ds.mT, query).movedim(0, 1)
        dq[rows] = _by_token(dquery, rows.stop - rows.start)
