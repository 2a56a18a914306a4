"""A step's gradients under any layout, and one device's to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.parity import Rows
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import Spread, apply
from kilter.parallel.norm import clip_gradients, gradient_norm
from kilter.train.step import local_rows, token_loss

Parts = dict[str, list[tuple[tuple[slice, ...], Tensor]]]


@dataclass
class Gradients:
    """Of one rank: every element that it has, owned or not, with its place in the whole."""

    loss: float = 0.0  # this rank's part of the sum
    norm: float = 0.0
    largest: float = 0.0
    parts: Parts = field(default_factory=dict)


def document(tokens: Sequence[int], targets: Sequence[int] | None = None) -> Rows:
    """A micro-batch of one document; by default every next token is a target."""
    targets = [*tokens[1:], -100] if targets is None else targets
    return Rows([list(tokens)], torch.tensor(targets))


def packed(documents: Sequence[Rows]) -> Rows:
    """Documents side by side."""
    return Rows([s for d in documents for s in d.sequences],
                torch.cat([d.targets_T for d in documents]))


def spread_model(spec: ModelSpec, layout: Layout, *, frozen: str = "",
                 weights: torch.dtype = torch.float32, kv: torch.dtype = torch.float32) -> Spread:
    """A model of this rank; parameters whose name begins with ``frozen`` are."""
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        model = Decoder(spec, kv_dtype=kv)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    spread = apply(model, mesh, weights=weights)
    spread.initialise(seed=1, std=0.1)
    return spread


def backward(spread: Spread, micro_batches: Sequence[Rows], valid: int) -> float:
    """A step without the optimizer; returns this rank's part of the loss."""
    rows = [local_rows(spread, m, torch.device("cpu")) for m in micro_batches]
    total = spread.backward_all([batch for batch, _ in rows],
                                lambda forward, k: token_loss(forward, *rows[k], 1.0 / valid),
                                lambda _: nullcontext())
    spread.finish()
    return float(total)


def gradients(spec: ModelSpec, layout: Layout, micro_batches: Sequence[Rows], *,
              clip: float | None = None, frozen: str = "",
              weights: torch.dtype = torch.float32, kv: torch.dtype = torch.float32) -> Gradients:
    """The gradient of the mean loss over all the targets, in this rank. Data-parallel ranks take
    turns with the micro-batches."""
    spread = spread_model(spec, layout, frozen=frozen, weights=weights, kv=kv)
    mesh = spread.mesh
    found = Gradients()
    mine = micro_batches[mesh.axis("dp").index::mesh.axis("dp").size]
    found.loss = backward(spread, mine, sum(m.valid for m in micro_batches))
    found.norm = gradient_norm(spread.held, mesh.axis("world"))
    found.largest = gradient_norm(spread.held, mesh.axis("world"), float("inf"))
    if clip is not None:
        clip_gradients(spread.held, found.norm, clip)
    for h in spread.held:
        assert h.tensor.grad is not None, h.name
        found.parts[h.name] = [(box.slices, part.clone())
                               for box, _, part in h.shard.parts(h.tensor.grad)]
    return found


def assert_same(found: Sequence[Gradients], one: Gradients, tolerance: float = 1e-6) -> None:
    """All ranks' elements are one device's, all of its are somewhere, and the ranks agree."""
    largest = one.largest
    assert {(g.norm, g.largest) for g in found} == {(found[0].norm, found[0].largest)}
    assert abs(found[0].norm - one.norm) <= tolerance * one.norm
    assert abs(found[0].largest - largest) <= tolerance * largest
    for name, [(_, whole)] in one.parts.items():
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for rank in found:
            for place, part in rank.parts[name]:
                covered[place] = True
                torch.testing.assert_close(part, whole[place], rtol=tolerance,
                                           atol=tolerance * max(largest, 1e-3),
                                           msg=lambda text, name=name: f"{name}: {text}")
        assert bool(covered.all()), name
