"""A whole decoder over context-parallel ranks computes what one device does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.parity import MODELS
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.parallel.context.plan import ContextConfig, spread_batch
from tests.ranks import RankPool

ONE = ContextConfig()
CONFIGS = [ContextConfig("ring", "contiguous"), ContextConfig("ring", "zigzag"),
           ContextConfig("ring", "striped"), ContextConfig("ulysses", "contiguous"),
           ContextConfig("all_gather", "contiguous"), ContextConfig("all_gather", "zigzag"),
           ContextConfig("all_gather", "striped"), ContextConfig("all_gather", "balanced", block=8)]
KEEP_BITS = CONFIGS[3:]


@dataclass(frozen=True)
class Pass:
    """A forward and backward: a model, documents of token ids, and which tokens have no label."""

    model: str
    documents: tuple[tuple[int, ...], ...]
    masked: tuple[int, ...] = ()
    multiple: int = 1
    kv_dtype: torch.dtype = torch.float32

    @property
    def labels_T(self) -> Tensor:
        labels = [t for d in self.documents for t in (*d[1:], -100)]
        for i in self.masked:
            labels[i] = -100
        return torch.tensor(labels)


def document(length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 31 + 7 * i + i * i // 5) % 190 for i in range(length))


MIXED = (document(41, 1), document(3, 2), document(1, 3), document(22, 4))
PASSES = [Pass("tied", MIXED), Pass("untied", MIXED, multiple=4),
          Pass("everything", MIXED, kv_dtype=torch.bfloat16)]


def model(name: str, kv_dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(replace(MODELS[name](), max_positions=64), kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.15, generator=generator)
            if parameter.dim() == 1 and not decoder.spec.norm_zero_centred:
                parameter.add_(1.0)
    return decoder


def logits(decoder: Decoder, documents: Sequence[Sequence[int]], config: ContextConfig,
           multiple: int = 1) -> Tensor:
    """[T, V], gathered on all ranks."""
    axis = _axis()
    local = spread_batch(Batch.of(documents), axis, config, multiple)
    with torch.no_grad():
        mine = decoder(local.batch)
    parts: list[Tensor | None] = [mine]
    if axis.size > 1:
        parts = [None] * axis.size
        dist.all_gather_object(parts, mine)
    return local.placement.whole([part for part in parts if part is not None])


def loss_and_grads(passes: Sequence[Pass], config: ContextConfig,
                   ) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """(logits, loss, gradients) of each; sums over ranks are taken by hand."""
    found = []
    for one in passes:
        axis = _axis()
        decoder = model(one.model, one.kv_dtype)
        local = spread_batch(Batch.of(one.documents), axis, config, one.multiple)
        targets_T = local.local(one.labels_T, -100)
        valid = int((one.labels_T >= 0).sum())
        counts_T = torch.full(targets_T.shape, 1.0 / valid)
        counts_T[targets_T < 0] = 0.0
        loss, _ = decoder.ops.head_loss(decoder.hidden(local.batch),
                                        (decoder.head or decoder.embed).weight,
                                        targets_T.clamp(min=0), counts_T)
        loss.backward()
        grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
        total = loss.detach().clone()
        if axis.size > 1:
            dist.all_reduce(total)
            for grad in grads.values():
                dist.all_reduce(grad)
        found.append((logits(decoder, one.documents, config, one.multiple), total, grads))
    return found


def _axis():  # type: ignore[no-untyped-def]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Mesh.single().axis("cp")
    return Mesh(Layout(cp=dist.get_world_size())).axis("cp")


@cache
def alone(passes: tuple[Pass, ...]) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    return loss_and_grads(passes, ONE)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_loss_and_gradients(ranks: RankPool, config: ContextConfig, n: int) -> None:
    passes = PASSES if n == 2 else PASSES[:1] + PASSES[2:]
    for rank in ranks.run(n, loss_and_grads, passes, config):
        for one, found, expected in zip(passes, rank, alone(tuple(passes)), strict=True):
            if config in KEEP_BITS:
                assert torch.equal(found[0], expected[0]), one.model
            # Where bits are not kept, keys may be rounded to another side.
            tolerance = 1e-5 if one.kv_dtype == torch.float32 or config in KEEP_BITS else 2e-3
            scale = max(float(grad.abs().max()) for grad in expected[2].values())
            torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=0.0)
            assert found[2].keys() == expected[2].keys()
            for name, grad in expected[2].items():
                torch.testing.assert_close(
                    found[2][name], grad, rtol=tolerance, atol=tolerance * scale,
                    msg=lambda text, name=name, one=one: f"{name} of {one.model}: {text}")


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[5]], ids=str)
def test_labels_on_the_second_half_only(ranks: RankPool, config: ContextConfig, n: int) -> None:
    """Some ranks may have no label at all; a mean of means would show."""
    one = Pass("tied", (document(48, 5),), masked=tuple(range(24)))
    expected = alone((one,))[0]
    for [found] in ranks.run(n, loss_and_grads, [one], config):
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0.0)
        for name, grad in expected[2].items():
            torch.testing.assert_close(found[2][name], grad, rtol=1e-5, atol=1e-6)


def neighbours(config: ContextConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a document after two different ones, and of it alone."""
    decoder, mine = model("everything"), document(23, 6)
    first, second, by_itself = (
        logits(decoder, documents, config)[-23:]
        for documents in ((document(30, 7), mine), (document(30, 8), mine), (mine,)))
    return first, second, by_itself


@pytest.mark.parametrize(("n", "config"), [(1, ONE)] + [(n, c) for n in (2, 4) for c in CONFIGS],
                         ids=str)
def test_documents_do_not_see_each_other(ranks: RankPool, n: int, config: ContextConfig) -> None:
    reference = neighbours(ONE)[2]
    for first, second, by_itself in ranks.run(n, neighbours, config):
        assert torch.equal(first, second)
        for found in (first, by_itself):
            torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5)
            assert (n > 1 and config not in KEEP_BITS) or torch.equal(found, reference)


def test_a_pack_with_fewer_tokens_than_ranks(ranks: RankPool) -> None:
    one = Pass("tied", (document(2, 9), document(1, 9)))
    expected = alone((one,))[0]
    for config in (CONFIGS[1], CONFIGS[3], CONFIGS[7]):
        for [found] in ranks.run(4, loss_and_grads, [one], config):
            torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0.0)


def test_what_cannot_be_spread() -> None:
    axis = Mesh.single().axis("cp")
    batch = Batch.of([[1, 2, 3]])
    spread = replace(batch, attend=lambda *_, **__: torch.zeros(3))
    with pytest.raises(ValueError, match="is spread already"):
        spread_batch(spread, axis, ONE)
