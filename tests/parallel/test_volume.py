"""What a training step sends: calls and bytes of every axis are these closed forms.

Bytes as `kilter.comm.counter` counts them: of one rank, in a ring. fp32 throughout; one micro-batch
has T tokens, a step M of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.parity import Rows, tiny
from kilter.comm.collectives import SMALL_BYTES
from kilter.comm.counter import CommCounter, wire_bytes
from kilter.mesh.layout import Layout
from kilter.models.spec import ModelSpec
from kilter.ops.logprob import vocab_chunk
from kilter.parallel.data import BUCKET_BYTES
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import train_step
from tests.parallel.gradients import document, spread_model
from tests.ranks import RankPool

T, M = 24, 3
Volume = dict[tuple[str, str], tuple[int, int]]  # (axis, operation) -> (calls, bytes)


class Forms:
    """The sum of closed forms."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def add(self, axis: str, op: str, payload: int, ranks: int, times: int = 1) -> None:
        """``times`` calls whose tensor (of all_gather the result) has so many bytes."""
        if ranks > 1:
            self.calls[axis, op] += times
            self.bytes[axis, op] += times * wire_bytes(op, payload, ranks)

    def all_to_all(self, axis: str, payload: int, ranks: int, times: int = 1) -> None:
        self.calls[axis, "all_to_all"] += times
        self.bytes[axis, "all_to_all"] += times * payload * (ranks - 1) // ranks

    def tree_all_reduce(self, axis: str, elements: int, ranks: int, times: int = 1) -> None:
        """One exchange of everything, or two of parts where it is large."""
        payload = 4 * elements
        if ranks == 2 or payload <= SMALL_BYTES:
            self.add(axis, "all_gather", payload * ranks, ranks, times)
        else:
            padded = payload + 4 * (-elements % ranks)
            self.all_to_all(axis, padded, ranks, times)
            self.add(axis, "all_gather", padded, ranks, times)

    @property
    def volume(self) -> Volume:
        return {key: (calls, self.bytes[key]) for key, calls in self.calls.items() if calls}


