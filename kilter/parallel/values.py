"""Values of tokens, from a decoder with a value head that is spread over ranks.

Every rank of a tensor axis gets all of them. Where sequence parallelism has spread the tokens, each
rank makes those of its own, and T numbers are exchanged instead of T · D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kilter.comm.autograd import reduce_from
from kilter.comm.axis import Axis
from kilter.models.batch import Batch
from kilter.models.value import ValueModel


def token_values(decoder: ValueModel, batch: Batch, x_TD: Tensor | None, tensor: Axis,
                 sequence: bool) -> Tensor:
    """float32 [T]: at row t the value of the state after token t.

    Args:
        x_TD: what the stage before made, in a pipeline.
        tensor: the tensor-parallel axis the decoder was spread over.
        sequence: whether it was spread with sequence parallelism.
    """
    own_T = decoder.values(decoder.hidden(batch, x_TD))
    if tensor.size == 1 or not sequence:
        return own_T
    # The loss is the same on all ranks, so each takes the gradient of its own rows and nothing is
    # to be summed. Minus zero is what every number added to it leaves as it is.
    rows = own_T.shape[0]
    before, after = (own_T.new_full((rows * ranks,), -0.0)
                     for ranks in (tensor.index, tensor.size - 1 - tensor.index))
    return reduce_from(torch.cat([before, own_T, after]), tensor)
