"""Proves a schedule sound without running it, and counts what it holds in memory.

Sound means: every stage computes every micro-batch once, forward and backward; what crosses ranks
is sent once and received once; nothing is used before it is there; receives from a rank come in the
order of that rank's sends; and ranks that do their actions in order, each receive blocking until
its message was sent and no send ever blocking, all come to their end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kilter.parallel.pipeline.exchange import received_as, with_exchange
from kilter.parallel.pipeline.schedule import Action, Kind, Schedule

_SHOWN = 4  # problems of one sort named in an error


def check(schedule: Schedule) -> None:
    """That the schedule is sound.

    Raises:
        ValueError: saying what is missing, too many, out of order or blocked, and where.
    """
    for find in (_incomplete, _unmatched, _overtaking):  # each relies on the ones before
        if problems := find(schedule):
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise ValueError(f"The schedule {schedule.name} is not sound: "
                             f"{'; '.join(problems[:_SHOWN])}{more}.")
    for _ in walk(schedule):
        pass


def walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(rank, action) of every action, in an order in which they can all be done; of each rank in
    its own order.

    Raises:
        ValueError: if an action comes before one of its own rank that it needs, or if all ranks
            that are not at their end wait for messages that nobody has sent yet.
    """
    at = [0] * schedule.ranks
    done: list[set[tuple[Kind, int, int]]] = [set() for _ in range(schedule.ranks)]
    sent: set[tuple[int, Action]] = set()  # (receiver, the receive it is for)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind.receives and (rank, action) not in sent:
                    break
                for need in _needs(schedule, action):
                    if need not in done[rank]:
                        raise ValueError(
                            f"The schedule {schedule.name} is out of order: rank {rank} comes to "
                            f"its action {at[rank]}, {action}, before {Action(*need)}.")
                done[rank].add(_result(action))
                if action.kind.sends:
                    sent.add((action.peer, received_as(action, rank)))
                yield rank, action
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} at its action {at[rank]} for {actions[at[rank]]}"
             for rank, actions in enumerate(schedule.actions) if at[rank] < len(actions)]
    if stuck:
        raise ValueError(f"The schedule {schedule.name} deadlocks: these wait, and nobody goes on: "
                         f"{'; '.join(stuck)}.")


def activations_in_flight(schedule: Schedule) -> list[int]:
    """The most stage inputs each rank holds at once, counted in micro-batches times stages.

    An input is held from its stage's forward until that stage needs it no more: its B or, of a
    backward in two parts, its W. (With several stages per rank each is as much smaller.)
    """
    peaks = []
    for rank in range(schedule.ranks):
        held = peak = 0
        for action in schedule.computing(rank):
            held += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def _needs(schedule: Schedule, action: Action) -> list[tuple[Kind, int, int]]:
    """What must be done on the same rank before; a B here may also be an I."""
    stage, micro_batch, rank = action.stage, action.micro_batch, schedule.rank_of(action.stage)
    if action.kind is Kind.F and stage > 0:
        here = schedule.rank_of(stage - 1) == rank
        return [(Kind.F, stage - 1, micro_batch) if here else (Kind.RECV_F, stage, micro_batch)]
    if action.kind in (Kind.B, Kind.I):
        needs = [(Kind.F, stage, micro_batch)]
        if stage + 1 < schedule.num_stages:
            here = schedule.rank_of(stage + 1) == rank
            needs.append((Kind.B, stage + 1, micro_batch) if here
                         else (Kind.RECV_B, stage, micro_batch))
        return needs
    if action.kind is Kind.SEND_F:
        return [(Kind.F, stage, micro_batch)]
    if action.kind in (Kind.W, Kind.SEND_B):
        return [(Kind.B, stage, micro_batch)]
    return []


def _result(action: Action) -> tuple[Kind, int, int]:
    kind = Kind.B if action.kind is Kind.I else action.kind
    return kind, action.stage, action.micro_batch


def _incomplete(schedule: Schedule) -> list[str]:
    """What is computed too often, too rarely or in the wrong place."""
    problems = []
    counts: Counter[tuple[int, int, Kind]] = Counter()
    for rank in range(schedule.ranks):
        for action in schedule.computing(rank):
            if not (0 <= action.stage < schedule.num_stages
                    and 0 <= action.micro_batch < schedule.micro_batches):
                problems.append(f"rank {rank} has a {action}, but there are "
                                f"{schedule.num_stages} stages and {schedule.micro_batches} "
                                "micro-batches, from 0")
            elif schedule.rank_of(action.stage) != rank:
                problems.append(f"rank {rank} has a {action}, but that stage is on rank "
                                f"{schedule.rank_of(action.stage)}")
            counts[action.stage, action.micro_batch, action.kind] += 1
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.micro_batches):
            f, b, i, w = (counts[stage, micro_batch, kind]
                          for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                problems.append(f"stage {stage} computes micro-batch {micro_batch} with {f} F, "
                                f"{b} B, {i} I and {w} W; it must be one F, and one B or one I "
                                "with one W")
    return problems


def _unmatched(schedule: Schedule) -> list[str]:
    """Exchange that is missing, or that nobody asked for."""
    problems = []
    right = with_exchange(schedule)
    for rank in range(schedule.ranks):
        wanted, found = (Counter(a for a in s.actions[rank] if not a.kind.computes)
                         for s in (right, schedule))
        problems += [f"rank {rank} lacks the {action}" for action in wanted - found]
        problems += [f"rank {rank} has a {action} too many" for action in found - wanted]
    return problems


def _overtaking(schedule: Schedule) -> list[str]:
    """Pairs of ranks of which the one receives in another order than the other sends."""
    problems = []
    for sender in range(schedule.ranks):
        for receiver in range(schedule.ranks):
            sends = [received_as(action, sender) for action in schedule.actions[sender]
                     if action.kind.sends and action.peer == receiver]
            receives = [action for action in schedule.actions[receiver]
                        if action.kind.receives and action.peer == sender]
            for place, (sent, received) in enumerate(zip(sends, receives, strict=True)):
                if sent != received:
                    problems.append(f"message {place} from rank {sender} to rank {receiver} is "
                                    f"sent for the {sent}, but taken for the {received}")
                    break
    return problems
