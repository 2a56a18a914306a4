"""An exact forward has the same bits under every tensor-parallel degree, and under FSDP."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from bench.parity import MODELS, data
from kilter.comm.collectives import all_gather_rows
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.ops.logprob import vocab_chunk
from kilter.parallel.apply import apply
from kilter.parallel.context.plan import ContextConfig
from kilter.parallel.heads import vocab_chunks
from kilter.train.step import local_rows
from tests.ranks import RankPool


def forward(model: str, layout: Layout) -> tuple[Tensor, Tensor]:
    """(logits [T, V], log-probabilities of the targets [T]) of one micro-batch."""
    spec = MODELS[model]()
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        decoder = Decoder(spec)
    spread = apply(decoder, mesh)
    spread.initialise(seed=1, std=0.2)
    rows = data(spec.vocab_size)[0][2]
    batch = rows.batch(torch.device("cpu"))
    with torch.no_grad():
        logprobs_T = spread.forward(batch, rows.targets_T)
        if layout.zero == 3:
            spread.forward.unshard()  # type: ignore[attr-defined]  # embedding, norm and head
        logits_TV = decoder.logits(decoder.hidden(batch))
    tp = mesh.axis("tp")
    chunk = vocab_chunk(spec.vocab_size)
    rows_of = [count * chunk for count in vocab_chunks(spec.vocab_size, tp.size)]
    rows_of[-1] -= sum(rows_of) - spec.vocab_size
    logits_TV = all_gather_rows(logits_TV.t().contiguous(), tp, rows_of).t()
    return logits_TV.contiguous(), logprobs_T


def local_logprobs(model: str, layout: Layout, context: ContextConfig) -> tuple[Tensor, Tensor]:
    """(log-probabilities of this rank's rows, the rows' numbers)."""
    spec = MODELS[model]()
    mesh = Mesh(layout) if layout.world > 1 else Mesh.single()
    with torch.device("meta"):
        decoder = Decoder(spec)
    spread = apply(decoder, mesh, context=context)
    spread.initialise(seed=1, std=0.2)
    rows = data(spec.vocab_size)[0][2]
    batch, targets_T = local_rows(spread, rows, torch.device("cpu"))
    numbers = replace(rows, targets_T=torch.arange(len(rows.targets_T)))
    (found,) = spread.forward_all([batch], lambda forward, _: forward(batch, targets_T))
    assert found is not None
    return found, local_rows(spread, numbers, torch.device("cpu"))[1]


@pytest.mark.parametrize(("model", "layout", "context"), [
    ("tied", Layout(cp=2), ContextConfig("all_gather", "zigzag")),
    ("untied", Layout(cp=4), ContextConfig("all_gather", "balanced", block=8)),
    ("everything", Layout(cp=2, tp=2), ContextConfig("all_gather", "striped")),
    ("tied", Layout(cp=4), ContextConfig("ulysses", "contiguous")),
    ("everything", Layout(cp=2), ContextConfig("ulysses", "contiguous")),
], ids=str)
def test_bits_of_one_rank_with_its_rows_spread(ranks: RankPool, model: str, layout: Layout,
                                               context: ContextConfig) -> None:
    """All-gather and Ulysses keep the bits; a ring merges partial results, which rounds."""
    _, whole_T = alone(model)
    seen = torch.zeros(len(whole_T), dtype=torch.int64)
    for found_T, numbers_T in ranks.run(layout.world, local_logprobs, model, layout, context):
        there = numbers_T >= 0
        assert torch.equal(found_T[there], whole_T[numbers_T[there]])
        seen[numbers_T[there]] += 1
    assert bool((seen == layout.world // layout.cp).all())


@cache
def alone(model: str) -> tuple[Tensor, Tensor]:
    return forward(model, Layout())


@pytest.mark.parametrize(("model", "layout"), [
    ("tied", Layout(tp=2)), ("tied", Layout(tp=3)), ("tied", Layout(tp=4)),
    ("untied", Layout(tp=8)), ("untied", Layout(tp=8, sequence_parallel=False)),
    ("tied", Layout(tp=2, overlap_tp=True)), ("untied", Layout(tp=4, overlap_tp=True)),
    ("tied", Layout(tp=8, overlap_tp=True)), ("everything", Layout(tp=2, overlap_tp=True)),
    ("tied", Layout(dp=2, tp=2, zero=3)), ("tied", Layout(dp=4, zero=3)),
    ("everything", Layout(tp=2)), ("everything", Layout(tp=4, sequence_parallel=False)),
    ("smollm2", Layout(tp=2)), ("smollm2", Layout(tp=3)), ("smollm2", Layout(dp=2, zero=3)),
], ids=str)
def test_bits_of_one_rank(ranks: RankPool, model: str, layout: Layout) -> None:
    logits_TV, logprobs_T = alone(model)
    for rank_logits_TV, rank_logprobs_T in ranks.run(layout.world, forward, model, layout):
        assert torch.equal(rank_logits_TV, logits_TV)
        assert torch.equal(rank_logprobs_T, logprobs_T)
