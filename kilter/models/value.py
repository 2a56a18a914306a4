"""A value head in the place of the output head: one number for the state after each token. What
reward models are (the number at a sequence's last token) and critics.

    with torch.device("meta"):
        model = Decoder(spec)
    add_value_head(model)               # after adapters, before `kilter.parallel.apply.apply`
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.linear import Linear
from kilter.ops import Ops


class ValueHead(Linear):
    """x W^T, W [1, D], float32, without a bias. It starts at zero, so that every value does."""

    def __init__(self, hidden_size: int, ops: Ops) -> None:
        super().__init__(hidden_size, 1, False, ops)


class ValueModel(Decoder):
    """A decoder that gives values; `add_value_head` makes one. Its spec's ``tied_head`` is False:
    nothing else is computed with the embedding."""

    value: ValueHead | None  # None in a pipeline's stages but the last

    def values(self, x_TD: Tensor) -> Tensor:
        """float32 [T], of hidden rows from `hidden`."""
        assert self.value is not None
        return self.value(x_TD)[:, 0]

    def logits(self, x_TD: Tensor) -> Tensor:
        raise ValueError("This model has a value head and no output head, so it gives no "
                         "probabilities of tokens; ask for its values.")

    def forward(self, batch: Batch) -> Tensor:
        """Values of every token, [T]."""
        return self.values(self.hidden(batch))


def add_value_head(model: Decoder) -> ValueModel:
    """Turns a decoder (whole, on any device, meta too) into one with an uninitialised value head,
    the parameter ``value.weight``, and without its output head; returns it.

    Raises:
        ValueError: if it has a value head already.
    """
    if isinstance(model, ValueModel):
        raise ValueError("This model has a value head already; start from one without.")
    model.__class__ = ValueModel
    made = cast(ValueModel, model)
    made.value = ValueHead(model.spec.hidden_size, model.ops).to(model.norm.weight.device)
    made.head = None
    made.spec = replace(model.spec, tied_head=False)
    return made
