"""What arrives is what was sent; sums are the tree's bits; gradients are transposes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kilter.comm import autograd, collectives
from kilter.comm.axis import Axis
from kilter.mesh import Layout, Mesh
from kilter.ops.linear import tree_add
from tests.ranks import RankPool

SINGLE = Axis("tp", (0,), 0)


def parts(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What each rank brings: known to all, of such magnitudes that the order of a sum shows."""
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(shape, generator=generator) * 10.0 ** (i % 3)).to(dtype)
            for i in range(n)]


def check_tree_sums(n: int) -> None:
    axis = Mesh(Layout(tp=n)).axis("tp")
    # below and above SMALL_BYTES; with and without a remainder; scalar; other dtypes
    for shape in ((5, 7), (), (0, 3), (64, 150), (67, 129)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            all_parts = parts(n, *shape, dtype=dtype)
            total = collectives.tree_all_reduce(all_parts[axis.index], axis)
            assert total.dtype == dtype and torch.equal(total, tree_add(all_parts))
    x = parts(n, 6, 4)[axis.index]
    assert torch.equal(collectives.tree_all_reduce(x.t(), axis), tree_add(parts(n, 6, 4)).t())
    for sizes in (collectives.split_sizes(13, n), [0] * (n - 1) + [5]):
        all_parts = parts(n, sum(sizes), 3)
        mine = collectives.tree_reduce_scatter_rows(all_parts[axis.index], axis, sizes)
        assert torch.equal(mine, tree_add(all_parts).split(sizes)[axis.index])


def check_movement(n: int) -> None:
    axis = Mesh(Layout(tp=n)).axis("tp")
    me = axis.index
    for sizes in ([3] * n, collectives.split_sizes(2 * n - 1, n), list(range(n)), [0] * n):
        for shape in ((), (2, 3)):
            whole = torch.randn(sum(sizes), *shape)
            rows = whole.split(sizes)
            assert torch.equal(collectives.all_gather_rows(rows[me], axis, sizes), whole)
    dealt = [[i + j for j in range(n)] for i in range(n)]  # rows from i to j
    sent = [torch.randn(sum(row), 2) for row in dealt]
    got = collectives.all_to_all_rows(sent[me], axis, dealt[me], [row[me] for row in dealt])
    assert torch.equal(got, torch.cat([sent[i].split(dealt[i])[me] for i in range(n)]))
    x = torch.full((3,), float(me))
    assert collectives.broadcast(x, axis, n - 1) is x and x.tolist() == [n - 1] * 3
    parts = collectives.gather(torch.tensor(me), axis, n - 1)
    assert (None if parts is None else [p.item() for p in parts]) == (
        [*range(n)] if me == n - 1 else None)
    assert collectives.all_reduce_sum(torch.tensor([me + 0.1]), axis).dtype == torch.float64
    count = torch.tensor(me)
    assert collectives.all_reduce_sum(count, axis).item() == n * (n - 1) // 2
    assert collectives.all_reduce_max(count, axis).item() == n - 1
    assert count.item() == me  # not overwritten
    collectives.barrier(axis)


def check_wrong_sizes() -> None:
    axis = Mesh(Layout(tp=2)).axis("tp")
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"axis tp are \[2, 2\], which is 4 in all, but .* 3 rows"):
        collectives.tree_reduce_scatter_rows(x, axis, [2, 2])
    with pytest.raises(ValueError, match="3 row counts were given for axis tp of 2 ranks"):
        collectives.all_gather_rows(x, axis, [1, 1, 1])
    with pytest.raises(ValueError, match="to send, but there are 3 rows"):
        collectives.all_to_all_rows(x, axis, [1, 1], [1, 1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_over_ranks_are_the_trees(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_tree_sums, n)


@pytest.mark.parametrize("n", [2, 3])
def test_rows_arrive_in_order_of_rank(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_movement, n)


def test_row_counts_that_do_not_add_up(ranks: RankPool) -> None:
    ranks.run(2, check_wrong_sizes)


@given(st.integers(0, 100), st.integers(1, 20))
def test_split_sizes(rows: int, n: int) -> None:
    sizes = collectives.split_sizes(rows, n)
    assert len(sizes) == n and sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


# Gradients. Each function of `kilter.comm.autograd` against the same function of all ranks'
# inputs at once, in one process: a rank's gradient is that of its input under the sum of all
# ranks' losses; where a result is one thing that all ranks hold, its loss counts once.

Together = Callable[[list[Tensor], list[int]], list[Tensor]]
CASES: dict[str, tuple[Callable[[Tensor, Axis, list[int]], Tensor], Together, bool, bool]] = {
    # name: (ours, on all ranks' inputs at once, whole input, loss counts once)
    "gather_rows": (autograd.gather_rows, lambda xs, sizes: [torch.cat(xs)] * len(xs),
                    False, False),
    "scatter_rows": (autograd.scatter_rows, lambda xs, sizes: list(tree_add(xs).split(sizes)),
                     True, False),
    "reduce_from": (lambda x, axis, sizes: autograd.reduce_from(x, axis),
                    lambda xs, sizes: [tree_add(xs)] * len(xs), True, True),
}


def check_gradient(name: str, n: int) -> None:
    axis = Mesh(Layout(tp=n)).axis("tp")
    ours, together, whole, once = CASES[name]
    sizes = collectives.split_sizes(5, n)
    inputs = [x.requires_grad_() for x in
              (parts(n, 5, 3) if whole else [torch.randn(size, 3) for size in sizes])]
    outputs = together(inputs, sizes)
    weights = [torch.randn_like(output) for output in outputs]
    if once:
        weights = [weights[0]] * n
    losses = [(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]
    (losses[0] if once else torch.stack(losses).sum()).backward()
    mine = inputs[axis.index].detach().clone().requires_grad_()
    output = ours(mine, axis, sizes)
    assert torch.equal(output, outputs[axis.index])
    (output * weights[axis.index]).sum().backward()
    torch.testing.assert_close(mine.grad, inputs[axis.index].grad)


def check_shared_inputs(n: int) -> None:
    """copy_to and shared_rows: one tensor that all ranks hold."""
    axis = Mesh(Layout(tp=n)).axis("tp")
    weights = parts(n, 5, 3)
    x = torch.randn(5, 3, requires_grad=True)
    (autograd.copy_to(x, axis) * weights[axis.index]).sum().backward()
    assert torch.equal(x.grad, tree_add(weights))
    x.grad = None
    (autograd.sum_grads(x, axis) * weights[axis.index]).sum().backward()
    assert torch.equal(x.grad, tree_add(weights))
    x.grad = None
    (autograd.shared_rows(x, 2, axis) * weights[axis.index]).sum().backward()
    assert torch.equal(x.grad[:2], weights[axis.index][:2])
    assert torch.equal(x.grad[2:], tree_add(weights)[2:])


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(ranks: RankPool, name: str, n: int) -> None:
    ranks.run(n, check_gradient, name, n)


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_of_what_all_ranks_hold(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_shared_inputs, n)


def test_one_rank_is_the_identity() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    for y in (collectives.tree_all_reduce(x, SINGLE), collectives.broadcast(x, SINGLE),
              collectives.tree_reduce_scatter_rows(x, SINGLE, [4]),
              collectives.all_gather_rows(x, SINGLE, [4]),
              collectives.all_to_all_rows(x, SINGLE, [4], [4]),
              autograd.copy_to(x, SINGLE), autograd.reduce_from(x, SINGLE),
              autograd.gather_rows(x, SINGLE, [4]), autograd.scatter_rows(x, SINGLE, [4]),
              autograd.sum_grads(x, SINGLE),
              autograd.shared_rows(x, 2, SINGLE)):
        assert y is x
    collectives.barrier(SINGLE)
    assert torch.equal(collectives.all_reduce_max(x.detach(), SINGLE), x.detach().double())
