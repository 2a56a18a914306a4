"""Simulated time against closed forms, and against a simulation written another way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.parallel.pipeline.check import activations_in_flight
from kilter.parallel.pipeline.generators import NAMES, make_schedule
from kilter.parallel.pipeline.schedule import Action, Kind, Schedule
from kilter.parallel.pipeline.simulate import FORMULAS, Costs, Timeline, simulate

cost = st.integers(1, 9).map(float)


def idle(timeline: Timeline) -> float:
    return timeline.makespan - timeline.ideal


@given(st.integers(1, 6), st.integers(1, 16), st.integers(2, 4), cost, cost, cost)
@settings(max_examples=60, deadline=None)
def test_whole_backwards(p: int, m: int, v: int, f: float, i: float, w: float) -> None:
    costs = Costs(forward=f, input=i, weight=w)
    for name in ("naive", "gpipe", "1f1b", "interleaved"):
        m_of = p * (1 + m // 6) if name == "interleaved" else m
        v_of = v if name == "interleaved" else 1
        timeline = simulate(make_schedule(name, p, m_of, v_of), costs)
        assert idle(timeline) == FORMULAS[name].idle(p, m_of, f, i, w)
        assert timeline.ideal == m_of * v_of * (f + i + w)
        if name == "naive":
            assert math.isclose(timeline.bubble_of_total, (p - 1) / p)
        else:
            assert math.isclose(timeline.bubble_of_ideal, (p - 1) / (v_of * m_of))
            assert math.isclose(timeline.bubble_of_total, (p - 1) / (v_of * m_of + p - 1))


@given(st.integers(1, 6), st.integers(0, 9), cost, cost, cost)
@settings(max_examples=50, deadline=None)
def test_split_backwards(p: int, more: int, f: float, i: float, w: float) -> None:
    def check(name: str, m: int, f: float, i: float, w: float) -> Timeline:
        timeline = simulate(make_schedule(name, p, m), Costs(forward=f, input=i, weight=w))
        assert idle(timeline) == FORMULAS[name].idle(p, m, f, i, w), (name, m)
        return timeline

    w = min(f, i, w)
    check("zb-h1", p + more, f, i, w)
    check("dualpipe-v", 2 * p + more, i, i, w)
    timeline = check("zb-v", 2 * p - 1 + more, f, f, f)
    assert timeline.bubble_of_span == 0  # what its name promises, by its papers' measure


@given(st.integers(2, 6), st.integers(1, 16), cost, cost, cost)
@settings(max_examples=60, deadline=None)
def test_zb_h1_beats_1f1b_in_the_same_memory(p: int, m: int, f: float, i: float, w: float) -> None:
    ours, theirs = make_schedule("zb-h1", p, m), make_schedule("1f1b", p, m)
    assert max(activations_in_flight(ours)) == max(activations_in_flight(theirs))
    costs = Costs(forward=f, input=i, weight=w)
    assert idle(simulate(ours, costs)) < idle(simulate(theirs, costs))


def test_a_third_of_1f1bs_bubble() -> None:
    zb, plain = (simulate(make_schedule(name, 4, 12)) for name in ("zb-h1", "1f1b"))
    assert math.isclose(zb.bubble_of_ideal, plain.bubble_of_ideal / 3)


# Another way: earliest times as a fixed point over all dependencies, rank lists among them


def fixed_point(schedule: Schedule, costs: Costs, send: float) -> dict[tuple[str, int, int], float]:
    end: dict[tuple[str, int, int], float] = {}
    chain = [(rank, [(a.kind.value, a.stage, a.micro_batch) for a in schedule.computing(rank)])
             for rank in range(schedule.ranks)]
    last = schedule.num_stages - 1
    changed = True
    while changed:
        changed = False
        for rank, actions in chain:
            now = 0.0
            for kind, stage, micro_batch in actions:
                if kind == "F":
                    sources = [("F", stage - 1, micro_batch)] if stage else []
                elif kind in "BI":
                    sources = [(k, stage + 1, micro_batch) for k in "BI" if stage < last
                               if schedule.splits_backward or k == "B"]
                else:
                    sources = []
                for source in sources:
                    far = schedule.rank_of(source[1]) != rank
                    now = max(now, end.get(source, 0.0) + (send if far and source in end else 0))
                now += costs.of(Kind(kind), stage)
                changed |= end.get((kind, stage, micro_batch)) != now
                end[kind, stage, micro_batch] = now
    return end


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_uneven_stages_and_slow_links(name: str, p: int, rounds: int, send: int,
                                      data: st.DataObject) -> None:
    m = 2 * p * rounds
    schedule = make_schedule(name, p, m)
    per_stage = st.lists(cost, min_size=schedule.num_stages, max_size=schedule.num_stages)
    f, b, i, w = (data.draw(per_stage) for _ in range(4))
    costs = Costs(forward=f, backward=b, input=i, weight=w, send=send)
    timeline = simulate(schedule, costs)
    expected = fixed_point(schedule, costs, send)
    for rank in timeline.ranks:
        now = 0.0
        for timed in rank:
            assert now == timed.start <= timed.end  # a rank is never in two places
            now = timed.end
            a = timed.action
            if a.kind.computes:
                assert timed.end == expected[a.kind.value, a.stage, a.micro_batch]
    assert timeline.makespan == max(expected.values())


# The form of the DeepSeek-V3 report


def blocks_of(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """A rank's actions with each forward beside a backward as one, where the report has it so."""
    p, actions = schedule.ranks, list(schedule.computing(rank))
    after = p - 1 - rank
    begin = 2 * after + 2 * (rank + 1) + 3 * after
    pairs = begin + 4 * (schedule.micro_batches - 2 * p + rank + 1)
    found: list[tuple[Action, ...]] = [(action,) for action in actions[:begin]]
    found += [tuple(actions[k:k + 2]) for k in range(begin, pairs, 2)]
    if rank == p - 1:
        found[begin:begin + 1] = [(actions[begin],), (actions[begin + 1],)]
    for k in range(pairs, pairs + 3 * after, 3):
        found += [(actions[k],), tuple(actions[k + 1:k + 3])]
    return found + [(action,) for action in actions[pairs + 3 * after:]]


