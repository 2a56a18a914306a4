"""What counts and what does not: masks over flat tokens, and sums per sequence.

A slot that does not count may hold anything, NaN included. NaN times 0 is NaN, in backward too, so
such slots are replaced before anything is computed from them, never multiplied away.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor, **others: Tensor) -> None:
    """Raises ValueError unless the mask is bool and the others, by name, have its shape."""
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(f"The mask is {mask.dtype} {list(mask.shape)} but must be bool with one "
                         "dim; were two arguments swapped?")
    for name, values in others.items():
        if values.shape != mask.shape:
            raise ValueError(f"{name} has the shape {list(values.shape)}, but the mask has "
                             f"{list(mask.shape)}; give one value per slot of the mask.")


def only(values: Tensor, mask: Tensor) -> Tensor:
    """The values where they count, and 0 elsewhere, whatever stood there; no gradient flows
    there."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def sequence_sums(values_T: Tensor, *, mask_T: Tensor, sequence_T: Tensor, num_seqs: int) -> Tensor:
    """[S] in the values' dtype: the sum over each sequence's tokens that count. With a model's
    log-probabilities and the mask of actions, a sequence's log-probability. Gradients pass.

    Args:
        sequence_T: int64 [T], the index of each token's sequence.
    """
    check_mask(mask_T, values_T=values_T, sequence_T=sequence_T)
    zeros_S = values_T.new_zeros(num_seqs)
    return zeros_S.index_add(0, sequence_T, only(values_T, mask_T))


def sequence_counts(*, mask_T: Tensor, sequence_T: Tensor, num_seqs: int) -> Tensor:
    """int64 [S]: how many tokens of each sequence count."""
    check_mask(mask_T, sequence_T=sequence_T)
    return torch.bincount(sequence_T[mask_T], minlength=num_seqs)


def sequence_means(values_T: Tensor, *, mask_T: Tensor, sequence_T: Tensor, num_seqs: int
                   ) -> Tensor:
    """[S] in the values' dtype: the mean over each sequence's tokens that count; 0 where none
    does. Gradients pass."""
    sums_S = sequence_sums(values_T, mask_T=mask_T, sequence_T=sequence_T, num_seqs=num_seqs)
    counts_S = sequence_counts(mask_T=mask_T, sequence_T=sequence_T, num_seqs=num_seqs)
    return sums_S / counts_S.clamp_min(1)


def to_tokens(values_S: Tensor, *, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """[T]: each token that counts gets its sequence's value, the others 0."""
    check_mask(mask_T, sequence_T=sequence_T)
    return only(values_S[sequence_T], mask_T)
