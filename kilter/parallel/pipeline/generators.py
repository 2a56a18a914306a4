"""The schedules by name: what each rank computes, in which order. The exchange is added after.

    naive        one micro-batch at a time through all stages and back
    gpipe        all forwards, then all backwards (arXiv 1811.06965)
    1f1b         a forward, a backward, as soon as there is one (arXiv 1806.03377, 2104.04473)
    interleaved  1f1b with several stages per rank, dealt out in turn (arXiv 2104.04473)
    zb-h1        1f1b with backwards in two parts, the weights' part filling gaps (arXiv 2401.10241)
    zb-v         backwards in two parts, two stages per rank in a V (arXiv 2401.10241, 2405.15362)
    dualpipe-v   half of DualPipe (arXiv 2412.19437): two stages per rank in a V, forwards of the
                 one beside backwards of the other

In a V the ranks hold the first half of the stages in order and the second half in reverse, so a
rank's first and second stage are as far from the ends of the model as each other. In every schedule
each stage meets the micro-batches in ascending order, forward and backward, so its gradients are
summed in the order of a single device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from kilter.parallel.pipeline.exchange import with_exchange
from kilter.parallel.pipeline.schedule import Action, Kind, Schedule

NAMES: tuple[str, ...] = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
_V_SHAPED = ("zb-v", "dualpipe-v")


def make_schedule(name: str, ranks: int, micro_batches: int,
                  stages_per_rank: int | None = None) -> Schedule:
    """The schedule of this name, exchange included.

    Raises:
        ValueError: listing every reason why there is no such schedule.
    """
    if name not in NAMES:
        raise ValueError(f"There is no pipeline schedule {name!r}; there are {', '.join(NAMES)}.")
    stages = default_stages(name) if stages_per_rank is None else stages_per_rank
    problems = [f"{what} is {value}, but it must be at least 1" for what, value in
                (("ranks", ranks), ("micro_batches", micro_batches)) if value < 1]
    if name == "interleaved":
        if stages < 2:
            problems.append(f"stages_per_rank is {stages}, but interleaving needs 2 or more; "
                            "with 1 the schedule is 1f1b")
        if not problems and micro_batches % ranks:
            problems.append(f"micro_batches {micro_batches} is not a multiple of the {ranks} ranks,"
                            " among which interleaving deals them out in rounds; "
                            f"{_nearest_multiples(micro_batches, ranks)} would do")
    elif stages != default_stages(name):
        problems.append(f"stages_per_rank is {stages}, but this schedule has exactly "
                        f"{default_stages(name)}")
    if name == "dualpipe-v" and micro_batches < 2 * ranks:
        problems.append(f"micro_batches is {micro_batches}, but both directions are filled only "
                        f"from twice the number of ranks up, {2 * ranks}; zb-v takes fewer")
    if problems:
        raise ValueError(f"The schedule {name} cannot be made: {'; '.join(problems)}.")
    if name in _V_SHAPED:
        placement = (*range(ranks), *reversed(range(ranks)))
    else:
        placement = tuple(stage % ranks for stage in range(stages * ranks))
    lists = tuple(_MAKERS[name](rank, ranks, micro_batches, stages) for rank in range(ranks))
    return with_exchange(Schedule(name, ranks, micro_batches, placement, lists))


def default_stages(name: str) -> int:
    """Stages per rank where a job does not say.

    Raises:
        ValueError: if there is no schedule of this name.
    """
    if name not in NAMES:
        raise ValueError(f"There is no pipeline schedule {name!r}; there are {', '.join(NAMES)}.")
    return 2 if name == "interleaved" or name in _V_SHAPED else 1


class _List:
    """A rank's actions in the making: each call appends a stage's next micro-batch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._waiting: deque[tuple[int, int]] = deque()  # I done, W not: (stage, micro-batch)

    def forward(self, stage: int) -> None:
        self.actions.append(Action(Kind.F, stage, self.forwards[stage]))
        self.forwards[stage] += 1

    def backward(self, stage: int) -> None:
        self.actions.append(Action(Kind.B, stage, self._backwards[stage]))
        self._backwards[stage] += 1

    def backward_input(self, stage: int) -> None:
        self._waiting.append((stage, self._backwards[stage]))
        self.actions.append(Action(Kind.I, stage, self._backwards[stage]))
        self._backwards[stage] += 1

    def backward_weight(self, stage: int | None = None) -> None:
        """Of the input gradient that has waited longest, at this stage or at any."""
        found = next(one for one in self._waiting if stage is None or one[0] == stage)
        self._waiting.remove(found)
        self.actions.append(Action(Kind.W, *found))

    def waiting(self, stage: int) -> int:
        return sum(one[0] == stage for one in self._waiting)


def _naive(rank: int, ranks: int, micro_batches: int, stages: int) -> tuple[Action, ...]:
    return tuple(Action(kind, rank, micro_batch) for micro_batch in range(micro_batches)
                 for kind in (Kind.F, Kind.B))


