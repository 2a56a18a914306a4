"""Which ranks do what: every role has a run of consecutive ranks, and may share the actor's.

    colocated (default)     0 1 2 3                       actor, rollout, critic, reference, ...
    rollout = 2             0 1 2 3 | 4 5                 actor ... | rollout
    rollout 2, critic 1     0 1 2 3 | 4 5 | 6             actor ... | rollout | critic

The loop is the same for all of them: a role's ranks do its work, and the others hear of the result.
With Ray, rollout ranks of their own are in no world with the others (docs/async-rl.md); they are
counted after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

InFlight = Literal["continue", "restart"]

DEADLINE = 600.0  # seconds

# In the order of their ranks, after the actor's.
ROLES = ("rollout", "critic", "reference", "reward_model")


@dataclass(frozen=True)
class PlacementConfig:
    """How many ranks of its own each role has; 0: it shares the actor's.

    Attributes:
        rollout, critic, reference, reward_model: ranks.
        ray: the ranks are actors of a Ray cluster (extra ``ray``), spread over its machines.
        max_staleness: how many versions of the weights older than the trainer's a token that is
            learned from may be. Above 0 rollouts go on while the trainer learns, which needs
            ``ray`` and ranks of their own.
        in_flight: what becomes of unfinished answers when new weights come: they ``continue`` and
            keep what they have, or ``restart``.
        deadline: seconds in which a rollout replica that is apart has to get on (its engine takes
            a step, it has judged answers, taken weights, started); after that it counts as dead.
        cpus: CPUs of the cluster that a rank reserves, beside a GPU if launch.device says so.
    """

    rollout: int = 0
    critic: int = 0
    reference: int = 0
    reward_model: int = 0
    ray: bool = False
    max_staleness: int = 0
    in_flight: InFlight = "continue"
    deadline: float = DEADLINE
    cpus: float = 1.0

    def __post_init__(self) -> None:
        problems = [f"{role} is {getattr(self, role)} but must not be negative"
                    for role in (*ROLES, "max_staleness") if getattr(self, role) < 0]
        if self.max_staleness and not (self.ray and self.rollout):
            problems.append(f"max_staleness is {self.max_staleness}, but rollouts only go on while "
                            "the trainer learns where they are actors of Ray with ranks of their "
                            "own; set ray = true and rollout, or max_staleness = 0")
        if self.in_flight not in get_args(InFlight):
            problems.append(f"in_flight is {self.in_flight!r} but must be continue or restart")
        elif self.in_flight != "continue" and not self.max_staleness:
            problems.append("in_flight is set, but max_staleness is 0, so that no answer is "
                            "unfinished when new weights come; leave it out")
        if self.deadline <= 0.0:
            problems.append(f"deadline is {self.deadline} but must be positive")
        elif self.deadline != DEADLINE and not self.apart:
            problems.append(f"deadline is {self.deadline}, but only rollouts that are actors of "
                            "Ray with ranks of their own have one; set ray = true and rollout, or "
                            "leave it out")
        if self.cpus <= 0.0:
            problems.append(f"cpus is {self.cpus} but must be positive")
        elif self.cpus != 1.0 and not self.ray:
            problems.append(f"cpus is {self.cpus}, but only Ray reserves CPUs; set ray = true, or "
                            "leave it out")
        if problems:
            raise ValueError(f"Roles cannot be placed so: {'; '.join(problems)}.")

    @property
    def apart(self) -> bool:
        """Whether rollout replicas are worlds of their own."""
        return self.ray and self.rollout > 0

    def ranks_of(self, role: str, actor: int) -> range:
        """A role's ranks, where the actor has the first so many."""
        if role == "actor" or not getattr(self, role):
            return range(actor)
        order = (*ROLES[1:], ROLES[0]) if self.apart else ROLES
        start = actor + sum(getattr(self, other) for other in order[:order.index(role)])
        return range(start, start + getattr(self, role))

    def world(self, actor: int) -> int:
        return actor + sum(getattr(self, role) for role in ROLES)

    def inside(self, actor: int) -> int:
        """Ranks of the trainer's world: all but rollouts that are apart."""
        return self.world(actor) - (self.rollout if self.apart else 0)

    def problems(self, critic: bool, reference: bool, reward_model: bool) -> list[str]:
        """Roles that have ranks but nothing to do, of those that a run may lack."""
        needed = {"rollout": True, "critic": critic, "reference": reference,
                  "reward_model": reward_model}
        return [f"placement.{role} is {getattr(self, role)}, but this run has no {role}; set it "
                "to 0" for role in ROLES if getattr(self, role) and not needed[role]]