def shapes(spec: ModelSpec) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Of the parameters around the layers, and of those of one layer."""
    d, f = spec.hidden_size, spec.ffn_size
    around: list[tuple[int, ...]] = [(spec.vocab_size, d), (d,)]
    if not spec.tied_head:
        around.append((spec.vocab_size, d))
    return around, [(d,), (spec.qkv_rows, d), (d, spec.num_heads * spec.head_dim), (d,),
                    (2 * f, d), (d, f)]


def padded(these: list[tuple[int, ...]], ranks: int) -> int:
    """Bytes of parameters whose rows are made a multiple of the ranks."""
    return sum(4 * -(-s[0] // ranks) * ranks * (s[1] if len(s) > 1 else 1) for s in these)


def step_volume(spec: ModelSpec, layout: Layout) -> Volume:
    """Of one step of M micro-batches; the model's parameters fit in one bucket."""
    forms, layers = Forms(), spec.num_layers
    around, layer = shapes(spec)
    n = layout.shard if layout.zero else layout.dp
    everything = padded(around + layers * layer, n if layout.zero else 1)
    assert everything < BUCKET_BYTES
    # Targets and tokens, the loss, the norm.
    forms.add("dp", "all_reduce", 16, layout.dp)
    forms.add("pp_dp_cp", "all_reduce", 8, layout.pp * layout.dp)
    forms.add("world", "all_reduce", 8, layout.world)
    if layout.zero == 0:
        forms.add("dp_cp", "all_reduce", everything, layout.dp)
    elif layout.zero < 3:
        forms.add("dp_shard_cp", "reduce_scatter", everything, n, M if layout.zero == 2 else 1)
        forms.add("dp_shard_cp", "all_gather", everything, n)
        forms.add("replicate", "all_reduce", everything // n, layout.replicate)
    else:  # layers are gathered for forward and again for backward, what is around them once
        forms.add("dp_shard_cp", "all_gather", padded(layer, n), n, 2 * layers * M)
        forms.add("dp_shard_cp", "all_gather", padded(around, n), n, M)
        forms.add("dp_shard_cp", "reduce_scatter", padded(layer, n), n, layers * M)
        forms.add("dp_shard_cp", "reduce_scatter", padded(around, n), n, M)
        forms.add("replicate", "all_reduce", padded(layer, n) // n, layout.replicate, layers)
        forms.add("replicate", "all_reduce", padded(around, n) // n, layout.replicate)
    if layout.tp > 1:
        tensor_volume(forms, spec, layout)
    return forms.volume


def tensor_volume(forms: Forms, spec: ModelSpec, layout: Layout) -> None:
    n, d, layers = layout.tp, spec.hidden_size, spec.num_layers
    # Sums: embedding, attention and MLP forward; copies: qkv, gate and up, head. Each is the
    # other backward.
    sums = 2 * layers + 1
    if layout.sequence_parallel:
        whole = 1 if layout.overlap_tp else sums
        forms.all_to_all("tp", 4 * T * d, n, 2 * whole * M)
        forms.add("tp", "all_gather", 4 * T * d, n, 2 * whole * M)
        steps = 4 * (sums - whole) * M * (n - 1)  # those of layers, to each rank by itself
        forms.add("tp", "send", 4 * T * d // n, n, steps)
        forms.add("tp", "recv", 0, n, steps)
        forms.tree_all_reduce("tp", d, n, (2 * layers + 1) * M)  # norms' gradients
    else:
        forms.tree_all_reduce("tp", T * d, n, 2 * sums * M)
    if spec.qk_norm:
        forms.tree_all_reduce("tp", spec.head_dim, n, 2 * layers * M)
    # The loss: the largest logit and the target's; sums of the vocabulary's chunks.
    chunks = -(-spec.vocab_size // vocab_chunk(spec.vocab_size))
    forms.add("tp", "all_reduce", 2 * 4 * T, n, M)
    forms.add("tp", "all_gather", 4 * T * -(-chunks // n) * n, n, M)


def micro_batches(vocab: int) -> list[Rows]:
    return [document([(7 * i + m) % vocab for i in range(T)]) for m in range(M)]


def counted(spec: ModelSpec, layout: Layout) -> Volume:
    """Of the second step of a run."""
    spread = spread_model(spec, layout)
    optimizer = Optimizer(spread.held, OptimizerConfig(), spread.mesh.axis("dp_cp_tp"))
    train_step(spread, optimizer, micro_batches(spec.vocab_size))
    with CommCounter(spread.mesh.axes()) as counter:
        train_step(spread, optimizer, micro_batches(spec.vocab_size))
    return {key: (t.calls, t.bytes) for key, t in counter.traffic.items()}


@pytest.mark.parametrize("layout", [
    Layout(dp=2), Layout(dp=4), Layout(dp=2, zero=1), Layout(dp=4, zero=2), Layout(dp=4, zero=3),
    Layout(dp=4, replicate=2, zero=2), Layout(dp=4, replicate=2, zero=3),
    Layout(tp=2, sequence_parallel=False), Layout(tp=4, sequence_parallel=False), Layout(tp=2),
    Layout(tp=4), Layout(tp=2, overlap_tp=True), Layout(tp=4, overlap_tp=True)], ids=str)
def test_a_step_sends_what_its_form_says(ranks: RankPool, layout: Layout) -> None:
    # Rows that 4 ranks share evenly, as one rank's bytes are then every rank's.
    spec = replace(tiny(False), vocab_size=320, hidden_size=64, layers=tiny(False).layers[:2],
                   qk_norm=layout.tp > 1)
    expected = step_volume(spec, layout)
    for found in ranks.run(layout.world, counted, spec, layout):
        assert found == expected


@pytest.mark.parametrize("tp", [2, 4])
def test_overlap_sends_the_same_bytes(tp: int) -> None:
    forms = [step_volume(tiny(False), layout)
             for layout in (Layout(tp=tp), Layout(tp=tp, overlap_tp=True))]
    plain, overlap = (sum(sent for _, sent in volume.values()) for volume in forms)
    assert plain == overlap and forms[0] != forms[1]


def test_a_large_sum_goes_in_two_exchanges(ranks: RankPool) -> None:
    spec = replace(tiny(False), vocab_size=320, hidden_size=512, layers=tiny(False).layers[:1])
    assert 4 * T * 512 > SMALL_BYTES
    layout = Layout(tp=4, sequence_parallel=False)
    assert ranks.run(4, counted, spec, layout)[0] == step_volume(spec, layout)


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_sends_activations_and_their_gradients(ranks: RankPool, tied: bool) -> None:
    spec = replace(tiny(tied), layers=tiny(tied).layers[:3])
    layout, row = Layout(pp=3), 4 * spec.hidden_size
    for rank, found in enumerate(ranks.run(3, counted, spec, layout)):
        forms = Forms()
        forms.add("pp_dp_cp", "all_reduce", 8, 3)
        forms.add("world", "all_reduce", 8, 3)
        neighbours = (rank > 0) + (rank < 2)
        forms.add("pp", "send", T * row, 2, M * neighbours)
        forms.add("pp", "recv", 0, 2, M * neighbours)
        if tied and rank != 1:  # gradients of the head's copy come, the new embedding goes
            forms.add("pp", "send", spec.vocab_size * row, 2)
            forms.add("pp", "recv", 0, 2)
        assert found == forms.volume


def test_rows_that_do_not_divide_are_padded(ranks: RankPool) -> None:
    """331 rows over 4 ranks are sent as 332."""
    spec = replace(tiny(True), layers=tiny(True).layers[:1])
    layout = Layout(dp=4, zero=3)
    assert ranks.run(4, counted, spec, layout)[0] == step_volume(spec, layout)
    assert padded([(331, 32)], 4) == 4 * 332 * 32
