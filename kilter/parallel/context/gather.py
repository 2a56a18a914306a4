"""All-gather attention: every rank gets all keys and values and attends from its own query rows.

For a causal mask the forward pass is the exact op over a paged cache: the gathered keys lie in
pages of their documents, and every run of neighbouring query rows is a sequence with so much
context. A row of that op depends on nothing but its keys in their order, so the bits are one
device's under any placement. With spans it is `kilter.ops.band_attention`, equal within rounding.

Backward gathers keys and values again rather than keep them, and each rank gets the sum of its own
keys' gradients by a reduce-scatter in the tree over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_gather_rows, tree_reduce_scatter_rows
from kilter.ops import Ops
from kilter.ops.attention import attention
from kilter.ops.band_attention import Bands, band_attention, band_attention_grad
from kilter.parallel.context.mask import Mask, side_by_side
from kilter.parallel.context.placement import Placement

# Rows of a page. Small ones waste little on short documents, large ones keep tables of pages small.
PAGE = 32


class GatherAttention:
    """Attention of one batch's rows over an axis, of any size, under any mask and placement; an
    `Attend` of `kilter.models.batch`."""

    def __init__(self, placement: Placement, mask: Mask, axis: Axis,
                 device: torch.device | str = "cpu") -> None:
        self.placement, self.axis = placement, axis
        self._mask = mask.padded(placement.pads)
        self._pages = (Pages.of(placement, self._mask, axis.index, torch.device(device))
                       if mask.is_causal else None)
        self._views: dict[int | None, View] = {}

    def __call__(self, ops: Ops, q_THd: Tensor, keys_TGd: Tensor, values_TGd: Tensor, *,
                 scale: float, window: int | None) -> Tensor:
        """The kernels are the exact ones, whatever ``ops`` are."""
        if window not in self._views:
            self._views[window] = View(self.placement, self._mask.within(window), self.axis,
                                       self._pages)
        out: Tensor = _Gather.apply(q_THd, keys_TGd, values_TGd, self._views[window], scale)
        return out


@dataclass(frozen=True, eq=False)
class Pages:
    """A causal pack's gathered keys as a paged cache, and this rank's query rows in it.

    Attributes:
        rows: int64 [slots], which gathered row each slot holds; any where no key belongs.
        cu_S1, context_S, table_SP: as `kilter.ops.attention` takes them.
        longest: most query rows of a run.
    """

    rows: Tensor
    cu_S1: Tensor
    context_S: Tensor
    table_SP: Tensor
    longest: int

    @staticmethod
    def of(placement: Placement, mask: Mask, rank: int, device: torch.device) -> Pages:
        bounds = mask.bounds
        pages = -(-np.diff(bounds) // PAGE)
        first_page = pages.cumsum() - pages
        order = placement.order
        document = np.searchsorted(bounds, order, side="right") - 1
        slots = np.zeros(pages.sum() * PAGE, dtype=np.int64)
        slots[first_page[document] * PAGE + order - bounds[document]] = np.arange(len(order))

        own = placement.rows(rank)
        document = np.searchsorted(bounds, own, side="right") - 1
        new = np.ones(len(own), dtype=bool)
        new[1:] = (document[1:] != document[:-1]) | (own[1:] != own[:-1] + 1)
        starts = np.append(np.flatnonzero(new), len(own))
        last = starts[1:] - 1  # of each run
        context = own[last] - bounds[document[last]] + 1
        width = -(-int(context.max(initial=0)) // PAGE)
        table = np.minimum(first_page[document[last]][:, None] + np.arange(width),
                           max(int(pages.sum()) - 1, 0))

        def index(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x.astype(np.int32)).to(device)

        return Pages(torch.from_numpy(slots).to(device), index(starts), index(context),
                     index(table), int(np.diff(starts).max(initial=0)))


@dataclass(frozen=True, eq=False)
class View:
    """What this rank's rows see of the gathered rows, for layers of one window."""

    placement: Placement
    mask: Mask
    axis: Axis
    pages: Pages | None

    @cached_property
    def bands(self) -> Bands:
        strips = self.placement.strips
        return side_by_side([self.mask.bands(strips[self.axis.index], theirs) for theirs in strips],
                            self.placement.sizes)

    def gathered(self, x_TGd: Tensor) -> Tensor:
        """All ranks' rows, rank after rank."""
        return all_gather_rows(x_TGd.contiguous(), self.axis, self.placement.sizes)

    def summed(self, x_NGd: Tensor) -> Tensor:
        """This rank's rows of the sum of what all ranks have for all rows."""
        return tree_reduce_scatter_rows(x_NGd, self.axis, self.placement.sizes)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, view: View,
                scale: float) -> Tensor:
        pages = view.pages
        if pages is None:
            out_THd, lse_TH = band_attention(q_THd, view.gathered(k_TGd), view.gathered(v_TGd),
                                             view.bands, scale=scale)
        else:
            out_THd, lse_TH = attention(
                q_THd, view.gathered(k_TGd)[pages.rows], view.gathered(v_TGd)[pages.rows],
                pages.cu_S1, context_S=pages.context_S, page_table_SP=pages.table_SP,
                page_size=PAGE, scale=scale, window=view.mask.window, max_seqlen=pages.longest,
                return_lse=True)
        ctx.save_for_backward(q_THd, k_TGd, v_TGd, out_THd, lse_TH)
        ctx.view, ctx.scale = view, scale
        return out_THd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_THd, k_TGd, v_TGd, out_THd, lse_TH = ctx.saved_tensors
        view = ctx.view
        dq_THd, dk_NGd, dv_NGd = band_attention_grad(
            grads[0].contiguous(), q_THd, view.gathered(k_TGd), view.gathered(v_TGd), out_THd,
            lse_TH, view.bands, scale=ctx.scale)
        dk_TGd, dv_TGd = (view.summed(x).to(k_TGd.dtype) for x in (dk_NGd, dv_NGd))
        return dq_THd.to(q_THd.dtype), dk_TGd, dv_TGd, None, None
