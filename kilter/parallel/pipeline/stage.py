"""Stages: a decoder cut between layers, for the ranks of a pipeline.

    stage 0           1              last
    embed             layers.3 …     layers.9 …
    layers.0 …        layers.5       norm, head          a tied head is a copy of stage 0's embed,
    layers.2                                             see `kilter.parallel.apply.Spread`

Layers keep the names that they have in the whole model, so checkpoints, files and initial weights
need not know about stages.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.models.adapter import LowRank
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.linear import Embedding, Linear
from kilter.models.norm import RMSNorm
from kilter.models.spec import ModelSpec
from kilter.models.value import ValueModel
from kilter.ops.linear import defer_weight_grad, weight_grad
from kilter.parallel.logprobs import TokenLogprobs
from kilter.parallel.values import token_values

# Of each use of a weight: the weight, the leaf that stood for it, and the products with that.
Recorded = list[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]

TIED = "embed.weight"  # the parameter that the first and the last stage share


class Stage(TokenLogprobs):
    """A stage as a module: what comes in to what goes out, which of the last one is what
    `TokenLogprobs` gives, or, where the decoder has a value head, `token_values`."""

    def __init__(self, decoder: Decoder, tensor: Axis, sequence: bool, last: bool) -> None:
        super().__init__(decoder, tensor, sequence)
        self.last = last

    def forward(self, batch: Batch, targets_T: Tensor | None = None,
                counts_T: Tensor | None = None, *, x_TD: Tensor | None = None,
                **scoring: object) -> Tensor:
        """[T, D]; of the last stage as `TokenLogprobs.forward`, which takes the rest, or as
        `token_values`.

        Args:
            x_TD: what the stage before made; None for the first.

        Raises:
            ValueError: as they do, and if a model with a value head is given targets.
        """
        if not self.last:
            return self.decoder.hidden(batch, x_TD)
        if isinstance(self.decoder, ValueModel):
            if targets_T is not None or counts_T is not None or scoring:
                raise ValueError("This model has a value head and gives no probabilities of "
                                 "targets; call it with the batch alone.")
            return token_values(self.decoder, batch, x_TD, self._tensor, self._sequence)
        assert targets_T is not None
        return super().forward(
            batch, targets_T, counts_T, x_TD=x_TD, **scoring)  # type: ignore[arg-type]


def split_layers(spec: ModelSpec, stages: int, given: Sequence[int] | None = None
                 ) -> list[range]:
    """The layers of each stage.

    Args:
        given: layers per stage; None: the cut whose dearest stage is cheapest, a layer costing its
            matrices' elements and the head, which the last stage has, its own.

    Raises:
        ValueError: if there are fewer layers than stages or the given numbers do not add up.
    """
    layers = spec.num_layers
    if given is not None:
        if len(given) != stages or sum(given) != layers or min(given) < 1:
            raise ValueError(f"The layers per stage are {list(given)}, but there are {stages} "
                             f"stages for {layers} layers; give {stages} numbers from 1 up that "
                             f"add up to {layers}.")
        counts = list(given)
    else:
        if layers < stages:
            raise ValueError(f"A pipeline of {stages} stages needs as many layers, but this model "
                             f"has {layers}; take fewer ranks or fewer stages per rank.")
        counts = _balanced(layers, stages, head_layers(spec))
    bounds = [sum(counts[:i]) for i in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def head_layers(spec: ModelSpec) -> float:
    """What the output head costs, in layers: the ratio of their matrices' elements."""
    attention = (spec.qkv_rows + spec.num_heads * spec.head_dim) * spec.hidden_size
    layer = attention + 3 * spec.hidden_size * spec.ffn_size
    return spec.vocab_size * spec.hidden_size / layer


def _balanced(layers: int, stages: int, head: float) -> list[int]:
    """Layers per stage, at least one each: the fewest in the last that leave the others no dearer
    than it; the others as even as possible, larger ones first."""
    if stages == 1:
        return [layers]
    best = min(range(1, layers - stages + 2),
               key=lambda last: (max(last + head, -(-(layers - last) // (stages - 1))), -last))
    small, larger = divmod(layers - best, stages - 1)
    return [*(small + (i < larger) for i in range(stages - 1)), best]


def cut(model: Decoder, layers: range, first: bool, last: bool) -> Decoder:
    """A decoder of some layers of a whole one (on the meta device, already spread over tensor
    ranks); its modules are the whole one's, but for a tied head, which becomes its own."""
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.layers = nn.ModuleDict({str(i): model.layers[i] for i in layers})  # type: ignore[index]
    if not first:
        part.embed = _twin(model.embed) if last and model.spec.tied_head else _Nothing()  # type: ignore[assignment]
    if not last:
        part.norm = _Nothing()  # type: ignore[assignment]
        part.head = None
        if isinstance(part, ValueModel):
            part.value = None
    part._tables = {}
    return part


class _Nothing(nn.Module):
    """In the place of a module that another stage has."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _twin(embed: Embedding) -> Embedding:
    twin = copy.copy(embed)
    assert isinstance(embed.weight, nn.Parameter)
    twin._parameters = {"weight": nn.Parameter(torch.empty_like(embed.weight),
                                               requires_grad=embed.weight.requires_grad)}
    return twin


class DeferredGrads:
    """The gradients of a stage's weights, kept apart from that of its input.

    While `recording`, every weight on its way into a product is replaced by a leaf of its own.
    A backward pass then ends at the leaves, and leaves out the products that make the gradients of
    large matrices; `make` does these and goes on from the leaves to the parameters.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._now: Recorded | None = None
        for module in decoder.modules():
            if isinstance(module, Linear):
                module.uses = (*module.uses, self._leaf)
                module.bias_uses = (*module.bias_uses, self._leaf)
            elif isinstance(module, Embedding | RMSNorm):
                module.uses = (*module.uses, self._leaf)
            elif isinstance(module, LowRank):
                module.a_uses = (*module.a_uses, self._leaf)
                module.b_uses = (*module.b_uses, self._leaf)

    def record(self) -> Recorded:
        """From here to `stop`, forwards leave what `make` needs in this list."""
        self._now = []
        return self._now

    def stop(self) -> None:
        self._now = None

    @staticmethod
    def join(recorded: Recorded, before: Recorded) -> None:
        """After the backward pass of one forward: gradients of matrices that it made whole (an
        embedding's, a head's) join those of an earlier forward, so that one of each waits for
        `make` and not as many as there are forwards."""
        for (_, leaf, products), (_, first, _) in zip(recorded, before, strict=True):
            if leaf.grad is not None and leaf.dim() > 1 and not products:
                first.grad = leaf.grad if first.grad is None else first.grad.add_(leaf.grad)
                leaf.grad = None

    @staticmethod
    def make(recorded: Recorded) -> None:
        """Brings the gradients of one forward to the parameters; empties the list."""
        used, grads = [], []
        for weight, leaf, products in recorded:
            grad = leaf.grad
            for x_TK, dy_TN in products:
                part = weight_grad(x_TK, dy_TN).to(leaf.dtype)
                grad = part if grad is None else grad.add_(part)
            products.clear()
            used.append(weight)
            # Zeros for what has joined another: whoever counts gradients as they come finds all.
            grads.append(leaf.new_zeros(()).expand_as(leaf) if grad is None else grad)
        recorded.clear()
        torch.autograd.backward(used, grads)

    def _leaf(self, weight: Tensor) -> Tensor:
        if self._now is None or not (torch.is_grad_enabled() and weight.requires_grad):
            return weight
        leaf = weight.detach().requires_grad_()
        self._now.append((weight, leaf, defer_weight_grad(leaf)))
        return leaf
