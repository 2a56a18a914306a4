"""The tests' own pool of ranks: results, failures, deaths and hangs come back as they are."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks as ranks_module
from tests.ranks import RankError, RankPool


def describe(x: torch.Tensor, scale: int = 1) -> tuple[int, int, torch.Tensor, int, float]:
    total = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return (dist.get_rank(), dist.get_world_size(), total, torch.get_num_threads(),
            torch.rand(()).item())


def pid() -> int:
    return os.getpid()


def fail_in(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the cause")
    dist.barrier()


def die_in(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_in(rank: int) -> None:
    dist.barrier()  # all have come as far as this
    if dist.get_rank() == rank:
        time.sleep(3600)


def unpicklable() -> object:
    return lambda: 0


def group_name() -> str:
    return dist.new_group(list(range(dist.get_world_size()))).group_name


def test_results_come_back_by_rank(ranks: RankPool) -> None:
    x = torch.arange(3.0)
    for world in (1, 3, 2):
        results = ranks.run(world, describe, x, scale=2)
        for rank, (r, n, total, threads, random) in enumerate(results):
            assert (r, n, threads) == (rank, world, 1)
            assert torch.equal(total, x * world * (world + 1))
            assert random == results[0][4]


def test_processes_stay_and_groups_go(ranks: RankPool) -> None:
    assert ranks.run(2, pid) == ranks.run(3, pid)[:2]
    assert ranks.run(2, group_name) == ranks.run(2, group_name)


def test_a_failing_rank_is_the_first_cause(ranks: RankPool) -> None:
    before = ranks.run(3, pid)
    with pytest.raises(RankError, match="KeyError: 'the cause'") as caught:
        ranks.run(3, fail_in, 1)
    assert caught.value.rank == 1 and "in fail_in" in caught.value.traceback
    assert {rank for rank, _ in caught.value.failures} == {0, 1, 2}
    assert ranks.run(3, pid) == before


def test_a_dead_rank_is_named_and_replaced(ranks: RankPool) -> None:
    before = ranks.run(3, pid)
    with pytest.raises(RankError, match=r"rank 2: died \(signal SIGKILL\)") as caught:
        ranks.run(3, die_in, 2)
    assert caught.value.rank == 2
    after = ranks.run(3, pid)
    assert len(set(after)) == 3 and before[2] not in after


def test_a_hanging_rank_is_killed_and_says_where_it_was(
        ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which the time is up as soon as the other rank has answered."""
    before = ranks.run(2, pid)
    now, wait = [0.0], connection.wait

    def wait_for_one(pipes: list[Any], left: float) -> list[Any]:
        if len(pipes) > 1:
            return wait(pipes)
        now[0] += left
        return []

    with monkeypatch.context() as patched:
        patched.setattr(ranks_module, "connection", SimpleNamespace(wait=wait_for_one))
        patched.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now[0],
                                                              sleep=time.sleep))
        with pytest.raises(RankError, match=r"rank 1: did not finish in 300 s") as caught:
            ranks.run(2, hang_in, 1)
    assert "hang_in" in str(caught.value) and len(caught.value.failures) == 1
    assert not set(ranks.run(2, pid)) & set(before)


def test_what_cannot_be_sent_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="not at a module's top level"):
        ranks.run(1, lambda: 0)
    with pytest.raises(ValueError, match="9 ranks"):
        ranks.run(9, pid)
    with pytest.raises(RankError, match="pickle"):
        ranks.run(1, unpicklable)
