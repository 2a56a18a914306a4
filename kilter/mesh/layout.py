"""`Layout`: how work is spread over ranks, as numbers. No process group is needed to ask it.

The world is a box, seen in two ways. Each pipeline stage holds the same ranks in both views, so an
expert's group never leaves its stage:

    dense    world = pp · (dp · cp · tp)        dp  = replicate  · shard
    expert   world = pp · (edp · ep · etp)      edp = ereplicate · eshard

    a stage of dp 2 · cp 1 · tp 4, seen as edp 2 · ep 2 · etp 2:

        rank in the stage   0  1  2  3  4  5  6  7
        tp                  0  1  2  3  0  1  2  3
        dp                  0  0  0  0  1  1  1  1
        etp                 0  1  0  1  0  1  0  1
        ep                  0  0  1  1  0  0  1  1
        edp                 0  0  0  0  1  1  1  1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kilter.models.spec import ModelSpec

# In the expert view, these stand where tp, cp and dp stand in the dense one.
_EXPERT = {"tp": "etp", "cp": "ep", "dp": "edp"}
_HALVES = {"dp": ("shard", "replicate"), "edp": ("eshard", "ereplicate")}
_DENSE_ONLY = {"tp", "cp", "dp", "shard", "replicate"}
_EXPERT_ONLY = {"etp", "ep", "edp", "eshard", "ereplicate"}
AXES = ("pp", "dp", "replicate", "shard", "cp", "tp", "edp", "ereplicate", "eshard", "ep", "etp")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and which ranks they mean.

    ``replicate`` 0 is replaced by its meaning, dp where ``zero`` is 0 and else 1;
    ``sequence_parallel`` None by ``tp > 1``.

    Raises:
        ValueError: at construction, listing everything that makes the degrees no layout.
    """

    pp: int = 1  # pipeline stages
    dp: int = 1  # data parallel: replicate x shard
    replicate: int = 0  # copies of the sharded state (hybrid sharding if more than 1)
    zero: int = 0  # sharded over shard x cp: 1 optimizer states, 2 + gradients, 3 + parameters
    cp: int = 1  # context parallel: rows of a sequence
    tp: int = 1  # tensor parallel
    ep: int = 1  # expert parallel: whole experts
    etp: int = 1  # tensor parallel inside an expert
    sequence_parallel: bool | None = None  # rows between tensor-parallel blocks lie on tp ranks
    overlap_tp: bool = False  # tensor-parallel layers compute while their rows travel
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")  # fastest-varying axis first

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        problems = [f"{name} is {value}, but a degree is a whole number from 1 up"
                    for name in ("pp", "dp", "cp", "tp", "ep", "etp")
                    if not isinstance(value := getattr(self, name), int) or value < 1]
        if self.zero not in (0, 1, 2, 3):
            problems.append(f"zero is {self.zero}; it is 0 (nothing sharded), 1 (optimizer "
                            "states), 2 (and gradients) or 3 (and parameters)")
        if sorted(self.order) != ["cp", "dp", "pp", "tp"]:
            problems.append(f"order is {'-'.join(self.order)}; it must name tp, cp, dp and pp "
                            "once each, the fastest first")
        if not problems:
            if not self.replicate:
                object.__setattr__(self, "replicate", 1 if self.zero else self.dp)
            if self.sequence_parallel is None:
                object.__setattr__(self, "sequence_parallel", self.tp > 1)
            problems = self._product_problems() + self._overlap_problems()
        if problems:
            raise ValueError(_sentence("These degrees make no layout", problems))

    def _product_problems(self) -> list[str]:
        problems = []
        if self.replicate < 1 or self.dp % self.replicate:
            problems.append(f"replicate {self.replicate} does not divide dp {self.dp}; it may be "
                            f"{_listing(divisors(self.dp))}")
        elif self.zero == 0 and self.replicate != self.dp:
            problems.append(f"with zero 0 every rank keeps whole states, so replicate must be dp "
                            f"({self.dp}), not {self.replicate}; set zero to 1, 2 or 3 to shard "
                            f"them over {self.dp // self.replicate} ranks, or leave replicate out")
        stage = self.dp * self.cp * self.tp
        if stage % (self.ep * self.etp):
            fits = [ep for ep in divisors(stage) if stage % (ep * self.etp) == 0]
            fix = (f"with etp {self.etp}, ep may be {_listing(fits)}" if fits
                   else f"etp must be one of {_listing(divisors(stage))}")
            problems.append(f"ep {self.ep} · etp {self.etp} = {self.ep * self.etp} does not divide "
                            f"the {stage} ranks of a stage (dp {self.dp} · cp {self.cp} · tp "
                            f"{self.tp}); {fix}")
        elif self.zero and self.edp % self.replicate:
            problems.append(f"replicate {self.replicate} does not divide edp {self.edp} (dp "
                            f"{self.dp} · cp {self.cp} · tp {self.tp} / ep {self.ep} / etp "
                            f"{self.etp}), so experts cannot be sharded in as many copies; "
                            f"replicate may be {_listing(divisors(math.gcd(self.edp, self.dp)))}")
        return problems

    def _overlap_problems(self) -> list[str]:
        if not self.overlap_tp:
            return []
        if self.tp == 1:
            return ["overlap_tp is set, but tp is 1, so there is nothing to overlap; leave it out, "
                    "or set tp"]
        if not self.sequence_parallel:
            return [f"overlap_tp is set, but without sequence_parallel the {self.tp} ranks hold "
                    "all rows and there are none to wait for; leave out one of the two settings"]
        return []

    # Sizes

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """Data-parallel ranks that share one copy of the sharded state; 1 with zero 0."""
        return self.dp // self.replicate

    @property
    def edp(self) -> int:
        """Ranks that hold the same part of the same experts: ``dp · cp · tp / (ep · etp)``."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def ereplicate(self) -> int:
        """Copies of the experts' sharded state: as many as of the dense one, or all of edp."""
        return self.replicate if self.zero else self.edp

    @property
    def eshard(self) -> int:
        return self.edp // self.ereplicate

    def size(self, axis: str | Iterable[str]) -> int:
        """Ranks in a group of `groups`."""
        return math.prod(getattr(self, name) for name in self.parts(axis))

    def __str__(self) -> str:
        text = f"pp {self.pp} · dp {self.dp} · cp {self.cp} · tp {self.tp}"
        if self.ep * self.etp > 1:
            text += f" (edp {self.edp} · ep {self.ep} · etp {self.etp})"
        if self.zero:
            text += f", ZeRO-{self.zero} over {self.shard * self.cp}"
            if self.replicate > 1:
                text += f" in {self.replicate} copies"
        return text

    # Ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis of both views.

        Raises:
            ValueError: if there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"There is no rank {rank} in a layout of {self.world} ranks ({self}).")
        found = _digits(rank, self._order())
        found |= _digits(_number(found, self._stage_order()), self._expert_order())
        for whole, (inner, outer) in _HALVES.items():
            found[outer], found[inner] = divmod(found[whole], getattr(self, inner))
        return {name: found[name] for name in AXES}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates of one view; axes left out count as 0. Of a whole answer
        of `coordinates`, the dense view is read.

        Raises:
            ValueError: if an axis is unknown or a coordinate lies outside its axis.
        """
        for name, value in coordinates.items():
            if name not in AXES:
                raise ValueError(f"There is no axis {name!r}; the axes are {_listing(AXES)}.")
            if not 0 <= value < getattr(self, name):
                raise ValueError(f"{name} is {value}, but that axis has {getattr(self, name)} "
                                 f"places, from 0 ({self}).")
        at = dict(coordinates)
        for whole, (inner, outer) in _HALVES.items():
            if inner in at or outer in at:
                at[whole] = at.get(outer, 0) * getattr(self, inner) + at.get(inner, 0)
        if not _DENSE_ONLY & at.keys():
            at |= _digits(_number(at, self._expert_order()), self._stage_order())
        return _number(at, self._order())

    def groups(self, axis: str | Iterable[str]) -> list[list[int]]:
        """The groups of ranks that differ on this axis alone, or on these axes of one view alone.

        Every rank is in one group; ranks in a group and groups among themselves ascend.

        Raises:
            ValueError: if an axis is unknown, or two are of different views.
        """
        parts = self.parts(axis)
        view = {"pp", *(_EXPERT_ONLY if _EXPERT_ONLY & parts else _DENSE_ONLY)} - _HALVES.keys()
        fixed = sorted(view - parts)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            groups.setdefault(tuple(at[name] for name in fixed), []).append(rank)
        return sorted(groups.values())

    def parts(self, axis: str | Iterable[str]) -> set[str]:
        """These axes, with dp and edp as the two that each is made of.

        Raises:
            ValueError: if an axis is unknown, or two are of different views.
        """
        names = [axis] if isinstance(axis, str) else list(axis)
        for name in names:
            if name not in AXES:
                raise ValueError(f"There is no axis {name!r}; the axes are {_listing(AXES)}.")
        parts = {part for name in names for part in _HALVES.get(name, (name,))}
        dense, expert = sorted(parts & _DENSE_ONLY), sorted(parts & _EXPERT_ONLY)
        if dense and expert:
            raise ValueError(f"{_listing(dense)} and {_listing(expert)} are axes of different "
                             "views of the ranks; no group is made of both.")
        return parts

    def _order(self) -> list[tuple[str, int]]:
        """(axis, size), fastest first: of the dense view, ..."""
        return [(name, getattr(self, name)) for name in self.order]

    def _stage_order(self) -> list[tuple[str, int]]:
        """... of a stage in the dense view, whose numbers follow the ranks', ..."""
        return [(name, getattr(self, name)) for name in self.order if name != "pp"]

    def _expert_order(self) -> list[tuple[str, int]]:
        """... and of a stage in the expert view."""
        return [(_EXPERT[name], getattr(self, _EXPERT[name])) for name in self.order
                if name != "pp"]

    # Whether it fits

    def check(self, world: int, spec: ModelSpec | None = None) -> None:
        """That these ranks can hold this layout, and the model has as many parts as it asks for.
        (Where exactly a tensor-parallel cut may lie is known to `kilter.parallel`.)

        Raises:
            ValueError: listing every reason why not, with what would do.
        """
        problems = []
        if world != self.world:
            rest = self.pp * self.cp * self.tp
            fix = (f"with the other degrees as they are, dp {world // rest} fits"
                   if world % rest == 0 else
                   f"pp · cp · tp = {rest} must be one of {_listing(divisors(world))}")
            problems.append(f"it has pp {self.pp} · dp {self.dp} · cp {self.cp} · tp {self.tp} = "
                            f"{self.world} ranks, but there are {world}: {fix}")
        if spec is not None:
            if self.pp > spec.num_layers:
                problems.append(f"pp {self.pp} asks for more stages than the model's "
                                f"{spec.num_layers} layers")
            if self.tp > spec.virtual_shards:
                problems.append(
                    f"tp {self.tp} is more than the {spec.virtual_shards} parts that this model's "
                    f"sums are cut in ({spec.num_heads} heads, {spec.num_kv_heads} KV heads, "
                    f"feed-forward width {spec.ffn_size}); tp may be at most "
                    f"{spec.virtual_shards}")
        if problems:
            raise ValueError(_sentence("This layout does not fit", problems))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _digits(number: int, order: list[tuple[str, int]]) -> dict[str, int]:
    """A number in the mixed radix of these axes, fastest first."""
    found = {}
    for name, size in order:
        number, found[name] = divmod(number, size)
    return found


def _number(digits: Mapping[str, int], order: list[tuple[str, int]]) -> int:
    """The inverse of `_digits`; axes without a digit count as 0."""
    number = 0
    for name, size in reversed(order):
        number = number * size + digits.get(name, 0)
    return number


def _listing(values: Iterable[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _sentence(start: str, problems: list[str]) -> str:
    return f"{start}: {'; '.join(problems)}."
