"""Data parallelism by itself: sums of gradients whatever takes part, and how many are whole at a
time (what ranks hold between steps is counted in test_memory)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.parity import Rows, tiny
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.parallel import data
from kilter.parallel.data import DataParallel, Replicated, ShardedStates
from kilter.parallel.shards import Shard
from tests.parallel.gradients import backward, document, spread_model
from tests.ranks import RankPool

SHAPES = {"never": (4, 2), "a": (5, 3), "b": (3,), "c": (1, 4), "d": (2, 2)}
# Which parameters take part, by rank and micro-batch; the steps of a run.
STEPS = [
    [["a", "b", "c", "d"], ["a"], ["d", "c"]], [["d"], [], ["a"]],  # step 0: rank 0, rank 1
    [["a"], ["b"], ["c"]], [["b"], ["a", "d"], ["d"]],
]


def part(name: str, step: int, rank: int, micro_batch: int) -> Tensor:
    """The gradient of one micro-batch; whole numbers, so any order of sums gives the same."""
    generator = torch.Generator().manual_seed(hash((step, rank, micro_batch)) + len(name))
    return torch.randint(-9, 9, SHAPES[name], generator=generator).float()


def summed(zero: int) -> list[dict[str, tuple[int, Tensor]]]:
    """Per step the rows that this rank holds of every gradient, and which is the first; buckets
    are of about one parameter."""
    data.BUCKET_BYTES = 40
    try:
        mesh = Mesh(Layout(dp=2, zero=zero))
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        shards = {name: Shard.whole(shape) for name, shape in SHAPES.items()}
        parallel: DataParallel
        if zero:
            parallel = ShardedStates(parameters, shards, mesh.axis("dp_shard_cp"),
                                     mesh.axis("replicate"), zero)
        else:
            parallel = Replicated(parameters, shards, mesh.axis("dp_cp"))
    finally:
        data.BUCKET_BYTES = 25 << 20
    found = []
    for step in range(2):
        for m, names in enumerate(STEPS[2 * step + mesh.rank]):
            loss = torch.zeros((), requires_grad=True) + sum(
                (parameters[name] * part(name, step, mesh.rank, m)).sum() for name in names)
            parallel.begin(last=m == 2)
            loss.backward()
        parallel.finish()
        rows = {}
        for held in parallel.held:
            assert held.tensor.grad is not None
            first = held.shard.boxes[0].start[0] if held.shard.boxes else 0
            rows[held.name] = (first, held.tensor.grad.clone())
        found.append(rows)
        parallel.updated()
        assert all(p.grad is None for p in parameters.values())
    return found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_whatever_takes_part_on_whichever_rank(ranks: RankPool, zero: int) -> None:
    found = ranks.run(2, summed, zero)
    for step in range(2):
        for name, shape in SHAPES.items():
            whole = torch.zeros(shape)
            for rank in range(2):
                for m, names in enumerate(STEPS[2 * step + rank]):
                    if name in names:
                        whole += part(name, step, rank, m)
            rows = 0
            for rank in range(2):
                first, grad = found[rank][step][name]
                assert torch.equal(grad, whole[first:first + grad.shape[0]]), (name, step)
                rows += grad.shape[0]
            assert rows == shape[0] * (1 if zero else 2)


def test_taking_no_part_is_a_gradient_of_zero_on_one_rank_too() -> None:
    """An optimizer leaves out what has no gradient: no decay, no moments. On several ranks the sum
    that arrives is zeros."""
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    shards = {name: Shard.whole(shape) for name, shape in SHAPES.items()}
    parallel = Replicated(parameters, shards, Mesh.single().axis("dp_cp"))
    parallel.begin(last=True)
    parameters["a"].sum().backward()
    parallel.finish()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full(SHAPES[name], float(name == "a")))


def work(vocab: int) -> list[Rows]:
    return [document([(m + 3 * i) % vocab for i in range(8)]) for m in range(2)]


def most_whole_gradients(zero: int) -> tuple[int, int]:
    """The most bytes of whole gradients, on their way or not, that were there at a time in a
    backward, and the largest bucket's."""
    data.BUCKET_BYTES = 20_000
    try:
        spread = spread_model(tiny(True), Layout(dp=2, zero=zero))
    finally:
        data.BUCKET_BYTES = 25 << 20
    parallel = spread.parts[0].data
    assert isinstance(parallel, ShardedStates)
    parameters = [p for p in spread.model.parameters()]
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in parameters if p.grad is not None)
                   + sum(flat.nbytes for _, _, flat, _ in parallel._sent))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    backward(spread, work(331), 14)
    return most, max(sum(p.nbytes for p in bucket) for bucket in parallel._buckets.all)


def test_zero2_never_has_all_gradients(ranks: RankPool) -> None:
    """Two buckets may be on their way while a third fills."""
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in Decoder(tiny(True)).parameters())
    for most, bucket in ranks.run(2, most_whole_gradients, 2):
        assert most <= 3 * bucket < size
    for most, _ in ranks.run(2, most_whole_gradients, 1):
        assert most >= size  # the first micro-batch's stay


# FSDP


def scores(spread_seed: int) -> tuple[Tensor, bool]:
    """Log-probabilities after new weights were put in behind an evaluation, and whether the rows
    stayed where they were."""
    spread = spread_model(tiny(False), Layout(dp=4, zero=3))
    (rows, _) = work(331)
    batch = rows.batch(torch.device("cpu"))
    places = [h.tensor.data_ptr() for h in spread.held]
    with torch.no_grad():
        spread.forward(batch, rows.targets_T)
        spread.fill({name: p.detach() for name, p in
                     init_weights(Decoder(tiny(False)), spread_seed, std=0.1).named_parameters()})
        found = spread.forward(batch, rows.targets_T)
    backward(spread, work(331), 14)
    return found, places == [h.tensor.data_ptr() for h in spread.held]


def test_new_weights_behind_an_evaluation_are_seen(ranks: RankPool) -> None:
    """331 rows over 4 ranks, too: FSDP pads those."""
    spread = spread_model(tiny(False), Layout())
    spread.initialise(seed=7, std=0.1)
    (rows, _) = work(331)
    with torch.no_grad():
        expected = spread.forward(rows.batch(torch.device("cpu")), rows.targets_T)
    for found, stayed in ranks.run(4, scores, 7):
        assert torch.equal(found, expected)
        assert stayed