def _gpipe(rank: int, ranks: int, micro_batches: int, stages: int) -> tuple[Action, ...]:
    return tuple(Action(kind, rank, micro_batch) for kind in (Kind.F, Kind.B)
                 for micro_batch in range(micro_batches))


def _1f1b(rank: int, ranks: int, micro_batches: int, stages: int) -> tuple[Action, ...]:
    line = _List()
    for _ in range(min(ranks - 1 - rank, micro_batches)):
        line.forward(rank)
    for _ in range(micro_batches):
        if line.forwards[rank] < micro_batches:
            line.forward(rank)
        line.backward(rank)
    return tuple(line.actions)


def _interleaved(rank: int, ranks: int, micro_batches: int, stages: int) -> tuple[Action, ...]:
    mine = range(rank, stages * ranks, ranks)
    rounds = range(micro_batches // ranks)
    forwards = [stage for _ in rounds for stage in mine for _ in range(ranks)]
    backwards = [stage for _ in rounds for stage in reversed(mine) for _ in range(ranks)]
    # What the last rank needs to reach its last stage, and two more per rank before it: one that
    # it takes longer for the forward to get there, one for the backward to come back.
    warm_up = (stages - 1) * ranks + 2 * (ranks - 1 - rank)
    line = _List()
    for stage in forwards[:warm_up]:
        line.forward(stage)
    ahead = iter(forwards[warm_up:])
    for stage in backwards:
        if (following := next(ahead, None)) is not None:
            line.forward(following)
        line.backward(stage)
    return tuple(line.actions)


def _zb_h1(rank: int, ranks: int, micro_batches: int, stages: int) -> tuple[Action, ...]:
    line = _List()
    for _ in range(min(ranks - 1 - rank, micro_batches)):
        line.forward(rank)
    for step in range(micro_batches):
        if line.forwards[rank] < micro_batches:
            line.forward(rank)
        line.backward_input(rank)
        # A rank that warms up with fewer forwards may put off as many more weights' parts, so that
        # every rank holds what the first one does.
        if step >= rank:
            line.backward_weight()
    while line.waiting(rank):
        line.backward_weight()
    return tuple(line.actions)


def _zb_v(rank: int, ranks: int, micro_batches: int, stages: int) -> tuple[Action, ...]:
    first, second = rank, 2 * ranks - 1 - rank
    # The phases want this many micro-batches; of fewer, the list is that of more without the rest.
    full = max(micro_batches, 2 * ranks - 1)
    line = _List()
    for _ in range(2 * (ranks - rank) - 1):
        line.forward(first)
    for _ in range(rank):
        line.forward(second)
        line.forward(first)
    for _ in range(ranks - rank):
        line.forward(second)
        line.backward_input(second)
        line.backward_weight()
    while line.forwards[second] < full:
        if line.forwards[first] < full:
            line.forward(first)
        line.backward_input(first)
        line.backward_weight()
        line.forward(second)
        line.backward_input(second)
        line.backward_weight()
    for _ in range(rank):
        line.backward_input(first)
        line.backward_input(second)
    for _ in range(ranks - rank):
        line.backward_input(first)
        line.backward_weight(first)
    for stage in (second, first):
        while line.waiting(stage):
            line.backward_weight(stage)
    return tuple(action for action in line.actions if action.micro_batch < micro_batches)


def _dualpipe_v(rank: int, ranks: int, micro_batches: int, stages: int) -> tuple[Action, ...]:
    first, second = rank, 2 * ranks - 1 - rank
    after = ranks - 1 - rank  # ranks between this one and the turn of the V
    line = _List()
    for _ in range(2 * after):
        line.forward(first)
    for _ in range(rank + 1):
        line.forward(first)
        line.forward(second)
    for _ in range(after):
        line.backward_input(second)
        line.backward_weight()
        line.forward(second)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        # Two pairs, in each of which an executor may overlap one's exchange with the other's work.
        line.forward(first)
        line.backward(second)
        line.forward(second)
        line.backward(first)
    for _ in range(after):
        line.backward(second)
        line.forward(second)
        line.backward(first)
    for step in range(2 * (rank + 1)):  # of these the later half is split, to fill what follows
        stage = first if step % 2 else second
        if step <= rank:
            line.backward(stage)
        else:
            line.backward_input(stage)
    for _ in range(after):
        line.backward_weight()
        line.backward_input(first)
    for _ in range(rank + 1):
        line.backward_weight()
    return tuple(line.actions)


_MAKERS: dict[str, Callable[[int, int, int, int], tuple[Action, ...]]] = {
    "naive": _naive, "gpipe": _gpipe, "1f1b": _1f1b, "interleaved": _interleaved,
    "zb-h1": _zb_h1, "zb-v": _zb_v, "dualpipe-v": _dualpipe_v}


def _nearest_multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)
