"""Counted bytes are the closed forms, whoever called the collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from kilter.comm import autograd, collectives
from kilter.comm.counter import CommCounter, wire_bytes
from kilter.mesh import Layout, Mesh
from tests.ranks import RankPool

Seen = dict[tuple[str, str], tuple[int, int]]


def seen(counter: CommCounter) -> Seen:
    return {key: (traffic.calls, traffic.bytes) for key, traffic in counter.traffic.items()}


def check_ours(n: int) -> None:
    mesh = Mesh(Layout(tp=n))
    axis = mesh.axis("tp")
    sizes = collectives.split_sizes(2 * n + 1, n)
    own, most = sizes[axis.index], sizes[0]
    row = 5 * 4  # bytes
    x, rows = torch.ones(2 * n + 1, 5), torch.ones(own, 5)
    large = torch.ones(n, 16384)
    expected: dict[str, tuple[object, Seen]] = {
        "small": (lambda: collectives.tree_all_reduce(x, axis),
                  {("tp", "all_gather"): (1, (n - 1) * (2 * n + 1) * row)}),
        "large": (lambda: collectives.tree_all_reduce(large, axis),
                  {("tp", "all_gather"): (1, (n - 1) * large.nbytes)} if n == 2 else
                  {("tp", "all_to_all"): (1, (n - 1) * 65536),
                   ("tp", "all_gather"): (1, (n - 1) * 65536)}),
        "reduce_scatter": (lambda: collectives.tree_reduce_scatter_rows(x, axis, sizes),
                           {("tp", "all_to_all"): (1, (2 * n + 1 - own) * row)}),
        "gather": (lambda: collectives.all_gather_rows(rows, axis, sizes),
                   {("tp", "all_gather"): (1, (n - 1) * most * row)}),
        "broadcast": (lambda: collectives.broadcast(large, axis),
                      {("tp", "broadcast"): (1, (n - 1) * 65536)}),
        "sum": (lambda: collectives.all_reduce_sum(torch.ones(n), axis),
                {("tp", "all_reduce"): (1, 2 * (n - 1) * 8)}),
        "max": (lambda: collectives.all_reduce_max(torch.ones(n), axis),
                {("tp", "all_reduce"): (1, 2 * (n - 1) * 8)}),
        "barrier": (lambda: collectives.barrier(axis), {("tp", "barrier"): (1, 0)}),
    }
    for name, (call, traffic) in expected.items():
        with CommCounter(mesh.axes()) as counter:
            call()
        assert seen(counter) == traffic, name

    with CommCounter(mesh.axes()) as counter:
        gathered = autograd.gather_rows(rows.requires_grad_(), axis, sizes)
    with counter:  # goes on, and sees the backward pass
        gathered.sum().backward()
    assert counter.calls("tp") == 2 and counter.calls(op="all_to_all") == 1
    assert counter.bytes() == (n - 1) * most * row + (2 * n + 1 - own) * row
    assert counter.bytes("dp") == 0 and counter.bytes("tp", "all_gather") == (n - 1) * most * row


def check_torchs_own() -> None:
    """In-place, functional, point-to-point and object collectives, and what groups are called."""
    n, me = 4, dist.get_rank()
    mesh = Mesh(Layout(dp=2, tp=2))
    tp = mesh.axis("tp")
    other = dist.new_group([0, 1, 2])
    x = torch.ones(8)  # 32 bytes

    with CommCounter(mesh.axes()) as counter:
        dist.all_reduce(x)
        dist.all_reduce(x, group=tp.members)
        out = [torch.empty(8) for _ in range(n)]
        dist.all_gather(out, x)
        dist.scatter(x, out if me == 0 else None)
        dist.gather(x, out if me == 0 else None)
        dist.reduce(x, 0)
        dist.all_to_all(list(x.chunk(n)), list(torch.ones(8).chunk(n)))
        dist.reduce_scatter(torch.empty(8), out)
        peer = me ^ 1
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer),
                                            dist.P2POp(dist.irecv, torch.empty(8), peer)]):
            work.wait()
        if me < 3:
            dist.barrier(other)
    assert seen(counter) == {
        ("world", "all_reduce"): (1, 48), ("tp", "all_reduce"): (1, 32),
        ("world", "all_gather"): (1, 96), ("world", "scatter"): (1, 24),
        ("world", "gather"): (1, 24), ("world", "reduce"): (1, 24),
        ("world", "all_to_all"): (1, 24), ("world", "reduce_scatter"): (1, 96),
        ("world", "send"): (1, 32), ("world", "recv"): (1, 0),
        **({("ranks 0,1,2", "barrier"): (1, 0)} if me < 3 else {})}

    group = tp.members
    y = torch.ones(8, requires_grad=True)
    with CommCounter(mesh.axes()) as counter:
        functional.all_reduce(x, "sum", group).sum()
        functional.all_gather_tensor(x, 0, group).sum()
        functional.reduce_scatter_tensor(x, "sum", 0, group).sum()
        functional.broadcast(x, 0, dist.group.WORLD).sum()
        functional.all_reduce_coalesced([x, x], "sum", group)[0].sum()
        gathered = functional.all_gather_tensor_autograd(y, 0, group)  # then reduce_scatter
        functional.all_to_all_single_autograd(gathered, None, None, group).sum().backward()
    assert seen(counter) == {
        ("tp", "all_reduce"): (2, 32 + 64), ("tp", "all_gather"): (2, 64),
        ("tp", "reduce_scatter"): (2, 16 + 32), ("world", "broadcast"): (1, 24),
        ("tp", "all_to_all"): (2, 64)}

    with CommCounter() as counter:
        dist.all_gather_object([None] * n, "object")
    assert counter.calls("world", "all_gather") == 2  # sizes, then bytes


def check_data_parallel() -> None:
    mesh = Mesh(Layout(dp=4, replicate=2, zero=3))
    parameters = 16 * 32 + 16 + 4 * 16 + 4
    x = torch.randn(3, 32)

    def model() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 4))

    replicas = DistributedDataParallel(model(), process_group=mesh.axis("dp").members,
                                       broadcast_buffers=False)
    with CommCounter(mesh.axes()) as counter:
        replicas(x).sum().backward()
    assert counter.bytes("dp") == counter.bytes() == wire_bytes("all_reduce", 4 * parameters, 4)

    for names, n in ((("dp_cp",), 4), (("replicate", "dp_shard_cp"), 2)):
        shards = model()
        for layer in shards:
            fully_shard(layer, mesh=mesh.device_mesh(*names))
        fully_shard(shards, mesh=mesh.device_mesh(*names))
        with CommCounter(mesh.axes()) as counter:
            shards(x).sum().backward()
        # Both layers are gathered in forward and in backward, their gradients scattered once, and
        # with copies the shards' gradients then summed over them.
        once = 4 * parameters * (n - 1) // n
        expected = {(names[-1], "all_gather"): (4, 2 * once),
                    (names[-1], "reduce_scatter"): (2, once)}
        if n == 2:
            expected["replicate", "all_reduce"] = (2, 4 * parameters // n)
        assert seen(counter) == expected


def check_fake() -> None:
    """The planner's use: one of many ranks that are not there, and tensors without data."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    mesh = Mesh(Layout(dp=8, tp=8))
    axis = mesh.axis("tp")
    with FakeTensorMode(), CommCounter(mesh.axes()) as counter:
        x = torch.ones(64, 4096, requires_grad=True)
        rows = autograd.scatter_rows(x, axis, [8] * 8)
        autograd.gather_rows(rows, axis, [8] * 8).sum().backward()
    size = 64 * 4096 * 4
    assert seen(counter) == {("tp", "all_to_all"): (2, 2 * size * 7 // 8),
                             ("tp", "all_gather"): (2, 2 * size * 7 // 8)}


@pytest.mark.parametrize("n", [2, 3])
def test_our_collectives(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_ours, n)


def test_torchs_collectives(ranks: RankPool) -> None:
    ranks.run(4, check_torchs_own)


def test_data_parallel_steps(ranks: RankPool) -> None:
    ranks.run(4, check_data_parallel)


def test_a_fake_world(ranks: RankPool) -> None:
    ranks.run(1, check_fake)


def test_wire_bytes() -> None:
    assert wire_bytes("all_reduce", 1000, 4) == 1500
    assert wire_bytes("all_gather", 1000, 3) == 667  # rounded up
    assert wire_bytes("reduce_scatter", 1000, 1) == 0
    assert wire_bytes("send", 1000, 4) == 1000 and wire_bytes("recv", 1000, 4) == 0
    with pytest.raises(ValueError, match="no closed form for the bytes of 'all_to_all'"):
        wire_bytes("all_to_all", 1000, 4)
