"""Layers that compute while their rows travel: the same numbers, bytes and errors as those that
wait, in another order of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.parity import Case, everything, tiny, train
from kilter.comm.autograd import gather_rows, scatter_rows
from kilter.comm.counter import CommCounter
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.ops import Ops, exact_ops, stock_ops
from kilter.ops.linear import defer_weight_grad, weight_grad
from kilter.parallel import overlap
from kilter.parallel.apply import apply
from kilter.parallel.overlap import gathered_linear, summed_linear
from kilter.parallel.recompute import Recompute
from kilter.train.lora import LoraConfig, adapters_off, add_adapters
from tests.parallel.gradients import (
    Gradients,
    assert_same,
    document,
    gradients,
    spread_model,
)
from tests.ranks import RankPool

ROWS, K, N, R = 5, 48, 40, 3  # rows of a rank; the widths of a linear and of an adapter's


def rand(*shape: int, seed: int, needed: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_(needed)


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def compare(found: list[tuple[Tensor, ...]], exact: bool) -> None:
    """The last is the gradient of x."""
    (*plain, dx), (*overlapped, other_dx) = found
    for a, b in zip(overlapped, plain, strict=True):
        if exact:
            assert torch.equal(a, b)
        else:
            close(a, b)
    close(other_dx, dx)


def ops_of(kind: str) -> Ops:
    return stock_ops() if kind == "stock" else exact_ops(kind)


def check_gathered(n: int, kind: str) -> None:
    axis, ops = Mesh(Layout(tp=n)).axis("tp"), ops_of(kind)
    results = []
    for overlapped in (False, True):
        x, weight, bias = (rand(ROWS, K, seed=axis.index), rand(N, K, seed=90 + axis.index),
                           rand(N, seed=91))
        if overlapped:
            y, whole = gathered_linear(x, weight, bias, ops, axis, splits=1)
        else:
            whole = gather_rows(x, axis, [ROWS] * n)
            y = ops.linear(whole, weight, bias, None, splits=1)
        # The rows have another use too, as an adapter makes of them.
        both = (y * rand(n * ROWS, N, seed=92, needed=False)).sum() + (whole.square()).sum()
        both.backward()
        results.append((y, whole, weight.grad, bias.grad, x.grad))
    compare(results, kind != "stock")


def check_summed(n: int, kind: str) -> None:
    axis, ops = Mesh(Layout(tp=n)).axis("tp"), ops_of(kind)
    results = []
    for overlapped in (False, True):
        x = rand(n * ROWS, K, seed=axis.index)
        weights = [rand(N, K, seed=80 + axis.index), rand(R, K, seed=90 + axis.index)]
        if overlapped:
            y = summed_linear(x, weights, ops, axis, splits=2)
        else:
            y = scatter_rows(torch.cat([ops.linear(x, weight, None, None, splits=2)
                                        for weight in weights], dim=1), axis, [ROWS] * n)
        (y * rand(ROWS, N + R, seed=70 + axis.index, needed=False)).sum().backward()
        results.append((y, *(weight.grad for weight in weights), x.grad))
    compare(results, kind != "stock")


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_layer_has_the_bits_of_one_that_waits(ranks: RankPool, n: int) -> None:
    """Of y, of the weights' gradients and the bias's; x's gradient within rounding."""
    ranks.run(n, check_gathered, n, "fp32")
    ranks.run(n, check_summed, n, "fp32")


@pytest.mark.parametrize("kind", ["bf16", "stock"])
def test_other_arithmetic(ranks: RankPool, kind: str) -> None:
    """Factors in bfloat16, in backward too; and torch's own kernels, within rounding."""
    ranks.run(2, check_gathered, 2, kind)
    ranks.run(2, check_summed, 2, kind)


def check_what_needs_no_gradient(n: int) -> None:
    """No rows travel for a gradient that nobody asks for."""
    mesh = Mesh(Layout(tp=n))
    axis, ops = mesh.axis("tp"), exact_ops()
    x, weight = rand(ROWS, K, seed=1, needed=False), rand(N, K, seed=2)
    y, whole = gathered_linear(x, weight, None, ops, axis, splits=1)
    assert y.requires_grad and not whole.requires_grad
    with CommCounter() as counter:
        y.sum().backward()
    assert counter.calls() == 0 and weight.grad is not None
    frozen = weight.detach()
    y, whole = gathered_linear(x, frozen, None, ops, axis, splits=1)
    assert not y.requires_grad
    x = rand(n * ROWS, K, seed=3)
    y = summed_linear(x, [frozen], ops, axis, splits=1)
    y.sum().backward()
    close(x.grad, frozen.sum(0).expand_as(x))
    with torch.no_grad():
        assert torch.equal(summed_linear(x, [weight], ops, axis, splits=1), y)


