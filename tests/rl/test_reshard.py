"""From trainer shards to rollout parts: exact, by the least bytes, one group at a time.

Oracles: whole tensors cut by hand, masks with one element per element, the counter of what torch
was asked to send, and Table 2 of HybridFlow (arXiv 2409.19256).
"""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kilter.rl.reshard as reshard_module
from bench.parity import everything, tiny
from kilter.comm.axis import Axis
from kilter.comm.counter import CommCounter
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.parallel.apply import Spread, apply
from kilter.parallel.shards import Box, Shard
from kilter.rl.checksum import checksum
from kilter.rl.reshard import RolloutWeights, WeightSync, gather_holdings, reshard
from kilter.rl.reshard_layout import (
    _assign,
    consecutive_groups,
    nested_groups,
    rollout_formats,
    rollout_needs,
    rollout_parts,
    trainer_shards,
)
from kilter.rl.reshard_plan import Plan, full_gather, group_of, make_plan
from kilter.train.lora import LoraConfig, add_adapters
from tests.ranks import RankError, RankPool

F32, BF16 = torch.float32, torch.bfloat16


def three() -> ModelSpec:
    """3 KV heads: at degree 2, one rank has two of them and the other one."""
    return ModelSpec("LlamaForCausalLM", 200, 24, 48, 9, 3, 8, (LayerSpec(RopeSpec()),) * 2, 64)


def short(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=spec.layers[:2])


SPECS = {"tied": short(tiny(True)), "untied": short(tiny(False)),
         "everything": short(everything()), "three": three()}