def longest_idle(blocks: Sequence[list[tuple[Action, ...]]], costs: Costs, pair: float) -> float:
    """Makespan less the least busy rank's work; a block's results are there at its end."""
    end: dict[tuple[bool, int, int], float] = {}
    now, busy = [0.0] * len(blocks), [0.0] * len(blocks)
    place = [0] * len(blocks)
    last = 2 * len(blocks) - 1
    while any(k < len(b) for k, b in zip(place, blocks, strict=True)):
        for rank, mine in enumerate(blocks):
            while place[rank] < len(mine):
                block = mine[place[rank]]
                needs = [(True, a.stage - 1, a.micro_batch) for a in block
                         if a.kind is Kind.F and a.stage]
                needs += [(False, a.stage + 1, a.micro_batch) for a in block
                          if a.kind in (Kind.B, Kind.I) and a.stage < last]
                makes = [(a.kind is Kind.F, a.stage, a.micro_batch) for a in block
                         if a.kind is not Kind.W]
                if any(need not in end and need not in makes for need in needs):
                    break
                time = pair if len(block) == 2 else costs.of(block[0].kind, block[0].stage)
                start = max([now[rank], *(end[n] for n in needs if n not in makes)])
                now[rank] = start + time
                busy[rank] += time
                end.update(dict.fromkeys(makes, now[rank]))
                place[rank] += 1
    return max(now) - min(busy)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 8), (5, 13)])
@pytest.mark.parametrize("pair", [3.0, 2.5, 2.0])
def test_dualpipes_own_form(p: int, m: int, pair: float) -> None:
    """(p - 1)(F&B + B - 3W): a pair is one block, F&B may be less than F + B by overlap."""
    schedule = make_schedule("dualpipe-v", p, m)
    blocks = [blocks_of(schedule, rank) for rank in range(p)]
    assert [[a for block in mine for a in block] for mine in blocks] == [
        list(schedule.computing(rank)) for rank in range(p)]
    assert longest_idle(blocks, Costs(), pair) == (p - 1) * (pair + 2 - 3)


def test_costs() -> None:
    assert [Costs().of(kind, 0) for kind in Kind] == [1, 2, 1, 1, 0, 0, 0, 0]
    assert [Costs(backward=3).of(kind, 0) for kind in (Kind.B, Kind.I, Kind.W)] == [3, 1.5, 1.5]
    assert [Costs(input=3, weight=[1, 2]).of(k, 1) for k in (Kind.B, Kind.I, Kind.W)] == [5, 3, 2]
    with pytest.raises(ValueError, match=r"forward is -1, but no cost is negative; input and "
                                         r"weight are the two parts.*are for \[1, 2\] stages"):
        Costs(forward=-1, backward=[1, 2], input=[1])
    with pytest.raises(ValueError, match="forward is given for 3 stages, but the schedule has 2"):
        simulate(make_schedule("1f1b", 2, 2), Costs(forward=[1, 1, 1]))


def test_work_that_costs_nothing_has_no_bubble() -> None:
    timeline = simulate(make_schedule("1f1b", 2, 2), Costs(forward=0, backward=0))
    assert timeline.bubble_of_ideal == timeline.bubble_of_total == timeline.bubble_of_span == 0
