"""Attention over ranks is attention on one: outputs and gradients, whatever method and placement.

The oracle is a dense softmax in float64 over the mask, cell by cell, with torch's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.ops import exact_ops, stock_ops
from kilter.parallel.context.balance import place
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.plan import ContextConfig, spread_batch
from kilter.parallel.context.ulysses import kv_copies
from tests.parallel.context.packs import boundaries, dense, pack
from tests.ranks import RankPool

RING = [ContextConfig("ring", "contiguous"), ContextConfig("ring", "zigzag"),
        ContextConfig("ring", "striped")]
ULYSSES = [ContextConfig("ulysses", "contiguous")]
GATHER = [ContextConfig("all_gather", "contiguous"), ContextConfig("all_gather", "zigzag"),
          ContextConfig("all_gather", "striped"), ContextConfig("all_gather", "balanced", block=4)]


@dataclass(frozen=True)
class Case:
    """One attention: documents, heads, window, spans, and how rows are padded and rounded."""

    lengths: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    window: int | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    multiple: int = 1
    kv_dtype: torch.dtype = torch.float32
    exact: bool = True
    dim: int = 16

    @property
    def mask(self) -> Mask:
        return Mask.with_spans(boundaries(self.lengths), self.spans or (), self.window)

    @property
    def pack_mask(self) -> Mask:
        """What a placement knows of: not the window, which is a layer's."""
        return self.mask if self.spans else Mask.causal(boundaries(self.lengths))

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, of all rows."""
        generator = torch.Generator().manual_seed(5)
        rows = sum(self.lengths)
        q, k, v, dout = (torch.randn(rows, heads, self.dim, generator=generator)
                         for heads in (self.heads, self.groups, self.groups, self.heads))
        return [q, k.to(self.kv_dtype), v.to(self.kv_dtype), dout]


CASES = [
    Case((37,)),
    Case((48, 3, 1, 20), heads=8, groups=4, multiple=4),
    Case((9, 1, 2, 30, 5, 17), heads=4, groups=1),
    Case((64, 16), heads=8, groups=2, window=7, multiple=8),
    Case((70,), window=1, groups=4),
    Case((33, 40), heads=8, groups=4, kv_dtype=torch.bfloat16),
    Case((2, 1)),  # fewer rows than four ranks
    Case((25, 14), exact=False),
]
SPANS = [Case((40, 30), spans=((3, 12), (20, 40), (50, 55)), multiple=2),
         Case((64,), spans=((0, 31), (31, 32), (40, 60)), window=9, groups=1)]


@cache
def oracle(case: Case) -> list[Tensor]:
    """Output, dq, dk, dv of all rows, float32."""
    q, k, v, dout = (x.double() for x in case.tensors())
    for x in (q, k, v):
        x.requires_grad_()
    per = case.heads // case.groups
    score = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(per, 1)) * 0.3
    score = score.masked_fill(~torch.from_numpy(dense(case.mask)), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", score.softmax(-1), v.repeat_interleave(per, 1))
    out.backward(dout)
    grads = [x.grad for x in (q, k, v)]
    return [x.detach().float() for x in (out, *grads) if x is not None]


def spread(config: ContextConfig, cases: Sequence[Case]) -> list[list[Tensor]]:
    """Output, dq, dk, dv of this rank's rows, for each case, and its rows' number."""
    world = torch.distributed.get_world_size()
    axis = Mesh(Layout(cp=world) if world > 1 else Layout()).axis("cp")
    found = []
    for case in cases:
        local = spread_batch(pack(case.lengths), axis, config, case.multiple,
                             mask=case.pack_mask if case.spans else None)
        q, k, v, dout = (local.local(x, 0.5).contiguous() for x in case.tensors())
        for x in (q, k, v):
            x.requires_grad_()
        assert local.batch.attend is not None
        out = local.batch.attend(exact_ops() if case.exact else stock_ops(), q, k, v, scale=0.3,
                                 window=case.window)
        out.backward(dout)
        found.append([out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)])
    return found


def check(ranks: RankPool, n: int, config: ContextConfig, cases: Sequence[Case]) -> None:
    found = ranks.run(n, spread, config, cases)
    for i, case in enumerate(cases):
        placement = place(config.placement, case.pack_mask, n, config.block, case.multiple)
        tolerance = 1e-5 if case.kv_dtype == torch.float32 else 1e-2
        for name, parts, expected in zip(
                ("out", "dq", "dk", "dv"), zip(*(rank[i] for rank in found), strict=True),
                oracle(case), strict=True):
            torch.testing.assert_close(
                placement.whole(parts).float(), expected, rtol=tolerance, atol=tolerance,
                msg=lambda text, name=name, case=case: f"{name} of {case}: {text}")


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("config", RING + ULYSSES + GATHER, ids=str)
def test_whole_attention(ranks: RankPool, config: ContextConfig, n: int) -> None:
    check(ranks, n, config, CASES)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_vision_language_mask(ranks: RankPool, n: int) -> None:
    check(ranks, n, GATHER[-1], SPANS)
    check(ranks, n, RING[1], SPANS)


def test_three_ranks(ranks: RankPool) -> None:
    for config in (RING[0], RING[1], GATHER[1]):
        check(ranks, 3, config, CASES[:4])
    # Six query heads of two KV heads: the middle rank's read both.
    check(ranks, 3, ULYSSES[0], [Case((20, 11), heads=6, groups=2)])


def test_a_ring_of_two_twice(ranks: RankPool) -> None:
    """The same bits every time."""
    one, two = (ranks.run(2, spread, RING[1], CASES[1:2]) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(one, two, strict=True)
               for a, b in zip(x[0], y[0], strict=True))


@pytest.mark.parametrize(("heads", "groups", "n", "copies"), [
    (8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (12, 3, 2, 2), (12, 3, 4, 4),
    (9, 3, 3, 1), (6, 2, 3, 3), (8, 1, 1, 1)])
def test_copies_of_kv_heads(heads: int, groups: int, n: int, copies: int) -> None:
    assert kv_copies(heads, groups, n) == copies
    local_groups = groups * copies // n
    assert groups * copies % n == 0 and heads // n % local_groups == 0
    for rank in range(n):
        for head in range(heads // n):
            theirs = rank * local_groups + head // (heads // n // local_groups)
            assert theirs // copies == (rank * (heads // n) + head) // (heads // groups)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"9 query heads over 2 ranks.*work: 1, 3, 9"):
        kv_copies(9, 3, 2)