def meta(spec: ModelSpec, lora: LoraConfig | None = None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    if lora is not None:
        add_adapters(model, lora)
    return model


def whole_weights(model: Decoder, step: int = 0) -> dict[str, Tensor]:
    """Numbers in which every element can be told from every other."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator)
            for name, p in model.named_parameters()}


def spread_model(spec: ModelSpec, layout: Layout, lora: LoraConfig | None = None) -> Spread:
    return apply(meta(spec, lora), Mesh(layout) if layout.world > 1 else Mesh.single())


def plan_of(spec: ModelSpec, layout: Layout, degree: int, dtype: torch.dtype = F32,
            nested: bool = False) -> Plan:
    model = meta(spec)
    held, parts = trainer_shards(model, layout), rollout_parts(model, degree)
    groups = nested_groups(held, parts) if nested else consecutive_groups(layout.world, degree)
    return make_plan(held, rollout_needs(parts, groups), rollout_formats(model, dtype))


# On ranks


@dataclass
class Outcome:
    tensors: dict[str, Tensor]
    sent: int
    received: int
    report: RolloutWeights
    peak: int  # bytes


class Alive:
    """Bytes of the buffers that resharding took and that are still there."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._take = reshard_module._buffer

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = self._take(shape, dtype, device)
        self.now += tensor.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        return tensor

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


class ReceivedBytes(CommCounter):
    """`CommCounter` leaves what arrives to the sender; here it is the other way round."""

    def _add(self, group, op, sent):  # type: ignore[no-untyped-def]
        super()._add(group, op, self._nbytes if op == "recv" else 0)

    def _count(self, table, name, arguments):  # type: ignore[no-untyped-def]
        if name == "recv_":
            self._nbytes = sum(t.nbytes for t in arguments["tensors"])
        super()._count(table, name, arguments)


def update(spec: ModelSpec, layout: Layout, cases: list[tuple[int, torch.dtype, bool]]
           ) -> list[Outcome]:
    """In a rank: the rollout's tensors, by what messages, for each (degree, format, nested)."""
    spread = spread_model(spec, layout)
    model = meta(spec)
    spread.fill(whole_weights(model))
    world = spread.mesh.axis("world")
    held = gather_holdings(spread.local, world)
    found = []
    for degree, dtype, nested in cases:
        parts = rollout_parts(model, degree)
        groups = (nested_groups(held, parts) if nested
                  else consecutive_groups(world.size, degree))
        plan = make_plan(held, rollout_needs(parts, groups), rollout_formats(model, dtype))
        sync = WeightSync(plan, world)
        alive = Alive()
        reshard_module._buffer = alive
        tensors = {}
        sent, received = CommCounter(spread.mesh.axes()), ReceivedBytes(spread.mesh.axes())
        try:
            with sent, received:
                for group in sync.send(spread.local, version=7):
                    tensors.update({name: tensor.clone() for name, tensor in group.items()})
                    names = {group_of(name) for name in group}
                    assert len(names) == 1  # one group at a time
            del group
        finally:
            reshard_module._buffer = alive._take
        gc.collect()
        assert alive.now == 0
        assert sync.report is not None
        found.append(Outcome(tensors, sent.bytes("world", "send"),
                             received.bytes("world", "recv"), sync.report, alive.peak))
    return found


F, B = (F32, False), (BF16, False)
PAIRS: list[tuple[str, Layout, list[tuple[int, torch.dtype, bool]]]] = [
    ("tied", Layout(dp=2), [(1, *F), (2, *F)]),
    ("tied", Layout(dp=2, zero=1), [(2, *B)]),
    ("untied", Layout(dp=4, zero=2), [(4, *F)]),
    ("tied", Layout(dp=2, zero=3), [(1, *F), (2, *F), (2, *B)]),
    ("untied", Layout(dp=4, zero=3), [(1, *B), (2, *F), (4, *F), (2, F32, True)]),
    ("everything", Layout(dp=8, zero=3), [(1, *F), (4, BF16, True)]),
    ("everything", Layout(dp=4, replicate=2, zero=3), [(1, *F), (4, *F), (2, F32, True)]),
    ("untied", Layout(dp=4, replicate=2, zero=2), [(2, *F)]),
    ("untied", Layout(tp=2), [(1, *F), (2, *F)]),
    ("tied", Layout(tp=4), [(1, *F), (2, *B), (2, F32, True), (4, *F)]),
    ("everything", Layout(dp=2, tp=2, zero=3), [(1, *F), (2, *F), (4, *B)]),
    ("untied", Layout(dp=2, tp=4, zero=3), [(1, *B), (2, F32, True)]),
    ("three", Layout(dp=3, zero=3), [(1, *F), (3, *F)]),
    ("three", Layout(dp=2, tp=3, zero=3), [(1, *F), (2, *F), (3, *B)]),
]


@pytest.mark.parametrize(("model", "layout", "cases"), PAIRS,
                         ids=[f"{model} {layout}" for model, layout, _ in PAIRS])
def test_rollout_parts_are_cuts_of_the_whole(
        ranks: RankPool, model: str, layout: Layout,
        cases: list[tuple[int, torch.dtype, bool]]) -> None:
    spec = SPECS[model]
    decoder = meta(spec)
    whole = whole_weights(decoder)
    largest = max(sum(whole[name].nbytes for name in names) for names in grouped(whole))
    outcomes = ranks.run(layout.world, update, spec, layout, cases)
    for index, (degree, dtype, nested) in enumerate(cases):
        plan = plan_of(spec, layout, degree, dtype, nested)
        formats = rollout_formats(decoder, dtype)
        reports = [by_case[index].report for by_case in outcomes]
        assert len({r.checksum for r in reports}) == 1
        for rank, by_case in enumerate(outcomes):
            found = by_case[index]
            assert found.tensors.keys() == whole.keys()
            for name, shard in plan.needed[rank].items():
                cut = torch.cat([whole[name][box.slices] for box in shard.boxes])
                assert found.tensors[name].dtype == formats[name]
                assert torch.equal(found.tensors[name], cut.to(formats[name])), (rank, name)
            assert found.sent == plan.sent_bytes(rank)
            assert found.received == plan.received_bytes(rank) == missing_bytes(plan, rank)
            assert found.peak == plan.peak_bytes(rank) <= largest
            assert found.report.version == 7
            assert found.report.changed == found.report.tensors == len(whole)
        everything_else = full_gather(plan.held, formats)
        for rank in range(layout.world):
            assert plan.received_bytes(rank) <= everything_else.received_bytes(rank)


def grouped(names: dict[str, Tensor]) -> list[list[str]]:
    return [list(g) for _, g in itertools.groupby(sorted(names, key=group_of), key=group_of)]


def missing_bytes(plan: Plan, rank: int) -> int:
    """Counted element by element."""
    total = 0
    for name, shard in plan.needed[rank].items():
        mask = np.zeros(shard.shape, bool)
        for box in shard.boxes:
            mask[box.slices] = True
        if name in plan.held[rank]:
            for box in plan.held[rank][name].boxes:
                mask[box.slices] = False
        total += int(mask.sum()) * plan.formats[name].itemsize
    return total


def holdings(spec: ModelSpec, layout: Layout) -> list[dict[str, Shard]]:
    spread = spread_model(spec, layout)
    return gather_holdings(spread.local, spread.mesh.axis("world"))


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, tp=2, zero=3),
                                    Layout(dp=4, replicate=2, zero=3), Layout(tp=4)], ids=str)
def test_holdings_are_known_without_ranks(ranks: RankPool, layout: Layout) -> None:
    foretold = trainer_shards(meta(everything()), layout)
    for found in ranks.run(layout.world, holdings, everything(), layout):
        assert [{n: s.boxes for n, s in shards.items()} for shards in found] == [
            {n: s.boxes for n, s in shards.items()} for shards in foretold]


def stages(degree: int) -> list[tuple[int, list[str]]]:
    """In a rank of two stages, each of which has two ranks that hold all of its layers."""
    model = meta(tiny(False))
    whole = whole_weights(model)
    mesh = Mesh(Layout(pp=2, dp=2))
    world = mesh.axis("world")
    mine = trainer_shards(model, mesh.layout, stage_of)[world.index]
    local = {name: (whole[name].clone(), shard) for name, shard in mine.items()}
    held = gather_holdings(local, world)
    parts = rollout_parts(model, degree)
    plan = make_plan(held, rollout_needs(parts, consecutive_groups(4, degree)))
    sync = WeightSync(plan, world)
    with CommCounter(mesh.axes()) as counter:
        for group in sync.send(local, 0):
            for name, tensor in group.items():
                shard = plan.needed[world.index][name]
                cut = torch.cat([whole[name][box.slices] for box in shard.boxes])
                assert torch.equal(tensor, cut), name
    return counter.bytes("world", "send"), [g.name for g in plan.groups]


def stage_of(name: str) -> int:
    return int(name.startswith(("layers.2", "layers.3", "norm", "head")))


