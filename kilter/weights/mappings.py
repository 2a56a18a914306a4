"""How one parameter of ours is made from tensors of a file, and exactly back.

Every mapping is the same statement: our rows are, in order, these rows of those source tensors.
A subclass only lists the `pieces`; reading whole, reading a slice, and the inverse follow from
the list, so they cannot disagree.

    FusedQKV, one KV group of R query heads:      GatedMLP:
      ours      source                              ours     source
      R·d rows  q[g·R·d : (g+1)·R·d]                F rows   gate[0 : F]
      d rows    k[g·d : (g+1)·d]                    F rows   up[0 : F]
      d rows    v[g·d : (g+1)·d]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.ops.packed import QuantTensor

Weight = Tensor | QuantTensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Rows start, start+step, … (count of them) of one source tensor."""

    source: str
    start: int
    count: int
    step: int = 1

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + (self.count - 1) * self.step + 1, self.step)


class ParameterMap:
    """One parameter of ours and the source tensors it is made of.

    Attributes:
        name: our parameter's name.
        shape: our shape.
        sources: source tensor names and the shapes they must have.
        aliases: source tensors that may be present as exact copies of ``sources``' only tensor.
    """

    def __init__(self, name: str, shape: Shape, sources: dict[str, Shape],
                 pieces: Sequence[Piece]) -> None:
        self.name, self.shape, self.sources = name, shape, sources
        self.aliases: dict[str, Shape] = {}
        self._pieces = tuple(pieces)

    def pieces(self, start: int = 0, stop: int | None = None) -> list[Piece]:
        """The source rows that make up our rows [start, stop), in our order."""
        stop = self.shape[0] if stop is None else stop
        found, row = [], 0
        for piece in self._pieces:
            low, high = max(start - row, 0), min(stop - row, piece.count)
            if low < high:
                found.append(Piece(piece.source, piece.start + low * piece.step, high - low,
                                   piece.step))
            row += piece.count
        return found

    def read(self, read: Callable[[str, slice], Weight], start: int = 0,
             stop: int | None = None) -> Weight:
        """Our rows [start, stop); `read(source, rows)` is asked for just the rows it needs.

        The result has the format that the whole parameter has (see `common_format`), whichever
        rows are asked for.
        """
        whole = start == 0 and stop in (None, self.shape[0])
        if whole:
            return self.to_kilter({source: read(source, slice(None)) for source in self.sources})
        to = common_format([format_of(read(source, slice(0, 0))) for source in self.sources])
        parts = [convert(read(p.source, p.rows), to) for p in self.pieces(start, stop)]
        if not parts:
            parts = [convert(read(next(iter(self.sources)), slice(0, 0)), to)]
        return self._inward(concatenate(parts))

    def to_kilter(self, tensors: Mapping[str, Weight]) -> Weight:
        """Our parameter from whole source tensors of any format."""
        to = common_format([format_of(tensors[source]) for source in self.sources])
        whole = {source: convert(tensors[source], to) for source in self.sources}
        if len(self._pieces) == 1:
            return self._inward(whole[self._pieces[0].source])
        return self._inward(concatenate([rows(whole[p.source], p.rows) for p in self._pieces]))

    def to_source(self, weight: Weight) -> dict[str, Weight]:
        """The source tensors, exactly as they were when their formats agreed."""
        weight = self._outward(weight)
        if len(self._pieces) == 1:
            return {self._pieces[0].source: weight}
        # For each source, which of our rows is its row 0, 1, 2, …
        order = {source: torch.empty(shape[0], dtype=torch.int64)
                 for source, shape in self.sources.items()}
        row = 0
        for piece in self._pieces:
            order[piece.source][piece.rows] = torch.arange(row, row + piece.count)
            row += piece.count
        return {source: rows(weight, index) for source, index in order.items()}

    def _inward(self, weight: Weight) -> Weight:
        return weight

    def _outward(self, weight: Weight) -> Weight:
        return weight


class Rename(ParameterMap):
    """The same tensor under another name."""

    def __init__(self, name: str, source: str, shape: Shape) -> None:
        super().__init__(name, shape, {source: shape}, [Piece(source, 0, shape[0])])


class TiedHead(Rename):
    """The embedding of a model whose output head is the embedding.

    Files may hold the head as a second, equal tensor (`aliases`); a different one is an error
    that `ModelSource.check` reports.
    """

    def __init__(self, name: str, source: str, head: str, shape: Shape) -> None:
        super().__init__(name, source, shape)
        self.aliases = {head: shape}


class PlusOne(Rename):
    """A norm weight that the file stores as fp32(1 + w) while ours is w (Gemma in GGUF).

    ``fp32(1 + w)`` minus one is exact for stored values of at least 0.5, and then 1 + w is again
    the stored value; below, w is rounded by at most 2**-25 of its magnitude. Every weight of the
    published Gemma 3 270M file comes back exactly.
    """

    def _inward(self, weight: Weight) -> Weight:
        return dense(weight).to(torch.float32) - 1.0

    def _outward(self, weight: Weight) -> Weight:
        return dense(weight).to(torch.float32) + 1.0