def test_what_needs_no_gradient(ranks: RankPool) -> None:
    ranks.run(2, check_what_needs_no_gradient, 2)


def check_deferred(n: int) -> None:
    axis, ops = Mesh(Layout(tp=n)).axis("tp"), exact_ops()
    x, rows, weight = rand(ROWS, K, seed=1), rand(n * ROWS, K, seed=2), rand(N, K, seed=3)

    def products() -> Tensor:
        y, _ = gathered_linear(x, weight, None, ops, axis, splits=1)
        return y.square().sum() + summed_linear(rows, [weight], ops, axis, splits=1).square().sum()

    products().backward()
    made, weight.grad = weight.grad, None
    uses = defer_weight_grad(weight)
    products().backward()
    assert weight.grad is None and len(uses) == 2
    close(sum(weight_grad(*use) for use in uses), made)


def test_a_deferred_weight_gradient_is_left_for_later(ranks: RankPool) -> None:
    ranks.run(2, check_deferred, 2)


# ---- the order of events

@contextmanager
def recorded(events: list[str]) -> Iterator[Ops]:
    """Gives ops, and writes down what is sent, waited for and computed. A computation is called by
    its first number: rows hold the place of the rank that they belong to."""
    real, exact = dist.batch_isend_irecv, exact_ops()

    class Waited:
        def __init__(self, target: int, works: list[dist.Work]) -> None:
            self.target, self.works = target, works

        def wait(self) -> None:
            events.append(f"wait {self.target}")
            for work in self.works:
                work.wait()

    def batch(ops: list[dist.P2POp]) -> list[Any]:
        target = ops[0].peer
        events.append(f"send {target}")
        return [Waited(target, real(ops))]

    def named(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            events.append(f"{name} {x[0, 0]:.0f}")
            return function(x, *args, **kwargs)
        return run

    with (patch.object(dist, "batch_isend_irecv", batch),
          patch.object(overlap, "grad_input", named("dx", overlap.grad_input)),
          patch.object(overlap, "weight_grad", named("dw", overlap.weight_grad))):
        yield replace(exact, linear=named("y", exact.linear))


def check_order(n: int) -> None:
    axis = Mesh(Layout(tp=n)).axis("tp")
    me = axis.index
    after = [(me + step) % n for step in range(1, n)]
    sends, waits = [f"send {i}" for i in after], [f"wait {i}" for i in after]
    before = [(me - step) % n for step in range(1, n)]
    places = torch.arange(n).repeat_interleave(ROWS)[:, None].float()
    events: list[str] = []
    with recorded(events) as ops:
        def took() -> list[str]:
            found = events.copy()
            events.clear()
            return found

        def arriving(what: str) -> list[str]:
            steps = zip(waits, before, strict=True)
            return [*sends, f"{what} {me}", *(e for w, i in steps for e in (w, f"{what} {i}"))]

        def leaving(what: str, *last: str) -> list[str]:
            steps = zip(after, sends, strict=True)
            return [*(e for i, s in steps for e in (f"{what} {i}", s)), f"{what} {me}", *last,
                    *waits]

        weight = torch.ones(N, K, requires_grad=True)
        x = torch.full((ROWS, K), float(me), requires_grad=True)
        y, _ = gathered_linear(x, weight, None, ops, axis, splits=1)
        assert took() == arriving("y")
        y.backward(places.expand(n * ROWS, N))
        assert took() == leaving("dx", "dw 0")

        x = places.repeat(1, K).requires_grad_()
        y = summed_linear(x, [weight], ops, axis, splits=1)
        assert took() == leaving("y")
        y.backward(torch.full((ROWS, N), float(me)))
        # dw is called by x
        assert took() == [*arriving("dx"), "dw 0"]


@pytest.mark.parametrize("n", [2, 4])
def test_rows_are_under_way_while_others_are_computed(ranks: RankPool, n: int) -> None:
    """All that is gathered is asked for before anything is computed, and used as it comes; of what
    is summed, a part is sent before the next is made, and the own part, which nobody waits for,
    last; a weight's gradient is made before the sum of x's is waited for."""
    ranks.run(n, check_order, n)


# ---- whole models

@pytest.mark.parametrize(("spec", "layout"), [
    (tiny(False), Layout(tp=8)), (everything(), Layout(tp=4)),
    (tiny(True), Layout(dp=2, tp=2, zero=3))], ids=["tp8", "everything tp4", "zero3-2 tp2"])
def test_gradients_are_those_of_layers_that_wait(ranks: RankPool, spec: Any, layout: Layout
                                                 ) -> None:
    spec = replace(spec, layers=spec.layers[:2])
    made = [document([(7 * i + 3 * m) % spec.vocab_size for i in range(24)]) for m in range(2)]
    overlapped = replace(layout, overlap_tp=True)
    found: list[Gradients] = ranks.run(layout.world, gradients, spec, overlapped, made)
    plain: list[Gradients] = ranks.run(layout.world, gradients, spec, layout, made)
    for a, b in zip(found, plain, strict=True):
        assert a.loss == b.loss  # the forward's bits
    assert_same(found, gradients(spec, Layout(), made), 2e-6)


def adapted(layout: Layout) -> list[Tensor]:
    """Log-probabilities of a model with adapters, on and off, and with biases that are not zero."""
    spec = replace(everything(), layers=everything().layers[:2])
    with torch.device("meta"):
        model = Decoder(spec)
    add_adapters(model, LoraConfig(rank=3, targets=("q_proj", "v_proj", "out", "gate_up", "down")))
    spread = apply(model, Mesh(layout) if layout.world > 1 else Mesh.single())
    spread.initialise(seed=1, std=0.2)
    spread.fill({name: rand(*shard.shape, seed=index, needed=False)
                 for index, (name, shard) in enumerate(sorted(spread.shards.items()))
                 if name.endswith("bias") or ".adapter." in name})
    tokens = torch.arange(24) * 5
    batch, targets_T = Batch.of([tokens.tolist()]), tokens.roll(-1)
    with torch.no_grad():
        found = [spread.forward(batch, targets_T)]
        with adapters_off(spread.model):
            return [*found, spread.forward(batch, targets_T)]


def test_adapters_have_the_bits_of_layers_that_wait(ranks: RankPool) -> None:
    one = adapted(Layout())
    assert not torch.equal(*one)
    for tp in (2, 4):
        for found in ranks.run(tp, adapted, Layout(tp=tp, overlap_tp=True)):
            assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))


