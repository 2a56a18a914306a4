"""Tensor parallelism: where every parameter of a decoder lies, and the modules that work on parts.

    x ──copy──▶ qkv (heads) ─▶ attention ─▶ out ──sum──▶ residual      without sequence parallelism
    x ─gather─▶ qkv (heads) ─▶ attention ─▶ out ─scatter▶ residual     with: norms and residual
                                                                       hold T / tp tokens a rank

(arXiv 1909.08053, 2205.05198.) Sums are taken in a fixed tree, so an exact forward has the bits of
one rank. Under sequence parallelism layers can compute while their rows travel
(`kilter.parallel.overlap`). Gradients of weights that every rank holds but uses on its own part
(norms under sequence parallelism, q and k norms, shared KV heads) are summed where the weight is
used, so whatever lies around (FSDP, accumulation, pipelines) sees the true gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kilter.comm.autograd import (
    copy_to,
    gather_rows,
    reduce_from,
    scatter_rows,
    shared_rows,
    sum_grads,
)
from kilter.comm.axis import Axis
from kilter.comm.collectives import tree_all_reduce
from kilter.models.adapter import Adapter, LowRank, arrangement
from kilter.models.attention import Attention
from kilter.models.decoder import Decoder
from kilter.models.linear import Embedding, Linear, Use, through
from kilter.models.norm import RMSNorm
from kilter.models.spec import ModelSpec
from kilter.models.value import ValueHead
from kilter.ops.packed import PackedWeight
from kilter.parallel.heads import Part, out_columns, qkv_boxes, split_model
from kilter.parallel.overlap import gathered_linear, summed_linear
from kilter.parallel.shards import Box, Shard


class ColumnLinear(Linear):
    """A linear whose outputs are spread: every rank takes all of x and makes its columns of y."""

    axis: Axis
    sequence: bool
    overlap: bool

    def forward(self, x_TK: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.overlap:
            y_TN = self._overlapped(x_TK)
            return y_TN if residual is None else residual + y_TN
        return super().forward(whole_rows(x_TK, self.axis, self.sequence), residual)

    def forward_gated(self, x_TK: Tensor, activation: str) -> Tensor:
        if self.overlap:
            return self.ops.gated_activation(self._overlapped(x_TK), activation)
        return super().forward_gated(whole_rows(x_TK, self.axis, self.sequence), activation)

    def _overlapped(self, x_TK: Tensor) -> Tensor:
        weight = _plain(through(self.uses, self.weight))
        bias = None if self.bias is None else through(self.bias_uses, self.bias)
        y_TN, x_TK = gathered_linear(x_TK, weight, bias if self.adapter is None else None, self.ops,
                                     self.axis, splits=self.splits)
        if self.adapter is None:
            return y_TN
        y_TN = self.adapter(x_TK, y_TN)
        return y_TN if bias is None else y_TN + bias


class RowLinear(Linear):
    """A linear whose inputs are spread: every rank makes a part of the sum that y is."""

    axis: Axis
    sequence: bool
    overlap: bool

    def forward(self, x_TK: Tensor, residual: Tensor | None = None) -> Tensor:
        adapter = self.adapter
        weights = [through(self.uses, self.weight)]
        if isinstance(adapter, Adapter) and adapter.enabled:
            # Both sums over K in one exchange; what follows them is then any one rank's arithmetic.
            weights.append(adapter.matrix())
            both = self._sums(x_TK, weights)
            y_TN, z_TR = both.tensor_split([weights[0].shape[0]], dim=1)
            y_TN = adapter.up(z_TR, y_TN)
        else:
            y_TN = self._sums(x_TK, weights)
        if self.bias is not None:
            y_TN = y_TN + through(self.bias_uses, self.bias)
        return y_TN if residual is None else residual + y_TN

    def _sums(self, x_TK: Tensor, weights: list[Tensor | PackedWeight]) -> Tensor:
        """The products by the weights, summed over the ranks, side by side."""
        if self.overlap:
            share(x_TK.shape[0], self.axis)
            return summed_linear(x_TK, [_plain(weight) for weight in weights], self.ops, self.axis,
                                 splits=self.splits)
        parts = [self.ops.linear(x_TK, weight, None, None, splits=self.splits)
                 for weight in weights]
        return summed(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), self.axis,
                      self.sequence)


class VocabEmbedding(Embedding):
    """An embedding whose rows are spread, and the output head where that is tied to it."""

    axis: Axis
    sequence: bool
    first: int  # this rank's first vocabulary row
    vocab_size: int

    def forward(self, tokens_T: Tensor) -> Tensor:
        if tokens_T.device.type == "cpu" and tokens_T.numel():  # elsewhere a look would wait
            low, high = int(tokens_T.min()), int(tokens_T.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(f"Token id {low if low < 0 else high} is outside the vocabulary "
                                 f"of {self.vocab_size} tokens.")
        local_T = tokens_T - self.first
        mine_T = (local_T >= 0) & (local_T < self.weight.shape[0])
        x_TD = super().forward(torch.where(mine_T, local_T, 0))
        # Minus zero is what every number added to it leaves as it is.
        return summed(torch.where(mine_T[:, None], x_TD, -0.0), self.axis, self.sequence)

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, this rank's rows of V]."""
        return super().logits(whole_rows(x_TD, self.axis, self.sequence))


def _plain(weight: Tensor | PackedWeight) -> Tensor:
    assert isinstance(weight, Tensor)  # a packed one is for inference, where nothing overlaps
    return weight


def whole_rows(x_TD: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """All tokens' rows, for a product whose outputs are spread over the axis."""
    if sequence:
        return gather_rows(x_TD, axis, [x_TD.shape[0]] * axis.size)
    return copy_to(x_TD, axis)


def summed(part_TD: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """The sum of all ranks' parts: whole, or this rank's tokens of it.

    Raises:
        ValueError: if T is not a multiple of the axis under sequence parallelism.
    """
    if not sequence:
        return reduce_from(part_TD, axis)
    return scatter_rows(part_TD, axis, [share(part_TD.shape[0], axis)] * axis.size)


def share(tokens: int, axis: Axis) -> int:
    """How many of a batch's tokens each rank has under sequence parallelism.

    Raises:
        ValueError: if they cannot be shared evenly.
    """
    rows, rest = divmod(tokens, axis.size)
    if rest:
        raise ValueError(f"Sequence parallelism needs a number of tokens that is a multiple of "
                         f"{axis.name} = {axis.size}, but a batch has {tokens}; pad it or turn "
                         f"sequence parallelism off.")
    return rows


def apply_tensor(model: Decoder, axis: Axis, sharers: Axis, sequence: bool, overlap: bool = False
                 ) -> dict[str, Shard]:
    """Turns a decoder (on any device, meta too) into this rank's part of one.

    Parameters keep their names and get this rank's shapes; what they hold is to be loaded.

    Args:
        sharers: the ranks of ``axis`` that hold the same KV head (`Part.sharers`).
        sequence: spread norms and the residual over tokens.
        overlap: with ``sequence``, layers compute while their rows travel
            (`kilter.parallel.overlap`).

    Returns:
        What this rank has of every parameter, by name.
    """
    spec = model.spec
    part = split_model(spec, axis.size)[axis.index]
    shards = placements(model, part, axis.index)
    if axis.size == 1:
        return shards
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if isinstance(module, Attention):
            module.spec = part.spec
        elif isinstance(module, ValueHead):
            if sequence:
                module.uses = (partial(sum_grads, axis=axis),)
        elif isinstance(module, Linear):
            if leaf in ("out", "down"):
                _become(module, RowLinear, axis=axis, sequence=sequence, overlap=overlap,
                        splits=part.leaves)
                if sequence:
                    module.bias_uses = (partial(sum_grads, axis=axis),)
            else:
                _become(module, ColumnLinear, axis=axis, sequence=sequence, overlap=overlap)
                if leaf == "qkv" and len(part.sharers) > 1:
                    rows = part.spec.num_heads * spec.head_dim  # one group: its queries, then k, v
                    use: Use = partial(shared_rows, start=rows, axis=sharers)
                    module.uses = module.bias_uses = (use,)
            if isinstance(module.adapter, Adapter):
                _spread_adapter(module.adapter, leaf, part, axis, sharers, sequence)
        elif isinstance(module, Embedding):
            _become(module, VocabEmbedding, axis=axis, sequence=sequence, first=part.vocab[0],
                    vocab_size=spec.vocab_size)
        elif isinstance(module, RMSNorm) and (sequence or leaf in ("q_norm", "k_norm")):
            module.uses = (partial(sum_grads, axis=axis),)
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = shards[f"{path}.{name}"].local_shape
            if shape != parameter.shape:
                setattr(module, name, nn.Parameter(
                    torch.empty(shape, dtype=parameter.dtype, device=parameter.device),
                    requires_grad=parameter.requires_grad))
    return shards


def _spread_adapter(adapter: Adapter, kind: str, part: Part, axis: Axis, sharers: Axis,
                    sequence: bool) -> None:
    """Where the outputs are spread a rank has all of A and its rows of B, and knows a part of A's
    gradient. Where the inputs are, it has its columns of A and all of B, which comes after the sum:
    under sequence parallelism it works on the rank's own tokens."""
    adapter.groups, adapter.widths = arrangement(part.spec, kind)
    over_ranks: Use = partial(sum_grads, axis=axis)
    for name, projection in adapter.projections():
        if kind in ("out", "down"):
            projection.b_uses = (over_ranks,) if sequence else ()
        else:
            projection.a_uses = (over_ranks,)
            if name in ("k_proj", "v_proj"):
                projection.b_uses = (partial(sum_grads, axis=sharers),)
    if kind in ("out", "down"):
        adapter.norm_uses = (partial(tree_all_reduce, axis=axis),)


def placements(model: Decoder, part: Part, rank: int) -> dict[str, Shard]:
    """What a rank of the tensor axis has of every parameter of a whole model, by name."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found[f"{path}.{name}"] = _placement(model.spec, module, path, name,
                                                 tuple(parameter.shape), part, rank)
    return found


def _placement(spec: ModelSpec, module: nn.Module, path: str, name: str, shape: tuple[int, ...],
               part: Part, rank: int) -> Shard:
    """The table. Norms, value heads, and biases that are added after a sum, are whole on every
    rank, and the first rank's count."""
    kind, tail = path.rpartition(".")[2], shape[1:]
    zeros = (0,) * len(tail)
    if isinstance(module, LowRank):
        return _adapter_placement(spec, kind, name, shape, part, rank)
    if kind == "qkv":
        boxes = qkv_boxes(spec, part, tail)
        return Shard.of(shape, [box for box, _ in boxes], [own for _, own in boxes])
    if kind == "gate_up":
        first, count = part.ffn
        return Shard.of(shape, [Box((half + first, *zeros), (count, *tail))
                                for half in (0, spec.ffn_size)])
    if kind in ("out", "down") and name == "weight":
        first, count = out_columns(spec, part) if kind == "out" else part.ffn
        return Shard.of(shape, [Box((0, first), (shape[0], count))])
    if kind in ("embed", "head"):
        first, count = part.vocab
        return Shard.of(shape, [Box((first, *zeros), (count, *tail))])
    if isinstance(module, RMSNorm | Linear):
        return Shard.whole(shape, owned=rank == 0)
    raise ValueError(f"There is no rule for how {path}.{name} is spread over tensor-parallel "
                     f"ranks.")


def _adapter_placement(spec: ModelSpec, projection: str, name: str, shape: tuple[int, ...],
                       part: Part, rank: int) -> Shard:
    """B and the magnitude have the rows of the projection's outputs, A the columns of its inputs.
    Whole on every rank is what belongs to the side that is not spread."""
    queries, tail = out_columns(spec, part), shape[1:]
    if projection in ("o_proj", "down_proj"):
        first, count = queries if projection == "o_proj" else part.ffn
        if name == "lora_a":
            return Shard.of(shape, [Box((0, first), (shape[0], count))])
    elif name != "lora_a":
        d, zeros = spec.head_dim, (0,) * len(tail)
        runs = {"q_proj": [(*queries, True)], "gate_proj": [(*part.ffn, True)]}
        runs["up_proj"] = runs["gate_proj"]
        runs["k_proj"] = runs["v_proj"] = [(group * d, d, query == 0)
                                           for group, query, _ in part.groups]
        return Shard.of(shape, [Box((first, *zeros), (count, *tail))
                                for first, count, _ in runs[projection]],
                        [own for *_, own in runs[projection]])
    return Shard.whole(shape, owned=rank == 0)


def _become(module: nn.Module, kind: type[nn.Module], **facts: Any) -> None:
    """Changes what a module does and keeps what it holds."""
    module.__class__ = kind
    for name, value in facts.items():
        setattr(module, name, value)