class FusedQKV(ParameterMap):
    """Query, key and value projections (weights or biases) interleaved by KV group.

    Args:
        name: our parameter, rows ``[q_0 … q_{R-1}, k, v]`` for each of the G groups.
        q, k, v: source names with H·d, G·d and G·d rows, H = G·R.
        tail: the shape behind the rows: ``(D,)`` for weights, ``()`` for biases.
        interleaved: the source stores each head of q and k as GGUF's llama does: rows for a rope
            that pairs neighbours, (0, d/2, 1, d/2 + 1, …) of the half-split order that ours and
            Hugging Face's have.
    """

    def __init__(self, name: str, q: str, k: str, v: str, *, groups: int, queries: int,
                 head_dim: int, tail: Shape, interleaved: bool = False) -> None:
        def heads(source: str, first: int, count: int) -> Iterable[Piece]:
            start = first * head_dim
            if not interleaved or source == v:
                return [Piece(source, start, count * head_dim)]
            return [Piece(source, start + head * head_dim + half, head_dim // 2, 2)
                    for head in range(count) for half in (0, 1)]

        pieces = [piece for g in range(groups)
                  for source, first, count in ((q, g * queries, queries), (k, g, 1), (v, g, 1))
                  for piece in heads(source, first, count)]
        kv = (groups * head_dim, *tail)
        super().__init__(name, (groups * (queries + 2) * head_dim, *tail),
                         {q: (groups * queries * head_dim, *tail), k: kv, v: kv}, pieces)


class GatedMLP(ParameterMap):
    """Gate and up projections (weights or biases), stacked ``[gate; up]``."""

    def __init__(self, name: str, gate: str, up: str, *, ffn: int, tail: Shape) -> None:
        half = (ffn, *tail)
        super().__init__(name, (2 * ffn, *tail), {gate: half, up: half},
                         [Piece(gate, 0, ffn), Piece(up, 0, ffn)])


@dataclass(frozen=True)
class Quant:
    """The format of a `QuantTensor`: everything two of them must share to be concatenated."""

    bits: int
    group: int
    has_min: bool


Format = torch.dtype | Quant


def format_of(weight: Weight) -> Format:
    if isinstance(weight, QuantTensor):
        return Quant(weight.bits, weight.group, weight.min is not None)
    return weight.dtype


def common_format(formats: Sequence[Format]) -> Format:
    """The smallest format that holds every one of `formats` without loss.

    Quantised formats that differ meet in 8 bits (a 4-bit q is also an 8-bit q), and without a
    min also across groups (a scale of 32 weights is two equal scales of 16). Dense ones meet in
    the promoted dtype, everything else in float32: beside a min, Q6_K's 18-bit scales times an
    8-bit q would not be exact, which the packed kernels rely on.
    """
    quants = [f for f in formats if isinstance(f, Quant)]
    dtypes = [f for f in formats if not isinstance(f, Quant)]
    if not quants:
        common = dtypes[0]
        for dtype in dtypes[1:]:
            common = torch.promote_types(common, dtype)
        return common
    if dtypes:
        return torch.float32
    if all(f == quants[0] for f in quants):
        return quants[0]
    has_min, groups = any(f.has_min for f in quants), {f.group for f in quants}
    if has_min and len(groups) > 1:
        return torch.float32
    return Quant(8, min(groups), has_min)


def convert(weight: Weight, to: Format) -> Weight:
    """`weight` in a format that holds it without loss, bit for bit the same values."""
    if isinstance(to, torch.dtype):
        return dense(weight).to(to)
    if format_of(weight) == to:
        return weight
    assert isinstance(weight, QuantTensor)
    scale, low = weight.scale, weight.min
    if to.has_min and low is None:
        low = torch.full_like(scale, -0.0)  # x + -0.0 is x for every x, +0.0 and -0.0 included
    repeat = weight.group // to.group
    if repeat > 1:
        scale = scale.repeat_interleave(repeat, dim=1)
        low = None if low is None else low.repeat_interleave(repeat, dim=1)
    return QuantTensor(weight.q, scale, low, to.bits, to.group)


def concatenate(weights: Sequence[Weight]) -> Weight:
    """Rows of several weights of one format under each other."""
    if len(weights) == 1:
        return weights[0]
    quants = [w for w in weights if isinstance(w, QuantTensor)]
    if not quants:
        return torch.cat([w for w in weights if isinstance(w, Tensor)])
    lows = [w.min for w in quants if w.min is not None]
    return QuantTensor(torch.cat([w.q for w in quants]), torch.cat([w.scale for w in quants]),
                       torch.cat(lows) if lows else None, quants[0].bits, quants[0].group)


def rows(weight: Weight, index: Tensor | slice) -> Weight:
    return weight.rows(index) if isinstance(weight, QuantTensor) else weight[index]


def dense(weight: Weight) -> Tensor:
    """The weight as a Tensor: its own dtype, or float32 where it is quantised."""
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight

