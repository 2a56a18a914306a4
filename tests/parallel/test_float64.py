"""Ten steps in double: what differs between layouts is an error, not rounding."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilter.parallel.logprobs
from bench.parity import MODELS, Case, Outcome, data, owned_parts
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.init import init_weights
from kilter.models.spec import ModelSpec
from kilter.ops import stock
from kilter.parallel.apply import apply
from kilter.parallel.context.plan import ContextConfig
from kilter.parallel.pipeline.executor import PipelineConfig
from kilter.parallel.recompute import Recompute
from kilter.train.optimizer import Optimizer, OptimizerConfig
from kilter.train.step import Loss, train_step
from tests.ranks import RankPool

STEPS = 10
TOLERANCE = 1e-10
ULYSSES = ContextConfig("ulysses", "contiguous")
MUON = OptimizerConfig("muon", lr=1e-3, offload=True)
CASES = [
    Case("ddp", Layout(dp=4)),
    Case("zero 1", Layout(dp=4, zero=1), "untied"),
    Case("hsdp, zero 2", Layout(dp=4, replicate=2, zero=2)),
    Case("zero 3", Layout(dp=4, zero=3), "everything", recompute=Recompute("full", every=2)),
    Case("hsdp, zero 3", Layout(dp=4, replicate=2, zero=3)),
    Case("tp + sp", Layout(tp=3), "untied"),
    Case("tp, one KV head", Layout(tp=4, sequence_parallel=False), "everything"),
    Case("muon", Layout(dp=2, tp=2, zero=2), "everything", optimizer=MUON),
    Case("pp, tied", Layout(pp=2), pipeline=PipelineConfig("zb-v")),
    Case("cp", Layout(cp=2, zero=3), context=ULYSSES),
    Case("all", Layout(pp=2, dp=2, tp=2, zero=3), pipeline=PipelineConfig("interleaved")),
]


def rotate(x_THd: Tensor, cos_T1e: Tensor, sin_T1e: Tensor) -> Tensor:
    a, b = x_THd.chunk(2, dim=-1)
    return torch.cat((a * cos_T1e - b * sin_T1e, b * cos_T1e + a * sin_T1e), dim=-1)


def chunk_sums(logits_TV: Tensor, top_T: Tensor, chunk: int) -> Tensor:
    terms = (logits_TV - top_T[:, None]).exp()
    return torch.stack([part.sum(1) for part in terms.split(chunk, dim=1)], dim=1)


def from_sums(chosen_T: Tensor, top_T: Tensor, sums_TC: Tensor) -> tuple[Tensor, Tensor]:
    lse_T = top_T + sums_TC.sum(1).log()
    return chosen_T - lse_T, lse_T


def logprob_grad(logits_TV: Tensor, lse_T: Tensor, targets_T: Tensor, grad_T: Tensor,
                 out_TV: Tensor) -> Tensor:
    columns_V = torch.arange(logits_TV.shape[1])
    hit_TV = (targets_T[:, None] == columns_V).double()
    return out_TV.copy_(grad_T[:, None] * (hit_TV - (logits_TV - lse_T[:, None]).exp()))


def in_double(stack: ExitStack) -> None:
    """Everything that computes in float32 whatever it is given, in double; as small as this is, on
    one thread."""
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    stack.enter_context(patch.object(stock, "_rotate", rotate))
    for name, other in (("chunk_sums", chunk_sums), ("logprobs_from_sums", from_sums),
                        ("logprob_grad", logprob_grad)):
        stack.enter_context(patch.object(kilter.parallel.logprobs, name, other))


def losses(_: object, __: object, rows: list) -> Loss:
    def loss(forward, k: int, count: float) -> Tensor:  # type: ignore[no-untyped-def]
        return -(forward(*rows[k]).sum() * count)

    return loss


def decoder(spec: ModelSpec) -> Decoder:
    return Decoder(spec, exact=False, kv_dtype=torch.float64).double()


def train(case: Case) -> Outcome:
    spec = MODELS[case.model]()
    mesh = Mesh(case.layout) if case.layout.world > 1 else Mesh.single()
    with ExitStack() as stack:
        in_double(stack)
        with torch.device("meta"):
            model = decoder(spec)
        spread = apply(model, mesh, recompute=case.recompute, pipeline=case.pipeline,
                       context=case.context)
        spread.initialise(seed=1, std=0.1)
        optimizer = Optimizer(spread.held, case.optimizer, mesh.axis("dp_cp_tp"))
        dp = mesh.axis("dp")
        results = [train_step(spread, optimizer, data(spec.vocab_size, step)[0][dp.index::dp.size],
                              max_norm=0.5, losses=losses) for step in range(STEPS)]
        return Outcome([r.loss for r in results], [r.grad_norm for r in results],
                       owned_parts(spread))


@cache
def by_torch(model: str) -> Outcome:
    """One model, torch's cross entropy, clipping and AdamW."""
    spec, config = MODELS[model](), OptimizerConfig(lr=1e-3, eps=1e-6)
    with ExitStack() as stack:
        in_double(stack)
        whole = init_weights(decoder(spec), 1, 0.1)
        named = dict(whole.named_parameters())
        optimizer = torch.optim.AdamW(
            [{"params": [p for p in named.values() if p.dim() > 1]},
             {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0}],
            config.lr, config.betas, config.eps, config.weight_decay, foreach=False)
        found, norms = [], []
        for step in range(STEPS):
            packs = data(spec.vocab_size, step)[0]
            total = torch.stack([F.cross_entropy(whole(p.batch(torch.device("cpu"))), p.targets_T,
                                                 ignore_index=-100, reduction="sum")
                                 for p in packs]).sum() / sum(p.valid for p in packs)
            optimizer.zero_grad()
            total.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), 0.5)))
            optimizer.step()
            found.append(float(total.detach()))
    return Outcome(found, norms, {name: [((slice(None),) * p.dim(), p.detach())]
                                  for name, p in named.items()})


@cache
def one_device(model: str, optimizer: OptimizerConfig) -> Outcome:
    return train(Case("one", Layout(), model, optimizer=optimizer))


def assert_equal(found: list[Outcome], one: Outcome) -> None:
    for outcome in found:
        assert outcome.losses == pytest.approx(one.losses, rel=TOLERANCE)
        assert outcome.norms == pytest.approx(one.norms, rel=TOLERANCE)
    for name, [(_, whole)] in one.parts.items():
        seen = torch.zeros_like(whole)
        for outcome in found:
            for place, part in outcome.parts.get(name, []):
                assert part.dtype == torch.float64
                torch.testing.assert_close(part, whole[place], rtol=0.0, atol=TOLERANCE,
                                           msg=lambda text, name=name: f"{name}: {text}")
                seen[place] += 1
        assert bool((seen == 1).all()), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ten_steps_are_one_devices(ranks: RankPool, case: Case) -> None:
    one = (one_device(case.model, replace(case.optimizer, offload=False))
           if case.optimizer.name == "muon" else by_torch(case.model))
    assert_equal(ranks.run(case.layout.world, train, case), one)


def test_a_difference_is_seen() -> None:
    """Of a rate that is another by a ten-millionth of itself."""
    other = OptimizerConfig(lr=1e-3 * (1 + 1e-7), eps=1e-6)
    assert_equal([train(Case("same", Layout()))], by_torch("tied"))
    with pytest.raises(AssertionError):
        assert_equal([train(Case("other", Layout(), optimizer=other))], by_torch("tied"))
