"""Activation recompute: what backward computes again instead of keeping.

(arXiv 1604.06174; by parts 2205.05198.) Exact kernels give a row the same bits every time, so
recompute changes no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from kilter.models.decoder import Decoder, DecoderLayer

RecomputeMode = Literal["none", "full", "selective"]
PARTS = ("attention", "mlp", "norms")


@dataclass(frozen=True)
class Recompute:
    """What is recomputed.

    Attributes:
        mode: ``none``; ``full``: whole layers, keeping only their inputs; ``selective``: the
            ``parts`` of each layer.
        every: with ``full``, every which layer (the first of each run of so many); about the
            square root of the number of layers keeps about as many inputs as activations.
        parts: of ``attention``, ``mlp`` and ``norms``.
    """

    mode: RecomputeMode = "none"
    every: int = 1
    parts: tuple[str, ...] = ("attention",)

    def __post_init__(self) -> None:
        problems = []
        if self.mode not in ("none", "full", "selective"):
            problems.append(f"mode is {self.mode!r} but must be none, full or selective")
        if self.every < 1:
            problems.append(f"every is {self.every} but must be at least 1")
        unknown = [p for p in self.parts if p not in PARTS]
        if unknown or (self.mode == "selective" and not self.parts):
            problems.append(f"parts are {list(self.parts)} but must be some of {', '.join(PARTS)}")
        for name, mode in (("every", "full"), ("parts", "selective")):
            if self.mode != mode and getattr(self, name) != getattr(Recompute, name):
                problems.append(f"{name} is set, but mode is {self.mode}; leave it out, or set "
                                f"mode to {mode}")
        if problems:
            raise ValueError(f"Recompute cannot be so: {'; '.join(problems)}.")


def apply_recompute(model: Decoder, recompute: Recompute) -> None:
    """Makes the model's layers recompute; parameters keep their names."""
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        if recompute.mode == "full" and i % recompute.every == 0:
            _recomputed(layer)
        elif recompute.mode == "selective":
            parts: dict[str, list[nn.Module | None]] = {
                "attention": [layer.attn], "mlp": [layer.mlp],
                "norms": [layer.attn_norm, layer.mlp_norm, layer.attn_post_norm,
                          layer.mlp_post_norm]}
            for part in recompute.parts:
                for module in parts[part]:
                    if module is not None:
                        _recomputed(module)


def _recomputed(module: nn.Module) -> None:
    # Only the module's own forward is wrapped: hooks around it (FSDP's) stay outside.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False,
                             preserve_rng_state=False)