@pytest.mark.parametrize("degree", [1, 2])
def test_pipeline_stages(ranks: RankPool, degree: int) -> None:
    model = meta(tiny(False))
    stage = [sum(4 * p.numel() for n, p in model.named_parameters() if stage_of(n) == s)
             for s in range(2)]
    found = ranks.run(4, stages, degree)
    assert {tuple(names) for _, names in found} == {
        ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head")}
    sent = [bytes_ for bytes_, _ in found]
    if degree == 1:  # each rank gets the other stage from one of its two ranks
        assert sent == [stage[0], stage[0], stage[1], stage[1]]
    else:
        assert sum(sent) < sum(stage) * 2


# Updates


def steps(spec: ModelSpec, layout: Layout) -> list[tuple[int, int, int]]:
    """In a rank: (changed, tensors, checksum) of updates with all new weights, the same, one new
    element in one, and the first again."""
    spread = spread_model(spec, layout)
    model = meta(spec)
    world = spread.mesh.axis("world")
    held = gather_holdings(spread.local, world)
    parts = rollout_parts(model, 2)
    sync = WeightSync(make_plan(held, rollout_needs(parts, consecutive_groups(world.size, 2)),
                                rollout_formats(model, BF16)), world)
    first = whole_weights(model)
    other = {name: value.clone() for name, value in first.items()}
    other["layers.1.mlp.down.weight"][-1, -1] += 1.0
    found = []
    for version, weights in enumerate((first, first, other, first)):
        spread.fill(weights)
        for _ in sync.send(spread.local, version):
            pass
        assert sync.report is not None and sync.report.version == version
        found.append((sync.report.changed, sync.report.tensors, sync.report.checksum))
    return found


def test_an_update_says_what_changed(ranks: RankPool) -> None:
    """An update that sends nothing new, or not what was meant, shows in its report."""
    by_layout = [ranks.run(layout.world, steps, tiny(True), layout)
                 for layout in (Layout(dp=4, zero=3), Layout(tp=2))]
    for found in (rank for by_rank in by_layout for rank in by_rank):
        assert found == by_layout[0][0]  # the checksum knows no layout
        (n, tensors, a), (none, _, same), (one, _, b), (back, _, again) = found
        assert n == tensors == len(whole_weights(meta(tiny(True))))
        assert (none, one, back) == (0, 1, 1)
        assert a == same == again != b


def adapters_alone(spec: ModelSpec, layout: Layout) -> tuple[int, list[str]]:
    lora = LoraConfig(rank=3, dora=True)
    spread = spread_model(spec, layout, lora)
    model = meta(spec, lora)
    whole = whole_weights(model)
    spread.fill(whole)
    world = spread.mesh.axis("world")
    parts = rollout_parts(model, 2)
    plan = make_plan(gather_holdings(spread.local, world),
                     rollout_needs(parts, consecutive_groups(world.size, 2)),
                     rollout_formats(model, BF16), adapters_only=True)
    names = []
    sync = WeightSync(plan, world)
    with CommCounter(spread.mesh.axes()) as counter:
        for group in sync.send(spread.local, 1):
            for name, tensor in group.items():
                shard = plan.needed[world.index][name]
                cut = torch.cat([whole[name][box.slices] for box in shard.boxes])
                assert torch.equal(tensor, cut), name  # float32, whatever matrices are
                names.append(name)
    assert counter.bytes("world", "send") == plan.sent_bytes(world.index)
    assert sync.report is not None and sync.report.changed == len(names)
    return max(plan.received_bytes(r) for r in range(world.size)), names


@pytest.mark.parametrize("layout", [Layout(dp=4, zero=3), Layout(tp=4)], ids=str)
def test_adapters_alone(ranks: RankPool, layout: Layout) -> None:
    spec = everything()
    model = meta(spec, LoraConfig(rank=3, dora=True))
    adapters = {n for n, p in model.named_parameters() if p.requires_grad}
    everything_else = make_plan(
        trainer_shards(model, layout),
        rollout_needs(rollout_parts(model, 2), consecutive_groups(layout.world, 2)))
    for most, names in ranks.run(layout.world, adapters_alone, spec, layout):
        assert set(names) == adapters and len(names) == len(adapters)
        assert {name.rpartition(".")[2] for name in names} == {"lora_a", "lora_b", "magnitude"}
        assert most < max(map(everything_else.received_bytes, range(layout.world)))


def changed_meanwhile(spec: ModelSpec) -> None:
    spread = spread_model(spec, Layout(dp=2, zero=3))
    spread.fill(whole_weights(meta(spec)))
    world = spread.mesh.axis("world")
    parts = rollout_parts(meta(spec), 1)
    sync = WeightSync(make_plan(gather_holdings(spread.local, world),
                                rollout_needs(parts, consecutive_groups(2, 1))), world)
    for group in sync.send(spread.local, 0):
        if "embed.weight" in group and world.index:
            with torch.no_grad():
                spread.local["embed.weight"][0][0, 0] += 1.0


def test_weights_that_change_while_they_are_sent_are_noticed(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"embed\.weight \(1 of 26\) differ in their checksums"):
        ranks.run(2, changed_meanwhile, tiny(True))


def test_one_rank_sends_nothing() -> None:
    spec = tiny(True)
    spread = spread_model(spec, Layout())
    model = meta(spec)
    whole = whole_weights(model)
    spread.fill(whole)
    world = spread.mesh.axis("world")
    plan = make_plan(gather_holdings(spread.local, world),
                     rollout_needs(rollout_parts(model, 1), consecutive_groups(1, 1)))
    taken = {name: tensor.clone() for group in reshard(spread.local, plan, world)
             for name, tensor in group.items()}
    assert all(torch.equal(taken[name], value) for name, value in whole.items())
    assert plan.received_bytes(0) == plan.sent_bytes(0) == 0


# The plan


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
            assert plan.held_bytes(rank) / total * gb == case[way]["redundant"]
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
        assert (plan.held_bytes(rank) - stays) / total * gb == least["redundant"]
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
    # Both halves are copied, the sender's into one piece, the receiver's out of one.
    assert plan.peak_bytes(0) == 4 * (256 + 128 + 128)


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


def test_what_does_not_fit_is_said() -> None:
    spec = tiny(True)
    spread = spread_model(spec, Layout())
    model = meta(spec)
    held = gather_holdings(spread.local, spread.mesh.axis("world"))
    plan = make_plan(held, rollout_parts(model, 1))
    with pytest.raises(ValueError, match="for 1 ranks but world has 2"):
        next(reshard(spread.local, plan, Axis("world", (0, 1), 0)))
    del spread.local["norm.weight"]
    with pytest.raises(ValueError, match=r"does not hold .* norm\.weight"):
        next(reshard(spread.local, plan, spread.mesh.axis("world")))
    with pytest.raises(ValueError, match="the model has none"):
        make_plan(held, held, adapters_only=True)
    with pytest.raises(ValueError, match=r"norm\.weight is \[3\] and \[32\]"):
        make_plan(held, [{**held[0], "norm.weight": Shard.whole((3,))}])
    with pytest.raises(ValueError, match="2 ranks hold parameters but 1 need"):
        make_plan(held * 2, held)
    with pytest.raises(ValueError, match="2 pipeline stages"):
        trainer_shards(model, Layout(pp=2))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_checksums_add_up_and_see_every_element(dtype: torch.dtype) -> None:
    whole = torch.randn(300, 431).to(dtype)  # more than one block

    def sums(tensor: Tensor, boxes: list[Box]) -> int:
        return sum(int(checksum([(box, tensor[box.slices])], dtype, tensor.device))
                   for box in boxes) % (1 << 64)

    one = sums(whole, [Box((0, 0), (300, 431))])
    assert one == sums(whole, [Box((0, 0), (299, 7)), Box((299, 0), (1, 7)),
                               Box((0, 7), (300, 424))])
    assert one == int(checksum([(Box((0, 0), (300, 431)), whole.float())], dtype, whole.device)
                      ) % (1 << 64)
    for i, j, other_i, other_j in ((5, 7, 5, 8), (5, 7, 6, 7), (0, 0, 299, 430), (152, 3, 153, 3)):
        swapped = whole.clone()
        swapped[i, j], swapped[other_i, other_j] = whole[other_i, other_j], whole[i, j]
        assert not torch.equal(swapped, whole)
        assert sums(swapped, [Box((0, 0), (300, 431))]) != one
    for i, j in torch.stack([torch.randint(300, (20,)), torch.randint(431, (20,))], 1).tolist():
        changed = whole.clone()
        changed[i, j] = -changed[i, j]
        assert sums(changed, [Box((0, 0), (300, 431))]) != one
