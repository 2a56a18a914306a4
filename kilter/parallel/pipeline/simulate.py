"""Times a schedule: when each action starts and ends, given what each costs; and the closed forms.

The bubble, what ranks idle, is named by what it is divided by, because the literature uses three
denominators:

    of the total      idle / makespan                    (p - 1) / (m + p - 1) for 1F1B
    of the ideal      idle / (makespan without bubble)   (p - 1) / m           for 1F1B
    of the span       idle / (the longest time from a rank's first action to its last)

The last is that of the zero-bubble papers: a rank may start its next step before others have ended
this one if nothing is synchronised between steps. A clipped gradient norm is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kilter.parallel.pipeline.check import walk
from kilter.parallel.pipeline.exchange import received_as
from kilter.parallel.pipeline.schedule import Action, Kind, Schedule

Cost = float | Sequence[float]  # of every stage, or one per stage


@dataclass(frozen=True)
class Costs:
    """Time of one micro-batch at one stage, in any unit.

    A backward in two parts costs ``input + weight``; given only one of whole and parts, the whole
    is their sum, and they are halves of it. With nothing given each of F, I and W costs 1.
    ``send`` is the time from a message's posting to its arrival; it occupies no rank, and messages
    do not slow each other.

    Raises:
        ValueError: at construction, listing every cost that is negative or does not go with others.
    """

    forward: Cost = 1.0
    backward: Cost | None = None
    input: Cost | None = None
    weight: Cost | None = None
    send: Cost = 0.0  # of a list: by the stage that sends

    def __post_init__(self) -> None:
        given = {name: value for name in ("forward", "backward", "input", "weight", "send")
                 if (value := getattr(self, name)) is not None}
        problems = [f"{name} is {value}, but no cost is negative" for name, value in given.items()
                    if any(one < 0 for one in _listed(value))]
        if (self.input is None) != (self.weight is None):
            problems.append("input and weight are the two parts of a backward; give both or none")
        lengths = {len(value) for value in given.values() if isinstance(value, Sequence)}
        if len(lengths) > 1:
            problems.append(f"the lists of costs are for {sorted(lengths)} stages; make them for "
                            "as many stages each")
        if problems:
            raise ValueError(f"These costs cannot be: {'; '.join(problems)}.")

    def of(self, kind: Kind, stage: int) -> float:
        """What an action costs its rank; exchange costs it nothing."""
        if kind is Kind.F:
            return _at(self.forward, stage)
        if kind is Kind.B:
            if self.backward is None:
                return self.of(Kind.I, stage) + self.of(Kind.W, stage)
            return _at(self.backward, stage)
        if kind in (Kind.I, Kind.W):
            part = self.input if kind is Kind.I else self.weight
            if part is None:
                return 1.0 if self.backward is None else _at(self.backward, stage) / 2
            return _at(part, stage)
        return 0.0

    def check_stages(self, stages: int) -> None:
        """Raises ValueError if a list of costs is for another number of stages."""
        for name in ("forward", "backward", "input", "weight", "send"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) != stages:
                raise ValueError(f"The cost {name} is given for {len(value)} stages, but the "
                                 f"schedule has {stages}.")


@dataclass(frozen=True)
class Timed:
    """An action with its time. A receive lasts while it waits; a send is an instant."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule's actions in time, from 0. Bubbles are fractions; see the head of this file."""

    schedule: Schedule
    ranks: tuple[tuple[Timed, ...], ...]  # per rank, in its order

    @property
    def makespan(self) -> float:
        """From the first action of any rank to the last of any."""
        return max(timed.end for rank in self.ranks for timed in rank)

    @property
    def longest_span(self) -> float:
        """The most time between a rank's own first and last computing action."""
        return max(rank[-1].end - rank[0].start for rank in map(_computing, self.ranks))

    @property
    def ideal(self) -> float:
        """What the step would take if its work were spread evenly and nobody ever waited."""
        return sum(self.work(rank) for rank in range(self.schedule.ranks)) / self.schedule.ranks

    @property
    def bubble_of_total(self) -> float:
        return _share(self.makespan - self.ideal, self.makespan)

    @property
    def bubble_of_ideal(self) -> float:
        return _share(self.makespan - self.ideal, self.ideal)

    @property
    def bubble_of_span(self) -> float:
        return _share(self.longest_span - self.ideal, self.longest_span)

    def work(self, rank: int) -> float:
        """Time a rank computes."""
        return sum(timed.end - timed.start for timed in _computing(self.ranks[rank]))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Every rank does its actions in order, each as soon as it can.

    Raises:
        ValueError: if the costs are for another number of stages, or the schedule cannot run.
    """
    costs = costs or Costs()
    costs.check_stages(schedule.num_stages)
    now = [0.0] * schedule.ranks
    arrives: dict[tuple[int, Action], float] = {}  # (receiver, receive) -> time
    timed: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    for rank, action in walk(schedule):
        start = now[rank]
        if action.kind.sends:
            arrival = start + _at(costs.send, action.stage)
            arrives[action.peer, received_as(action, rank)] = arrival
        elif action.kind.receives:
            now[rank] = max(start, arrives[rank, action])
        else:
            now[rank] = start + costs.of(action.kind, action.stage)
        timed[rank].append(Timed(action, start, now[rank]))
    return Timeline(schedule, tuple(map(tuple, timed)))


# Closed forms


@dataclass(frozen=True)
class Formula:
    """What a schedule idles per rank, in closed form.

    F, I and W are the costs of one micro-batch at one stage, B = I + W; p ranks, m micro-batches,
    v stages per rank.
    """

    text: str  # idle time per rank, of the makespan
    holds: str  # when it does
    idle: Callable[[int, int, float, float, float], float]  # p, m, F, I, W
    source: str


FORMULAS: dict[str, Formula] = {
    "naive": Formula("(p − 1)·m·(F + B)", "always",
                     lambda p, m, f, i, w: (p - 1) * m * (f + i + w), "counting"),
    "gpipe": Formula("(p − 1)·(F + B)", "always",
                     lambda p, m, f, i, w: (p - 1) * (f + i + w), "2104.04473, 2.2.1"),
    "1f1b": Formula("(p − 1)·(F + B)", "always",
                    lambda p, m, f, i, w: (p - 1) * (f + i + w), "2104.04473, 2.2.1"),
    "interleaved": Formula("(p − 1)·(F + B)", "always",
                           lambda p, m, f, i, w: (p - 1) * (f + i + w), "2104.04473, 2.2.2"),
    "zb-h1": Formula("(p − 1)·(F + I − W)", "m ≥ p, W ≤ F, W ≤ I",
                     lambda p, m, f, i, w: (p - 1) * (f + i - w), "2401.10241, 2.3"),
    "zb-v": Formula("(p − 1)·F", "m ≥ 2p − 1, F = I = W",
                    lambda p, m, f, i, w: (p - 1) * f, "2401.10241, 6"),
    # The report's own form, (p - 1)(F&B + B - 3W), takes a forward beside a backward for one block
    # whose results are there at its end. One after the other, as here, the forward's go out sooner.
    "dualpipe-v": Formula("(p − 1)·(F + I − W)", "m ≥ 2p, F = I ≥ W",
                          lambda p, m, f, i, w: (p - 1) * (f + i - w), "simulation"),
}


def _listed(cost: Cost) -> Sequence[float]:
    return cost if isinstance(cost, Sequence) else (cost,)


def _at(cost: Cost, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _computing(rank: tuple[Timed, ...]) -> list[Timed]:
    return [timed for timed in rank if timed.action.kind.computes]
