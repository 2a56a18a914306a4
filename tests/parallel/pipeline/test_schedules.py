"""Every schedule is sound, holds what it promises, and is the one that the literature means."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from kilter.parallel.pipeline.check import activations_in_flight, check, walk
from kilter.parallel.pipeline.exchange import with_exchange
from kilter.parallel.pipeline.generators import NAMES, default_stages, make_schedule
from kilter.parallel.pipeline.schedule import Action, Kind, Schedule


@st.composite
def made(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> Schedule:
    name = draw(st.sampled_from(names))
    ranks = draw(st.integers(1, 7))
    stages = draw(st.integers(2, 4)) if name == "interleaved" else None
    micro_batches = draw(st.integers(1, 20))
    if name == "interleaved":
        micro_batches = ranks * draw(st.integers(1, 4))
    if name == "dualpipe-v":
        micro_batches += 2 * ranks - 1
    return make_schedule(name, ranks, micro_batches, stages)


@given(made())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_sound(schedule: Schedule) -> None:
    check(schedule)
    for rank, actions in enumerate(schedule.actions):
        assert [schedule.rank_of(stage) for stage in schedule.stages_of(rank)] == [rank] * (
            schedule.num_stages // schedule.ranks)
        assert {a.stage for a in actions if a.kind.computes} == set(schedule.stages_of(rank))
    if schedule.ranks == 1:
        assert all(action.kind.computes for action in schedule.actions[0])


@given(made())
@settings(max_examples=60, deadline=None)
def test_gradients_are_summed_in_one_devices_order(schedule: Schedule) -> None:
    for stage in range(schedule.num_stages):
        for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
            order = [a.micro_batch for a in schedule.computing(schedule.rank_of(stage))
                     if a.stage == stage and a.kind in kinds]
            assert order == list(range(schedule.micro_batches))


@given(made())
@settings(max_examples=60, deadline=None)
def test_no_message_is_idle(schedule: Schedule) -> None:
    """Per micro-batch one message each way over every border between ranks, no more."""
    borders = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    sends = sum(a.kind.sends for actions in schedule.actions for a in actions)
    receives = sum(a.kind.receives for actions in schedule.actions for a in actions)
    assert sends == receives == 2 * borders * schedule.micro_batches


def brute_peak(schedule: Schedule, rank: int) -> int:
    """Inputs that still have a use ahead, counted anew at every action."""
    actions = schedule.computing(rank)
    peak = 0
    for now in range(len(actions)):
        begun = {(a.stage, a.micro_batch) for a in actions[:now + 1] if a.kind is Kind.F}
        ahead = {(a.stage, a.micro_batch) for a in actions[now:]}
        peak = max(peak, len(begun & ahead))
    return peak


@given(made())
@settings(max_examples=60, deadline=None)
def test_memory_is_what_still_has_a_use(schedule: Schedule) -> None:
    assert activations_in_flight(schedule) == [
        brute_peak(schedule, rank) for rank in range(schedule.ranks)]


@given(st.integers(1, 6), st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_memory_closed_forms(p: int, m: int) -> None:
    def held(name: str, m: int = m, v: int | None = None) -> list[int]:
        return activations_in_flight(make_schedule(name, p, m, v))

    assert held("naive") == [1] * p
    assert held("gpipe") == [m] * p
    assert held("1f1b") == [min(p - r, m) for r in range(p)]
    # 2104.04473 and 2205.05198: of the first rank p (1 + (p - 1) / (p v)) of its whole part
    for v in (2, 3):
        assert held("interleaved", p * m, v) == [
            min(v * p * m, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
    # 2401.10241: what 1f1b's first rank holds, here on every rank
    assert held("zb-h1") == [min(p, m)] * p
    if m >= 2 * p - 1:
        assert held("zb-v") == [2 * p] * p  # of halves
    if m >= 2 * p:
        assert held("dualpipe-v") == [min(2 * p + 1, 2 * m)] * p  # of halves


def test_what_cannot_be_is_said_with_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"no pipeline schedule '1b1f'; there are naive, gpipe"):
        make_schedule("1b1f", 2, 2)
    with pytest.raises(ValueError, match="no pipeline schedule"):
        default_stages("1b1f")
    with pytest.raises(ValueError, match=r"micro_batches 6 is not a multiple of the 4 ranks.*"
                                         r"4 or 8 would do"):
        make_schedule("interleaved", 4, 6)
    with pytest.raises(ValueError, match=r"3 is not a multiple.*; 4 would do"):
        make_schedule("interleaved", 4, 3)
    with pytest.raises(ValueError, match=r"needs 2 or more; with 1 the schedule is 1f1b"):
        make_schedule("interleaved", 4, 8, 1)
    with pytest.raises(ValueError, match=r"stages_per_rank is 1, but this schedule has exactly 2"):
        make_schedule("zb-v", 4, 8, 1)
    with pytest.raises(ValueError, match=r"stages_per_rank is 2, but this schedule has exactly 1"):
        make_schedule("1f1b", 4, 8, 2)
    with pytest.raises(ValueError, match=r"twice the number of ranks up, 8; zb-v takes fewer"):
        make_schedule("dualpipe-v", 4, 7)
    with pytest.raises(ValueError, match=r"ranks is 0.*micro_batches is -1.*exactly 1\."):
        make_schedule("gpipe", 0, -1, 3)


def test_parts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"micro_batches is 0.*actions for 0 ranks, but 2 ranks.*"
                                         r"placement \(0,\) must name every rank"):
        Schedule("x", 2, 0, (0,), ())


# Broken schedules


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(lists))


@given(made(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_a_missing_or_doubled_action_is_refused(schedule: Schedule, dice: random.Random) -> None:
    rank = dice.randrange(schedule.ranks)
    actions = list(schedule.actions[rank])
    at = dice.randrange(len(actions))
    with pytest.raises(ValueError, match="is not sound"):
        check(changed(schedule, rank, actions[:at] + actions[at + 1:]))
    with pytest.raises(ValueError, match="is not sound"):
        check(changed(schedule, rank, actions[:at] + [actions[at]] + actions[at:]))


@given(made(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_a_receive_after_its_use_is_refused(schedule: Schedule, dice: random.Random) -> None:
    rank = dice.randrange(schedule.ranks)
    actions = list(schedule.actions[rank])
    for at in range(len(actions) - 1, 0, -1):  # any action before what it needs
        first, second = actions[at - 1], actions[at]
        used = (first.kind.receives and second.kind.computes and first.stage == second.stage
                and first.micro_batch == second.micro_batch)
        sent = first.kind.computes and second.kind.sends
        if used or sent:
            actions[at - 1], actions[at] = second, first
            with pytest.raises(ValueError, match="is out of order: rank"):
                check(changed(schedule, rank, actions))
            return


def lists(*ranks: str) -> tuple[tuple[Action, ...], ...]:
    """``F0.1`` is the F of stage 0, micro-batch 1."""
    return tuple(tuple(Action(Kind(word[0]), *map(int, word[1:].split(".")))
                       for word in text.split()) for text in ranks)


def test_a_deadlock_is_refused() -> None:
    """Rank 0 wants a gradient before it sends the activation that this gradient is of."""
    computing = lists("F0.0 B0.0 F0.1 B0.1", "F1.1 F1.0 B1.0 B1.1")
    schedule = with_exchange(Schedule("mine", 2, 2, (0, 1), computing))
    with pytest.raises(ValueError, match=r"mine deadlocks: these wait, and nobody goes on: rank 0 "
                                         r"at its action 2 for RECV_B of stage 0, micro-batch 0, "
                                         r"from rank 1; rank 1 at its action 1 for RECV_F of "
                                         r"stage 1, micro-batch 1, from rank 0"):
        check(schedule)


def test_overtaking_is_refused_and_avoided() -> None:
    """Where the receiver needs messages in another order, it takes the earlier one first."""
    computing = lists("F0.0 F0.1 B0.1 B0.0", "F1.1 B1.1 F1.0 B1.0")
    schedule = with_exchange(Schedule("mine", 2, 2, (0, 1), computing))
    check(schedule)
    first, second, *rest = schedule.actions[1]
    assert [first, second] == [Action(Kind.RECV_F, 1, 0, 0), Action(Kind.RECV_F, 1, 1, 0)]
    with pytest.raises(ValueError, match=r"message 0 from rank 0 to rank 1 is sent for the RECV_F "
                                         r"of stage 1, micro-batch 0, from rank 0, but taken for"):
        check(changed(schedule, 1, [second, first, *rest]))


def test_wrong_places_are_refused() -> None:
    good = make_schedule("1f1b", 2, 2)
    for wrong, words in ((Action(Kind.F, 1, 0), "that stage is on rank 1"),
                         (Action(Kind.F, 0, 2), "there are 2 stages and 2 micro-batches"),
                         (Action(Kind.W, 0, 0), "1 F, 1 B, 0 I and 1 W")):
        with pytest.raises(ValueError, match=words):
            check(changed(good, 0, [*good.actions[0], wrong]))
    half = dataclasses.replace(good, actions=(good.actions[0], ()))
    with pytest.raises(ValueError, match="computes nothing that it could send"):
        with_exchange(half)


def test_walk_keeps_every_ranks_order() -> None:
    schedule = make_schedule("zb-v", 3, 5)
    walked: list[list[Action]] = [[] for _ in range(3)]
    for rank, action in walk(schedule):
        walked[rank].append(action)
    assert tuple(map(tuple, walked)) == schedule.actions


# torch.distributed.pipelining's own orders


def torch_order(actions: list[Any]) -> list[Action]:
    found = []
    for action in actions:
        if action is None:
            continue
        for part in getattr(action, "sub_actions", None) or (action,):
            if part.computation_type.value in "FBIW":
                found.append(Action(Kind(part.computation_type.value), part.stage_index,
                                    part.microbatch_index))
    return found


def torch_lists(kind: str, p: int, m: int, v: int) -> list[list[Action]]:
    """What torch's schedule would do, from its own computation, without process groups."""
    cls = getattr(torch_schedules, kind)
    if kind in ("ScheduleGPipe", "Schedule1F1B"):
        one = SimpleNamespace(_num_stages=p, _n_microbatches=m)
        found = [torch_order(actions) for actions in cls._get_pipeline_order(one).values()]
        if kind == "Schedule1F1B":
            # Its list of the last rank (which it shows, but does not run from) numbers the forwards
            # from 1.
            found[-1] = [dataclasses.replace(a, micro_batch=a.micro_batch - (a.kind is Kind.F))
                         for a in found[-1]]
        return found
    one = SimpleNamespace(pp_group_size=p, _n_microbatches=m, _num_stages=v * p, num_stages=v * p,
                          n_local_stages=v, microbatches_per_round=p)
    return [torch_order(cls._calculate_single_rank_operations(one, rank)) for rank in range(p)]


@pytest.mark.parametrize(("name", "kind"), [
    ("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B"),
    ("interleaved", "ScheduleInterleaved1F1B"), ("zb-v", "ScheduleZBVZeroBubble"),
    ("dualpipe-v", "ScheduleDualPipeV")])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (2, 6), (4, 8), (4, 20), (5, 15), (8, 16)])
def test_orders_are_torchs(name: str, kind: str, p: int, m: int) -> None:
    for v in (2, 3) if name == "interleaved" else (default_stages(name),):
        ours = make_schedule(name, p, m, v)
        assert [list(ours.computing(rank)) for rank in range(p)] == torch_lists(kind, p, m, v)
        style = "v" if name in ("zb-v", "dualpipe-v") else "loop"
        assert dict(enumerate(ours.placement)) == generate_stage_to_rank_mapping(p, v * p, style)
