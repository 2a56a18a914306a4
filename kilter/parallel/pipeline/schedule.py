"""`Schedule`: what each rank of a pipeline does, in order. Data, and nothing that runs.

A model is cut into virtual stages, numbered along the forward pass. A rank holds one or several of
them, and for every micro-batch each stage is computed forward and then backward. A backward may be
one action, or two: the gradient of the stage's input, which the stage before waits for, and that of
its weights, which nobody waits for (arXiv 2401.10241).

    rank 0   F0  send              F1  send   recv  B0   recv  B1
    rank 1        recv F0  B0 send       recv F1  B1 send
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What an action does with one micro-batch at one stage."""

    F = "F"  # forward
    B = "B"  # the whole backward
    I = "I"  # backward for the stage's input only
    W = "W"  # backward for the stage's weights only, after I
    SEND_F = "SEND_F"  # an activation to the next stage
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # the gradient of a stage's input to the stage before
    RECV_B = "RECV_B"

    @property
    def computes(self) -> bool:
        return self in _COMPUTING

    @property
    def sends(self) -> bool:
        return self in (Kind.SEND_F, Kind.SEND_B)

    @property
    def receives(self) -> bool:
        return self in (Kind.RECV_F, Kind.RECV_B)


_COMPUTING = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))


@dataclass(frozen=True)
class Action:
    """One step of a rank.

    The stage of a SEND_F is the one that made the activation, of a RECV_F the one that consumes it;
    of a SEND_B the one whose input's gradient is sent, of a RECV_B the one that uses it as the
    gradient of its output. So a message from stage s to stage s + 1 is SEND_F of s and RECV_F of
    s + 1, and its gradient SEND_B of s + 1 and RECV_B of s.
    """

    kind: Kind
    stage: int
    micro_batch: int
    peer: int = -1  # rank of the pipeline axis sent to or received from; -1 for computing

    def __str__(self) -> str:
        text = f"{self.kind.value} of stage {self.stage}, micro-batch {self.micro_batch}"
        if self.peer < 0:
            return text
        return f"{text}, {'to' if self.kind.sends else 'from'} rank {self.peer}"


@dataclass(frozen=True)
class Schedule:
    """A pipeline's actions. That they are complete and can run is for `check` to prove.

    Raises:
        ValueError: at construction, listing what does not fit together.
    """

    name: str
    ranks: int
    micro_batches: int
    placement: tuple[int, ...]  # the rank of each virtual stage
    actions: tuple[tuple[Action, ...], ...]  # per rank, in order

    def __post_init__(self) -> None:
        problems = [f"{name} is {value}, but it must be at least 1"
                    for name in ("ranks", "micro_batches") if (value := getattr(self, name)) < 1]
        if len(self.actions) != self.ranks:
            problems.append(f"there are lists of actions for {len(self.actions)} ranks, "
                            f"but {self.ranks} ranks")
        if sorted(set(self.placement)) != list(range(self.ranks)):
            problems.append(f"placement {self.placement} must name every rank from 0 to "
                            f"{self.ranks - 1} and no other")
        if problems:
            raise ValueError(f"These parts make no pipeline schedule: {'; '.join(problems)}.")

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def rank_of(self, stage: int) -> int:
        return self.placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def computing(self, rank: int) -> tuple[Action, ...]:
        """A rank's actions without the exchange."""
        return tuple(action for action in self.actions[rank] if action.kind.computes)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is done in two parts."""
        return any(action.kind is Kind.W for rank in self.actions for action in rank)