def traffic(case: Case) -> tuple[list[float], dict[str, int], int]:
    """(gradient norms, calls by operation, bytes) on the tensor axis of one step, its sizes
    included."""
    with CommCounter([]) as counter:
        outcome = train(case, steps=1)
    calls: dict[str, int] = {}
    for (_, op), seen in counter.traffic.items():
        calls[op] = calls.get(op, 0) + seen.calls
    return outcome.norms, calls, counter.bytes()


@pytest.mark.parametrize("recompute", [
    Recompute("full"), Recompute("selective", parts=("attention", "mlp"))],
    ids=lambda r: r.mode)
def test_recompute_sends_no_more_than_it_has_to(ranks: RankPool, recompute: Recompute) -> None:
    """The last sum of a part that is recomputed is not made again."""
    layout = Layout(tp=2)
    over = replace(layout, overlap_tp=True)
    for (norms, _, plain), (found, calls, sent), (once, _, least) in zip(
            ranks.run(2, traffic, Case("plain", layout, recompute=recompute)),
            ranks.run(2, traffic, Case("overlap", over, recompute=recompute)),
            ranks.run(2, traffic, Case("kept", over)), strict=True):
        assert calls["send"] > 0 and sent == plain > least
        assert found == once and found == pytest.approx(norms, rel=1e-6)


def refusal() -> str:
    layer = spread_model(tiny(True), Layout(tp=2, overlap_tp=True)).model.layers[0]
    with pytest.raises(ValueError) as error:
        layer.mlp.down(torch.zeros(7, 32))  # type: ignore[union-attr,operator]
    return str(error.value)


def test_t_that_does_not_divide_is_said(ranks: RankPool) -> None:
    assert "multiple of tp = 2, but a batch has 7" in ranks.run(2, refusal)[0]
