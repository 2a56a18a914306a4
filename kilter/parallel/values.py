"""Values of tokens, from a decoder with a value head that is spread over ranks.

Every rank of a tensor axis gets all of them. Where sequence parallelism has spread the tokens, each
rank makes those of its own, and T numbers are exchanged instead of T · D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilter.comm.autograd import reduce_from
from kilter.comm.axis import Axis
from kilter.models.batch import Batch
from kilter.models.value import ValueModel


class TokenValues(nn.Module):
    """A decoder with a value head as training sees it, beside `TokenLogprobs`.

    Args:
        tensor: the tensor-parallel axis the decoder was spread over.
        sequence: whether it was spread with sequence parallelism.
    """

    def __init__(self, decoder: ValueModel, tensor: Axis, sequence: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self._tensor = tensor
        self._sequence = sequence

    def forward(self, batch: Batch, *, x_TD: Tensor | None = None) -> Tensor:
        """float32 [T]: at row t the value of the state after token t.

        Args:
            x_TD: what the stage before made, in a pipeline.
        """
        return token_values(self.decoder, batch, x_TD, self._tensor, self._sequence)


def token_values(decoder: ValueModel, batch: Batch, x_TD: Tensor | None, tensor: Axis,
                 sequence: bool) -> Tensor:
    """What `TokenValues` gives."""
    own_T = decoder.values(decoder.hidden(batch, x_TD))
    if tensor.size == 1 or not sequence:
        return own_T
    # The loss is the same on all ranks, so each takes the gradient of its own rows and nothing is
    # to be summed. Minus zero is what every number added to it leaves as it is.
    rows = own_T.shape[0]
    before, after = (own_T.new_full((rows * ranks,), -0.0)
                     for ranks in (tensor.index, tensor.size - 1 - tensor.index))
    return reduce_from(torch.cat([before, own_T, after]), tensor)
