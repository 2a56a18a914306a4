"""In steps the same rows arrive and the same sums are made, and each rank goes on meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from kilter.comm.axis import Axis
from kilter.comm.counter import CommCounter, wire_bytes
from kilter.comm.overlap import gather_in_steps, rows_of, sum_in_steps
from kilter.mesh import Layout, Mesh
from kilter.ops.linear import tree_add
from tests.comm.test_collectives import parts
from tests.ranks import RankPool

ROWS = 3


def check_steps(n: int) -> None:
    mesh = Mesh(Layout(tp=n))
    axis = mesh.axis("tp")
    me = axis.index
    expected = torch.cat(parts(n, ROWS, 5))
    whole = torch.full_like(expected, torch.nan)
    # Strided rows, and the rows of a rank are there when its place is given.
    own = parts(n, ROWS, 5)[me].t().contiguous().t()
    seen = []
    with CommCounter(mesh.axes()) as gathering:
        for place in gather_in_steps(own, whole, axis):
            rows = rows_of(place, ROWS)
            assert torch.equal(whole[rows], expected[rows])
            seen.append(place)
    assert seen == [(me - step) % n for step in range(n)]
    assert torch.equal(whole, expected)

    brought = parts(n, n * ROWS, 5)  # of such magnitudes that the order of a sum shows
    made = []

    def part_of(place: int) -> torch.Tensor:
        made.append(place)
        return brought[me][rows_of(place, ROWS)].t().contiguous().t()

    with CommCounter(mesh.axes()) as summing:
        total = sum_in_steps(part_of, axis)()
    assert made == [(me + step) % n for step in range(1, n + 1)]
    assert torch.equal(total, tree_add(brought)[rows_of(me, ROWS)])
    for counter, op in ((gathering, "all_gather"), (summing, "reduce_scatter")):
        assert counter.calls("tp", "send") == n - 1
        assert counter.bytes() == counter.bytes("tp", "send") == wire_bytes(op, whole.nbytes, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rows_and_sums(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_steps, n)


def check_that_ranks_go_on() -> None:
    """What rank 0 does waits for what rank 1 does later, so it ends only if neither waits for the
    other's end."""
    axis = Mesh(Layout(tp=2)).axis("tp")
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    whole = torch.empty(2, 4)
    if axis.index == 1:
        dist.barrier(one)  # rank 0 has its own rows
    for step, place in enumerate(gather_in_steps(torch.full((1, 4), axis.index + 1.0), whole,
                                                 axis)):
        if axis.index == 0 and step == 0:
            assert place == 0
            dist.barrier(one)
    assert whole[:, 0].tolist() == [1.0, 2.0]

    def part_of(place: int) -> torch.Tensor:
        if axis.index == place == 0:
            dist.barrier(two)  # rank 1 has its sum
        return torch.full((1, 4), 10.0 * place + axis.index)

    total = sum_in_steps(part_of, axis)()
    if axis.index == 1:
        dist.barrier(two)
    assert total[0, 0] == 20.0 * axis.index + 1.0


def test_a_rank_computes_before_the_others_are_there(ranks: RankPool) -> None:
    ranks.run(2, check_that_ranks_go_on)


def test_one_rank_exchanges_nothing() -> None:
    axis, x = Axis("tp", (0,), 0), torch.randn(3, 2)
    whole = torch.empty(3, 2)
    assert list(gather_in_steps(x, whole, axis)) == [0] and torch.equal(whole, x)
    assert sum_in_steps(lambda place: x + place, axis)() is not x
    assert torch.equal(sum_in_steps(lambda place: x + place, axis)(), x)
