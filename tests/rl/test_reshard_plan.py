"""The plan of a resharding: exact cover by the least bytes, evenly sent; the published table.

Oracles: masks of every element, brute force, Hall's bound, and Table 2 of HybridFlow (arXiv
2409.19256).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.parity import tiny
from kilter.mesh.layout import Layout
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.shards import Box, Shard
from kilter.rl.reshard_layout import (
    _assign,
    consecutive_groups,
    nested_groups,
    rollout_needs,
    rollout_parts,
    trainer_shards,
)
from kilter.rl.reshard_plan import full_gather, group_of, make_plan
from tests.rl.reshard_cases import meta, missing_bytes, plan_of


def table() -> list[dict]:  # type: ignore[type-arg]
    path = Path(__file__).parent / "golden.json"
    return json.loads(path.read_text())["reshard_table"]["cases"]


def hybrid(train: dict[str, int], sharded: bool) -> tuple[list[dict[str, Shard]], int]:
    """(holdings, bytes) of a model that pp · tp ranks share evenly; ``sharded``: and dp's too."""
    layout = Layout(**train)
    rows, layers = 16 * layout.tp * layout.dp, layout.pp * 2
    if sharded:
        n = layout.world
        return [{f"layers.{i}.w": Shard.of((rows * n,), [Box((rank * rows,), (rows,))])
                 for i in range(layers)} for rank in range(n)], 4 * layers * rows * n
    held = []
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        part = rows // layout.tp
        held.append({f"layers.{i}.w": Shard.of((rows,), [Box((at["tp"] * part,), (part,))])
                     for i in range(layers) if i * layout.pp // layers == at["pp"]})
    return held, 4 * layers * rows


def bytes_of(held: dict[str, Shard]) -> int:
    """Of what a rank holds, in float32."""
    return 4 * sum(shard.numel for shard in held.values())


@pytest.mark.parametrize("index", range(3))
def test_published_table(index: int) -> None:
    """HybridFlow's Table 2. What it calls DS-Chat gathers whole parameters from shards of all
    ranks, HybridFlow-V from those of tensor and pipeline parallelism; its peak is what a rank has
    for rollouts, redundant what it must keep of the trainer's beside that."""
    case = table()[index]
    gb, degree = case["model_gb"], case["rollout"]["tp"]
    for way, sharded in (("full_gather", True), ("gather_over_tp_pp", False)):
        held, total = hybrid(case["train"], sharded)
        plan = full_gather(held)
        for rank in range(plan.world):
            assert plan.received_bytes(rank) / total * gb == case[way]["comm"]
            assert plan.needed_bytes(rank) / total * gb == case[way]["peak"]
            assert bytes_of(held[rank]) / total * gb == case[way]["redundant"]
    held, total = hybrid(case["train"], False)
    shapes = {name: shard.shape for shards in held for name, shard in shards.items()}
    parts = [{name: Shard.of(shape, [Box((part * shape[0] // degree,), (shape[0] // degree,))])
              for name, shape in shapes.items()} for part in range(degree)]
    plan = make_plan(held, rollout_needs(parts, nested_groups(held, parts)))
    least = case["minimal"]
    for rank in range(plan.world):
        stays = plan.needed_bytes(rank) - plan.received_bytes(rank)
        assert plan.received_bytes(rank) / total * gb == least["comm"]
        assert plan.needed_bytes(rank) / total * gb == least["peak"]
        assert (bytes_of(held[rank]) - stays) / total * gb == least["redundant"]
        assert plan.sent_bytes(rank) == plan.received_bytes(rank)  # evenly


def test_fsdp_minimum() -> None:
    """M / r − M / N where shards lie inside slices."""
    spec = ModelSpec("LlamaForCausalLM", 512, 32, 64, 8, 8, 8, (LayerSpec(RopeSpec()),), 64)
    model = meta(spec)
    rows = {n: p.numel() for n, p in model.named_parameters()
            if n.rpartition(".")[0].rpartition(".")[2] in ("qkv", "embed", "head")}
    held = trainer_shards(model, Layout(dp=8, zero=3))
    held = [{n: s for n, s in shards.items() if n in rows} for shards in held]
    for degree in (1, 2, 4, 8):
        parts = [{n: s for n, s in part.items() if n in rows}
                 for part in rollout_parts(model, degree)]
        plan = make_plan(held, rollout_needs(parts, nested_groups(held, parts)))
        m = 4 * sum(rows.values())
        for rank in range(8):
            assert plan.received_bytes(rank) == m // degree - m // 8
            assert plan.sent_bytes(rank) == plan.received_bytes(rank)


@pytest.mark.parametrize("layout", [
    Layout(dp=8, zero=3), Layout(dp=8, replicate=2, zero=3), Layout(dp=2, tp=4), Layout(dp=4, tp=2),
    Layout(dp=8, replicate=4, zero=3)], ids=str)
def test_ranks_send_evenly(layout: Layout) -> None:
    """The busiest rank sends within 5 % of the least that could be: of what only ranks of some set
    can send, the busiest of them sends at least the mean."""
    spec = ModelSpec("LlamaForCausalLM", 512, 64, 128, 8, 8, 8, (LayerSpec(RopeSpec()),) * 3, 64)
    for degree in (1, 2, 4):
        plan = plan_of(spec, layout, degree)
        only: dict[frozenset[int], int] = {}
        for t in (t for g in plan.groups for e in g.exchanges for t in e.transfers):
            holders = frozenset(
                rank for rank, shards in enumerate(plan.held)
                if any(box.overlap(t.box) == t.box for box in shards[t.name].boxes))
            only[holders] = only.get(holders, 0) + 4 * t.box.numel
        subsets = (set(s) for n in range(1, 9) for s in itertools.combinations(range(8), n))
        bound = max(sum(b for holders, b in only.items() if holders <= s) / len(s)
                    for s in subsets)
        sent = [plan.sent_bytes(rank) for rank in range(8)]
        assert sum(sent) == sum(plan.received_bytes(rank) for rank in range(8))
        assert max(sent) <= 1.05 * bound


def test_copies_come_before_what_needs_none() -> None:
    """Halves of columns into whole matrices: what arrives is copied into place. The small matrix
    and the vector are not there yet while the large one's half is."""
    sizes = {"layers.0.vector": (64,), "layers.0.small": (8, 4), "layers.0.large": (8, 32)}
    held = []
    for rank in range(2):
        held.append({name: Shard.of(shape, [Box((rank * 32,), (32,)) if len(shape) == 1 else
                                            Box((0, rank * shape[1] // 2), (8, shape[1] // 2))])
                     for name, shape in sizes.items()})
    plan = full_gather(held)
    [group] = plan.groups
    assert [e.names for e in group.exchanges] == [
        ("layers.0.large",), ("layers.0.small",), ("layers.0.vector",)]
    assert plan.peak_bytes(0) == 4 * (256 + 128)  # the other way round 4 * (32 + 256 + 128)


ROWS, COLUMNS = 12, 5


@st.composite
def shards(draw: st.DrawFn, flat: bool) -> Shard | None:
    """Some rows, in any order, of some columns; or none of the parameter."""
    if draw(st.integers(0, 5)) == 0:
        return None
    cuts = sorted(draw(st.sets(st.integers(0, ROWS), max_size=6)))
    runs = draw(st.permutations(list(itertools.pairwise(cuts))[::draw(st.integers(1, 2))]))
    if flat:
        return Shard.of((ROWS,), [Box((a,), (b - a,)) for a, b in runs])
    low = draw(st.integers(0, COLUMNS - 1))
    high = draw(st.integers(low + 1, COLUMNS))
    low, high = draw(st.sampled_from([(low, high), (0, COLUMNS)]))
    return Shard.of((ROWS, COLUMNS), [Box((a, low), (b - a, high - low)) for a, b in runs],
                    [draw(st.booleans()) for _ in runs])


@settings(deadline=None, max_examples=120)
@given(data=st.data(), world=st.integers(1, 6), parameters=st.integers(1, 3),
       whole=st.booleans())
def test_every_missing_element_comes_once(data: st.DataObject, world: int, parameters: int,
                                          whole: bool) -> None:
    names = [f"layers.{i // 2}.w{i}" for i in range(parameters)]
    flat = {name: data.draw(st.booleans()) for name in names}
    sides: list[list[dict[str, Shard]]] = []
    for _ in range(2):
        ranks = [{n: s for n in names if (s := data.draw(shards(flat[n]))) is not None}
                 for _ in range(world)]
        sides.append(ranks)
    held, needed = sides
    if whole:  # somebody has everything
        for name in names:
            held[data.draw(st.integers(0, world - 1))][name] = Shard.whole(
                (ROWS,) if flat[name] else (ROWS, COLUMNS))
    masks = [[{n: mask(s) for n, s in rank.items()} for rank in side] for side in sides]
    somewhere = {n: sum((m[n] for m in masks[0] if n in m), np.zeros(
        (ROWS,) if flat[n] else (ROWS, COLUMNS), int)) for n in names}
    if any((m > somewhere[n]).any() for rank in masks[1] for n, m in rank.items()):
        with pytest.raises(ValueError, match="no rank holds"):
            make_plan(held, needed)
        return
    plan = make_plan(held, needed)
    arrives = [{n: np.zeros_like(m) for n, m in rank.items()} for rank in masks[1]]
    sent = [0] * world
    for group in plan.groups:
        for exchange in group.exchanges:
            assert {t.name for t in exchange.transfers} <= set(exchange.names)
            for t in exchange.transfers:
                assert t.name in group.names and group_of(t.name) == group.name
                assert any(b.overlap(t.box) == t.box for b in held[t.source][t.name].boxes)
                assert any(b.overlap(t.box) == t.box for b in needed[t.destination][t.name].boxes)
                arrives[t.destination][t.name][t.box.slices] += 1
                sent[t.source] += 4 * t.box.numel
    for rank in range(world):
        for name, m in masks[1][rank].items():
            has = masks[0][rank].get(name, np.zeros_like(m))
            np.testing.assert_array_equal(arrives[rank][name], m * (1 - has))
        assert plan.received_bytes(rank) == sum(int(4 * a.sum()) for a in arrives[rank].values())
        assert plan.received_bytes(rank) == missing_bytes(plan, rank)
        assert plan.sent_bytes(rank) == sent[rank]
    for name in plan.names:  # of all holders of an element one counts for it
        counts = sum((mask(c[name]) for c in plan.counted if name in c),
                     np.zeros_like(somewhere[name]))
        np.testing.assert_array_equal(counts, np.minimum(somewhere[name], 1))
    assert plan == make_plan(held, needed)


def mask(shard: Shard) -> np.ndarray:
    found = np.zeros(shard.shape, int)
    for box in shard.boxes:
        found[box.slices] += 1
    return found


@settings(deadline=None, max_examples=80)
@given(data=st.data(), degree=st.integers(1, 3), size=st.integers(1, 2))
def test_the_best_assignment(data: st.DataObject, degree: int, size: int) -> None:
    world = degree * size
    gain = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=degree, max_size=degree),
                              min_size=world, max_size=world))
    found = _assign(gain)
    assert sorted(rank for group in found for rank in group) == list(range(world))
    assert all(list(group) == sorted(group) and len(group) == degree for group in found)
    places = [part for part in range(degree) for _ in range(size)]
    best = max(sum(gain[rank][part] for rank, part in enumerate(p))
               for p in set(itertools.permutations(places)) if in_order(p, degree))
    assert sum(gain[rank][part] for group in found for part, rank in enumerate(group)) == best


def in_order(parts: tuple[int, ...], degree: int) -> bool:
    """Whether ranks with these parts can make groups whose parts are in the order of ranks."""
    by_part = [[rank for rank, p in enumerate(parts) if p == part] for part in range(degree)]
    return any(all(a < b for line in zip(*choice, strict=True)
                   for a, b in itertools.pairwise(line))
               for choice in itertools.product(*map(itertools.permutations, by_part)))


def test_groups() -> None:
    model = meta(tiny(True))
    parts = rollout_parts(model, 2)
    assert consecutive_groups(4, 2) == ((0, 1), (2, 3))
    assert nested_groups(trainer_shards(model, Layout(dp=2, tp=4)), parts) == (
        (0, 2), (1, 3), (4, 6), (5, 7))
    assert nested_groups(trainer_shards(model, Layout(dp=4)), parts) == consecutive_groups(4, 2)
    with pytest.raises(ValueError, match="3 does not divide the 4 ranks; it may be 1, 2, 4"):
        consecutive_groups(4, 3)
    # Both ranks would stay as they are with the parts the other way round.
    turned = [{"w": Shard.of((4,), [Box((2 - 2 * rank,), (2,))])} for rank in range(2)]
    assert nested_groups(turned, turned[::-1]) == ((0, 1),)
    with pytest.raises(ValueError, match="must hold every rank once, 2 ranks each"):
        rollout_needs(parts, ((0, 1), (1, 2)))
