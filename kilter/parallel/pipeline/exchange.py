"""Adds sends and receives to what ranks compute, in an order that cannot deadlock.

A send stands right after the action that makes its tensor, a receive right before the action that
needs it. Neighbouring stages on one rank exchange nothing.

Some transports have no tags: then the n-th receive from a rank gets the n-th send of that rank,
whatever each was meant to be. So where a rank needs a message that was sent after others, it
receives those others first. That waits for nothing more: they were sent before. Hence lists that
can be computed in their order at all still can be with the exchange, if sends do not block.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from kilter.parallel.pipeline.schedule import Action, Kind, Schedule


def with_exchange(schedule: Schedule) -> Schedule:
    """The schedule with the exchange that its computing actions ask for (any it has is replaced).

    Raises:
        ValueError: if an action needs a tensor that no rank makes.
    """
    computing = [schedule.computing(rank) for rank in range(schedule.ranks)]
    channels: dict[tuple[int, int], deque[Action]] = {}  # (from, to) -> sends not yet received
    for rank, actions in enumerate(computing):
        for action in actions:
            if send := _sent_after(schedule, action):
                channels.setdefault((rank, send.peer), deque()).append(send)
    lists = tuple(tuple(_exchanging(schedule, rank, actions, channels))
                  for rank, actions in enumerate(computing))
    return dataclasses.replace(schedule, actions=lists)


def received_as(send: Action, sender: int) -> Action:
    """The receive that a send of this rank is for."""
    if send.kind is Kind.SEND_F:
        return Action(Kind.RECV_F, send.stage + 1, send.micro_batch, sender)
    return Action(Kind.RECV_B, send.stage - 1, send.micro_batch, sender)


def _exchanging(schedule: Schedule, rank: int, actions: tuple[Action, ...],
                channels: dict[tuple[int, int], deque[Action]]) -> list[Action]:
    found: list[Action] = []
    received: set[Action] = set()
    for action in actions:
        need = _received_before(schedule, action)
        while need is not None and need not in received:
            if not (channel := channels.get((need.peer, rank))):
                raise ValueError(f"Rank {rank} needs the {need} before the {action}, but rank "
                                 f"{need.peer} computes nothing that it could send for it.")
            receive = received_as(channel.popleft(), need.peer)
            received.add(receive)
            found.append(receive)
        found.append(action)
        if send := _sent_after(schedule, action):
            found.append(send)
    return found


def _sent_after(schedule: Schedule, action: Action) -> Action | None:
    if action.kind is Kind.F and action.stage + 1 < schedule.num_stages:
        kind, to = Kind.SEND_F, action.stage + 1
    elif action.kind in (Kind.B, Kind.I) and action.stage > 0:
        kind, to = Kind.SEND_B, action.stage - 1
    else:
        return None
    peer = schedule.rank_of(to)
    if peer == schedule.rank_of(action.stage):
        return None
    return Action(kind, action.stage, action.micro_batch, peer)


def _received_before(schedule: Schedule, action: Action) -> Action | None:
    if action.kind is Kind.F and action.stage > 0:
        kind, source = Kind.RECV_F, action.stage - 1
    elif action.kind in (Kind.B, Kind.I) and action.stage + 1 < schedule.num_stages:
        kind, source = Kind.RECV_B, action.stage + 1
    else:
        return None
    peer = schedule.rank_of(source)
    if peer == schedule.rank_of(action.stage):
        return None
    return Action(kind, action.stage, action.micro_batch, peer)
