"""What each method sends is its closed form; and which settings go together."""

from __future__ import annotations

import pytest
import torch

from kilter.comm.axis import Axis
from kilter.comm.counter import CommCounter
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.ops import exact_ops
from kilter.parallel.context.mask import Mask
from kilter.parallel.context.placement import Placement
from kilter.parallel.context.plan import ContextConfig, Method, spread_batch, wire_bytes
from kilter.parallel.context.ring import Route
from tests.ranks import RankPool

T, D = 64, 8


def counted(config: ContextConfig, heads: int, groups: int, kv_dtype: torch.dtype,
            window: int | None = None) -> tuple[int, int]:
    """Bytes of one attention forward and of its backward."""
    mesh = Mesh(Layout(cp=torch.distributed.get_world_size()))
    local = spread_batch(Batch.of([list(range(T))]), mesh.axis("cp"), config)
    q = torch.randn(local.batch.num_tokens, heads, D, requires_grad=True)
    k, v = (torch.randn(local.batch.num_tokens, groups, D).to(kv_dtype).requires_grad_()
            for _ in range(2))
    assert local.batch.attend is not None
    with CommCounter(mesh.axes()) as counter:
        out = local.batch.attend(exact_ops(), q, k, v, scale=0.3, window=window)
        forward = counter.bytes("cp")
        out.sum().backward()
    assert set(axis for axis, _ in counter.traffic) <= {"cp"}
    return forward, counter.bytes("cp") - forward


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("method", "placement"), [
    ("ring", "zigzag"), ("ring", "striped"), ("ring", "contiguous"), ("ulysses", "contiguous"),
    ("all_gather", "zigzag")])
def test_closed_forms(ranks: RankPool, method: Method, placement: str, n: int) -> None:
    config = ContextConfig(method, placement)  # type: ignore[arg-type]
    for heads, groups, kv_dtype in ((4, 2, torch.float32), (8, 1, torch.bfloat16)):
        form = wire_bytes(method, T, groups, heads, D, n, placement=config.placement,
                          kv_bytes=kv_dtype.itemsize)
        found = ranks.run(n, counted, config, heads, groups, kv_dtype)
        if placement == "contiguous" and method == "ring":
            assert sum(f for f, _ in found) // n == form.forward
            assert sum(b for _, b in found) // n == form.backward
        else:
            assert set(found) == {(form.forward, form.backward)}


def test_one_rank_sends_nothing() -> None:
    assert wire_bytes("ring", T, 2, 4, D, 1).forward == 0


def test_a_window_stays_near(ranks: RankPool) -> None:
    """Blocks of 16 rows and a window of 9: each goes to the next rank and no further."""
    found = ranks.run(4, counted, ContextConfig("ring", "contiguous"), 4, 2, torch.float32, 9)
    block = 16 * 2 * 2 * D * 4
    assert found == [(block, block)] + [(block, 2 * block)] * 2 + [(0, block)]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_route_brings_everything_home(n: int, window: int | None, kind: str) -> None:
    """Played without ranks: whoever sees a block gets it, everybody's share of its gradient arrives
    once, and nobody sends what he does not have."""
    mask = Mask.causal([0, 30, 34, 60], window)
    placement = getattr(Placement, kind)(mask.bounds.tolist(), n)
    routes = [Route.of(placement, mask, Axis("cp", tuple(range(n)), r)) for r in range(n)]
    for route in routes:
        assert route.nearest == routes[0].nearest and route.farthest == routes[0].farthest
    held = [{r} for r in range(n)]
    sums: list[dict[int, set[int]]] = [{} for _ in range(n)]
    home: list[set[int]] = [set() for _ in range(n)]
    for step in range(n + 1):
        keys, grads = routes[0].keys_at(step), routes[0].grads_at(step)
        assert all(m.block in held[m.source] for m in keys)
        arriving = [(m.target, m.block, sums[m.source].pop(m.block)) for m in grads]
        assert not any(sums)
        for r, route in enumerate(routes):
            block = (r - step) % n
            if step < n and route.bands[step] is not None:
                assert block in held[r]
                (home[r] if step == 0 else sums[r].setdefault(block, set())).add(r)
        held = [{m.block for m in keys if m.target == r} for r in range(n)]
        for target, block, ranks in arriving:
            into = home[target] if target == block else sums[target].setdefault(block, set())
            assert not into & ranks
            into |= ranks
    for block in range(n):
        assert home[block] == {(block + d) % n for d in range(n)
                               if routes[(block + d) % n].bands[d] is not None}


@pytest.mark.parametrize(("method", "placement", "block", "word"), [
    ("ulysses", "zigzag", 128, "ulysses needs the placement contiguous"),
    ("ring", "balanced", 128, "all_gather only"), ("star", "zigzag", 128, "'star'"),
    ("ring", "random", 0, "'random'.*block is 0")])
def test_settings_that_do_not_go_together(method: str, placement: str, block: int,
                                          word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ContextConfig(method, placement, block)  # type: ignore[arg-type]
