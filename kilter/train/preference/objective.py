"""The loss of a step's pairs, and what is told of them.

    scores of sequences (chosen and rejected alternate) ─► losses of pairs ─► their sum · count

A reward model's score is its value at the sequence's last token. DPO's is the log-probability of
the answer; the reference's comes from a table (`kilter.train.preference.reference`), or, where the
model is trained through adapters, from a forward pass without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from kilter.comm.axis import Axis
from kilter.comm.collectives import all_reduce_sum
from kilter.models.batch import Batch
from kilter.parallel.apply import Spread
from kilter.parallel.context.plan import all_rows, counted_once
from kilter.train.data import Pack, SampleId
from kilter.train.lora import adapters_off
from kilter.train.preference.config import DpoConfig
from kilter.train.preference.losses import bradley_terry, dpo
from kilter.train.step import Loss, MicroBatch

# (ids of pairs) -> float64 [2P]: the reference's log-probabilities, chosen and rejected by turns.
Reference = Callable[[Sequence[SampleId]], Tensor]


class PairObjective:
    """What `kilter.train.step` takes as ``losses`` where the micro-batches are packs of pairs.

    Args:
        config: DPO's; None trains a reward model.
        reference: None takes the model without its adapters.
    """

    def __init__(self, config: DpoConfig | None, reference: Reference | None = None) -> None:
        self._config, self._reference = config, reference
        self._sums = torch.zeros(len(_TOLD), dtype=torch.float64)

    def __call__(self, spread: Spread, micro_batches: Sequence[MicroBatch],
                 rows: Sequence[tuple[Batch, Tensor]]) -> Loss:
        """Collective over what a forward pass is, where the reference is one."""
        packs = cast(Sequence[Pack], micro_batches)
        references = self._references(spread, packs, rows)
        context = spread.mesh.axis("cp")

        def loss(forward: Callable[..., Tensor], k: int, count: float) -> Tensor:
            pack, (batch, targets_T) = packs[k], rows[k]
            assert pack.margins_P is not None
            if self._config is None:
                scores_S = sequence_values(all_rows(batch, forward(batch)), pack)
                chosen_P, rejected_P = scores_S[::2], scores_S[1::2]
                margin_P = pack.margins_P.to(scores_S.device)
                found = bradley_terry(chosen_P=chosen_P, rejected_P=rejected_P, margin_P=margin_P)
            else:
                scores_S = sequence_logprobs(all_rows(batch, forward(batch, targets_T)),
                                             pack)
                reference_S = references[k]
                assert reference_S is not None
                reference_S = reference_S.to(scores_S.device)
                found = dpo(
                    chosen_P=scores_S[::2], rejected_P=scores_S[1::2],
                    ref_chosen_P=reference_S[::2], ref_rejected_P=reference_S[1::2],
                    beta=self._config.beta, kind=self._config.loss,
                    label_smoothing=self._config.label_smoothing)
                gained_S = self._config.beta * (scores_S - reference_S)
                chosen_P, rejected_P = gained_S[::2], gained_S[1::2]
            if context.index == 0:  # the others have the same
                self._sums += torch.stack([x.detach().double().sum().cpu() for x in (
                    found.margins_P > 0.0, found.margins_P, chosen_P, rejected_P)])
            return counted_once(count * found.losses_P.sum(), context)

        return loss

    def take(self, pairs: int, axis: Axis) -> dict[str, float]:
        """Means over the pairs since the last call, by name; collective.

        Args:
            pairs: how many these were, over all ranks.
            axis: the ranks that had different ones, or none: ``pp_dp_cp``.
        """
        means = all_reduce_sum(self._sums, axis) / pairs
        self._sums.zero_()
        return dict(zip(_TOLD, means.tolist(), strict=True))

    def _references(self, spread: Spread, packs: Sequence[Pack],
                    rows: Sequence[tuple[Batch, Tensor]]) -> Sequence[Tensor | None]:
        if self._config is None:
            return ()
        if self._reference is not None:
            return [self._reference(pack.ids) for pack in packs]

        def score(forward: Callable[..., Tensor], k: int) -> Tensor:
            return sequence_logprobs(all_rows(rows[k][0], forward(*rows[k])), packs[k])

        with adapters_off(spread.model):
            return spread.forward_all([batch for batch, _ in rows], score)


# Mean over pairs: margins above 0, margins, and rewards of either side, which for DPO are
# beta · (log-probability − the reference's).
_TOLD = ("accuracy", "margin", "chosen_reward", "rejected_reward")


def sequence_logprobs(logprobs_T: Tensor, pack: Pack) -> Tensor:
    """float64 [2P]: sums over each sequence of the pack's pairs, which do not depend on the
    packing. Rows after the pack's are padding."""
    lengths = pack.cu_seqlens_S1.diff().tolist()
    parts = logprobs_T[: sum(lengths)].double().split(lengths)
    return torch.stack([part.sum() for part in parts])[: 2 * pack.valid]


def sequence_values(values_T: Tensor, pack: Pack) -> Tensor:
    """float64 [2P]: the value at the last token of each sequence of the pack's pairs."""
    last_S = pack.cu_seqlens_S1[1:].long() - 1
    return values_T[last_S.to(values_T.device)].double()[: 2 * pack.valid]
