"""From trainer shards to rollout parts: exact, by the least bytes, one group at a time.

Oracles: whole tensors cut by hand, masks of every element, and the counter of what torch was asked
to send.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import kilter.rl.reshard as reshard_module
from bench.parity import everything, tiny
from kilter.comm.axis import Axis
from kilter.comm.counter import CommCounter
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import Spread, apply
from kilter.parallel.checksum import checksum
from kilter.parallel.shards import Box, Shard
from kilter.rl.reshard import RolloutWeights, WeightSync, gather_holdings, reshard
from kilter.rl.reshard_layout import (
    consecutive_groups,
    nested_groups,
    rollout_formats,
    rollout_needs,
    rollout_parts,
    trainer_shards,
)
from kilter.rl.reshard_plan import full_gather, group_of, make_plan
from kilter.train.lora import LoraConfig
from tests.ranks import RankError, RankPool
from tests.rl.reshard_cases import (
    BF16,
    F32,
    SPECS,
    meta,
    missing_bytes,
    plan_of,
    whole_weights,
)


def spread_model(spec: ModelSpec, layout: Layout, lora: LoraConfig | None = None) -> Spread:
    return apply(meta(spec, lora), Mesh(layout) if layout.world > 1 else Mesh.single())


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


def holdings(spec: ModelSpec, layout: Layout) -> list[dict[str, Shard]]:
    spread = spread_model(spec, layout)
    return gather_holdings(spread.local, spread.mesh.axis("world"))


@pytest.mark.parametrize(("model", "layout"), [
    ("everything", Layout(dp=2, zero=1)), ("everything", Layout(dp=2, tp=2, zero=3)),
    ("tied", Layout(dp=4, zero=3)), ("three", Layout(dp=6, replicate=2, zero=3)),
    ("tied", Layout(tp=4))], ids=str)
def test_holdings_are_known_without_ranks(ranks: RankPool, model: str, layout: Layout) -> None:
    foretold = trainer_shards(meta(SPECS[model]), layout)
    for found in ranks.run(layout.world, holdings, SPECS[model], layout):
        assert [{n: s.boxes for n, s in shards.items()} for shards in found] == [
            {n: s.boxes for n, s in shards.items()} for shards in foretold]


def stages(degree: int) -> tuple[int, list[str]]:
    """In a rank of two stages, each of which has two ranks that hold all of its layers: (bytes
    sent, groups of the plan)."""
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
