"""Flat steps for the tests of advantages and losses, and the golden numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Step:
    """T tokens of S sequences of some groups, with gaps in the mask."""

    mask_T: Tensor
    sequence_T: Tensor
    group_S: Tensor
    num_seqs: int

    @staticmethod
    def of(masks: Sequence[Sequence[int]], groups: Sequence[int] | None = None) -> Step:
        """From each sequence's mask; every sequence a group of its own unless said."""
        lengths = torch.tensor([len(mask) for mask in masks])
        return Step(torch.tensor([bool(x) for mask in masks for x in mask]),
                    torch.repeat_interleave(torch.arange(len(masks)), lengths),
                    torch.arange(len(masks)) if groups is None else torch.tensor(groups),
                    len(masks))

    @staticmethod
    def random(seed: int, seqs: int = 8, group: int = 4) -> Step:
        """A prompt of one or two tokens, then 1 to 9 tokens of which about one in four is none of
        ours; the last one is."""
        chance = torch.Generator().manual_seed(seed)
        masks = []
        for _ in range(seqs):
            prompt, rest = (int(torch.randint(1, n, (), generator=chance)) for n in (3, 10))
            answer = torch.rand(rest, generator=chance) < 0.75
            answer[-1] = True
            masks.append([0] * prompt + answer.int().tolist())
        return Step.of(masks, [s // group for s in range(seqs)])

    @property
    def num_tokens(self) -> int:
        return self.mask_T.shape[0]

    def values(self, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
        """Random values, NaN where the mask is False."""
        chance = torch.Generator().manual_seed(seed)
        x_T = scale * torch.randn(self.num_tokens, generator=chance, dtype=torch.float64)
        return torch.where(self.mask_T, x_T, math.nan).to(dtype)

    def tokens_of(self, seqs: Sequence[int]) -> Tensor:
        """int64: the flat indices of these sequences' tokens."""
        return torch.cat([(self.sequence_T == s).nonzero()[:, 0] for s in seqs])

    def part(self, seqs: Sequence[int]) -> Step:
        """The step that only has these sequences."""
        rows = self.tokens_of(seqs)
        lengths = torch.tensor([int((self.sequence_T == s).sum()) for s in seqs])
        return Step(self.mask_T[rows], torch.repeat_interleave(torch.arange(len(seqs)), lengths),
                    self.group_S[list(seqs)], len(seqs))

    def actions(self, seq: int) -> list[int]:
        """The flat indices of a sequence's tokens that count."""
        return [t for t in range(self.num_tokens)
                if int(self.sequence_T[t]) == seq and bool(self.mask_T[t])]


def leaf(values: Tensor) -> Tensor:
    return values.detach().clone().requires_grad_()


def gradient(loss: Tensor, by: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, by)
    return found
