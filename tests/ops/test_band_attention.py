"""Attention over bands: values and gradients against dense float64 softmax, parts against the
whole, causal packs against `kilter.ops.attention`, and bits that nothing but a row's runs moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import band_attention as module
from kilter.ops.attention import attention
from kilter.ops.band_attention import (
    NO_HIGH,
    NO_LOW,
    Bands,
    band_attention,
    band_attention_grad,
    merge_,
)
from kilter.ops.cpu import library
from tests.ops import runnable_isas, use_library

compiled = pytest.mark.skipif(not library.available(), reason="no compiler")
SIDES = ["kernel", "torch"] if library.available() else ["torch"]
Run = tuple[int, int, int, int, int, int]


@contextmanager
def computed_by(side: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if side == "torch":
            patch.setattr(module, "available", lambda: False)
        yield


def bands_of(runs: list[Run]) -> Bands:
    return Bands(torch.tensor(runs, dtype=torch.int64).reshape(-1, 6))


def causal(lengths: list[int], window: int | None = None) -> list[Run]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [(a, b, a, b, 1 - window if window else NO_LOW, 0) for a, b in pairwise(ends)]


@dataclass
class Case:
    """Queries and keys with the runs between them."""

    q: Tensor
    k: Tensor
    v: Tensor
    runs: list[Run]
    scale: float

    @staticmethod
    def of(tokens: int, keys: int, runs: list[Run], heads: int = 4, groups: int = 2, dim: int = 16,
           seed: int = 0) -> Case:
        torch.manual_seed(seed)
        return Case(torch.randn(tokens, heads, dim), torch.randn(keys, groups, dim),
                    torch.randn(keys, groups, dim), runs, dim ** -0.5)

    def forward(self) -> tuple[Tensor, Tensor]:
        return band_attention(self.q, self.k, self.v, bands_of(self.runs), scale=self.scale)

    def grad(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return band_attention_grad(dout, self.q, self.k, self.v, out, lse, bands_of(self.runs),
                                   scale=self.scale)

    def seen(self) -> Tensor:
        """bool [T, N], by the definition."""
        seen = torch.zeros(len(self.q), len(self.k), dtype=torch.bool)
        for q0, q1, k0, k1, low, high in self.runs:
            for i in range(q1 - q0):
                for j in range(max(0, i + low), min(k1 - k0, i + high + 1)):
                    assert not seen[q0 + i, k0 + j]
                    seen[q0 + i, k0 + j] = True
        return seen

    def dense(self, dout: Tensor) -> tuple[Tensor, ...]:
        """(out, lse, dq, dk, dv) in float64."""
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        per, seen = q.shape[1] // k.shape[1], self.seen()
        score = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(per, 1)) * self.scale
        top = score.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
        p = (score - top.masked_fill(top == -math.inf, 0.0)).masked_fill(~seen, -math.inf).exp()
        total = p.sum(-1, keepdim=True)
        out = torch.einsum("htn,nhd->thd", p / total.masked_fill(total == 0.0, 1.0),
                           v.repeat_interleave(per, 1))
        lse = (top + total.log())[..., 0].T
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())

    def split(self, at: int) -> tuple[Case, Case]:
        """The keys before and from ``at``, as two cases."""
        before, after = [], []
        for q0, q1, k0, k1, low, high in self.runs:
            before.append((q0, q1, min(k0, at), min(k1, at), low, high))
            gone = max(0, at - k0)  # keys of the run that are in the other part
            after.append((q0, q1, max(k0 - at, 0), max(k1 - at, 0), low - gone, high - gone))
        return (replace(self, k=self.k[:at], v=self.v[:at], runs=before),
                replace(self, k=self.k[at:], v=self.v[at:], runs=after))


@st.composite
def ranges(draw: st.DrawFn, size: int, most: int) -> list[tuple[int, int]]:
    """Some disjoint ranges of [0, size), in order, with and without gaps."""
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=most + 1)))
    return [pair for pair in pairwise(cuts) if draw(st.integers(0, 4))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.one_of(st.integers(1, 40), st.integers(1, 250)))
    keys = draw(st.one_of(st.integers(1, 60), st.integers(1, 700)))
    small = st.integers(-80, 80)
    runs: list[Run] = []
    for q0, q1 in draw(ranges(tokens, 4)):
        for k0, k1 in draw(st.one_of(ranges(keys, 3), st.just([(0, keys)]))):
            low = draw(st.one_of(st.just(NO_LOW), small))
            high = draw(st.one_of(st.just(NO_HIGH), st.just(0), small))
            runs.append((q0, q1, k0, k1, low, high))
    groups, per = draw(st.sampled_from(((1, 1), (1, 3), (2, 2), (3, 7), (2, 1))))
    dim = draw(st.sampled_from((2, 8, 16, 24, 64, 80)))
    return Case.of(tokens, keys, runs, groups * per, groups, dim, draw(st.integers(0, 99)))


def close(got: Tensor, want: Tensor) -> None:
    size = float(want.nan_to_num(neginf=0.0).abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), atol=1e-5 * max(1.0, size), rtol=1e-5)


@pytest.mark.parametrize("side", SIDES)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_values_and_gradients_against_float64(side: str, case: Case) -> None:
    dout = torch.randn_like(case.q)
    with computed_by(side):
        out, lse = case.forward()
        grads = case.grad(dout, out, lse)
    for got, want in zip((out, lse, *grads), case.dense(dout), strict=True):
        assert got.dtype == torch.float32
        close(got, want)
    assert not out[lse == -math.inf].any()


@pytest.mark.parametrize("side", SIDES)
@settings(max_examples=25, deadline=None)
@given(case=cases(), data=st.data())
def test_parts_make_the_whole(side: str, case: Case, data: st.DataObject) -> None:
    """Keys cut in two: results merge, and gradients with the whole's log-sum-exp add up."""
    at = data.draw(st.integers(0, len(case.k)))
    one, two = case.split(at)
    dout = torch.randn_like(case.q)
    with computed_by(side):
        whole, whole_lse = case.forward()
        for first, second in ((one, two), (two, one)):
            out, lse = first.forward()
            merge_(out, lse, *second.forward())
            close(out, whole)
            close(lse, whole_lse)
        dq, dk, dv = case.grad(dout, whole, whole_lse)
        a, b = (part.grad(dout, whole, whole_lse) for part in (one, two))
    close(a[0] + b[0], dq)
    close(torch.cat((a[1], b[1])), dk)
    close(torch.cat((a[2], b[2])), dv)


@compiled
@pytest.mark.parametrize(("heads", "groups", "dim", "window"), [
    (9, 3, 64, None), (4, 1, 40, 100), (3, 3, 16, 257), (8, 2, 128, None)])
def test_causal_packs_equal_attention(heads: int, groups: int, dim: int,
                                      window: int | None) -> None:
    """Results within rounding; gradients, given the same results, in every bit."""
    lengths = [300, 1, 620, 7]
    case = Case.of(sum(lengths), sum(lengths), causal(lengths, window), heads, groups, dim)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    want, want_lse = attention(*leaves, cu, scale=case.scale, window=window, return_lse=True)
    out, lse = case.forward()
    torch.testing.assert_close(out, want.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, want_lse.detach(), atol=1e-6, rtol=1e-6)
    dout = torch.randn_like(out)
    grads = case.grad(dout, want.detach(), want_lse.detach())
    assert all(map(torch.equal, grads, torch.autograd.grad(want, leaves, dout)))


def striped(tokens: int, behind: bool) -> list[Run]:
    """Every second row of a causal sequence against the other rank's rows."""
    return [(0, tokens, 0, tokens, NO_LOW, -1 if behind else 0)]


BITS = [Case.of(530, 530, causal([400, 130], 300), heads=3, groups=1, dim=20),
        Case.of(300, 420, striped(300, True), heads=2, dim=64),
        Case.of(130, 600, [(10, 100, 300, 600, NO_LOW, NO_HIGH), (10, 100, 0, 290, -50, 100),
                           (100, 125, 0, 600, NO_LOW, 300)], heads=6, dim=24)]


@compiled
@pytest.mark.parametrize("isa", runnable_isas())
def test_every_instruction_set_and_thread_count(monkeypatch: pytest.MonkeyPatch,
                                                isa: str) -> None:
    def run() -> list[Tensor]:
        found: list[Tensor] = []
        for case in BITS:
            one, two = case.split(200)
            torch.manual_seed(1)
            out, lse = case.forward()
            merged, merged_lse = one.forward()
            merge_(merged, merged_lse, *two.forward())
            found += [out, lse, merged, merged_lse, *case.grad(torch.randn_like(out), out, lse)]
        return found

    use_library(monkeypatch, runnable_isas()[0])
    want = run()
    for threads in (1, 2, 5):
        use_library(monkeypatch, isa, threads)
        assert all(map(torch.equal, run(), want))


@compiled
@pytest.mark.parametrize("case", BITS)
def test_a_row_does_not_depend_on_its_neighbours(case: Case) -> None:
    """Query ranges cut anywhere, and single rows alone, have the bits of the whole."""
    whole, whole_lse = case.forward()
    for width in (1, 7, 64):
        for first in range(3, len(case.q), 101):
            last = min(first + width, len(case.q))
            runs = [(max(q0, first) - first, min(q1, last) - first, k0, k1,
                     low + max(0, first - q0), high + max(0, first - q0))
                    for q0, q1, k0, k1, low, high in case.runs if q0 < last and first < q1]
            part = replace(case, q=case.q[first:last], runs=runs)
            out, lse = part.forward()
            assert torch.equal(out, whole[first:last])
            assert torch.equal(lse, whole_lse[first:last])


@compiled
def test_nothing_outside_a_band_reaches_a_row() -> None:
    case = Case.of(250, 600, [(0, 250, 100, 500, -30, 90)])
    clean, clean_lse = case.forward()
    for x in (case.k, case.v):
        x[:100] = math.nan  # outside the run
        x[200:] = math.nan  # beyond the band of the first 11 rows
    out, lse = case.forward()
    assert torch.equal(out[:10], clean[:10]) and torch.equal(lse[:10], clean_lse[:10])
    assert out[10:].isnan().all()


@pytest.mark.parametrize("side", SIDES)
def test_rows_that_saw_nothing_have_no_gradient(side: str) -> None:
    """Not even where the bands show them keys, nor with numbers that would spoil a sum."""
    case = Case.of(40, 50, [(0, 40, 0, 50, NO_LOW, NO_HIGH)])
    with computed_by(side):
        out, lse = case.forward()
        dout = torch.randn_like(out)
        live = replace(case, runs=[(7, 40, 0, 50, NO_LOW, NO_HIGH)])
        want = live.grad(dout, out, lse)
        lse[:7] = -math.inf
        for x in (out, dout, case.q):
            x[:7] = math.nan
        got = case.grad(dout, out, lse)
    assert not got[0][:7].any()
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("side", SIDES)
def test_huge_scores(side: str) -> None:
    """Scores in the thousands, and parts whose log-sum-exps are thousands apart."""
    case = Case.of(60, 600, [(0, 60, 0, 600, NO_LOW, NO_HIGH)])
    case.q *= 1e4
    dout = torch.randn_like(case.q)
    want = case.dense(dout)
    with computed_by(side):
        one, two = case.split(300)
        out, lse = one.forward()
        merge_(out, lse, *two.forward())
        for got in (case.forward(), (out, lse)):
            torch.testing.assert_close(got[0].double(), want[0], atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(got[1].double(), want[1], atol=0.0, rtol=1e-6)


@pytest.mark.parametrize("side", SIDES)
def test_merging_with_nothing(side: str) -> None:
    case = Case.of(9, 9, causal([9]))
    with computed_by(side):
        whole, whole_lse = case.forward()
        nothing = torch.zeros_like(whole), torch.full_like(whole_lse, -math.inf)
        out, lse = whole.clone(), whole_lse.clone()
        merge_(out, lse, *nothing)
        close(out, whole)
        close(lse, whole_lse)
        out, lse = (x.clone() for x in nothing)
        merge_(out, lse, *nothing)
        assert not out.any() and (lse == -math.inf).all()
        merge_(out, lse, whole, whole_lse)
        close(out, whole)
        close(lse, whole_lse)


@compiled
def test_tiles_of_the_pure_torch_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that all kinds of them occur: full, cut by a bound, several per row."""
    monkeypatch.setattr(module, "_ROWS", 32)
    monkeypatch.setattr(module, "_KEYS", 48)
    for case in BITS:
        out, lse = case.forward()
        dout = torch.randn_like(out)
        grads = case.grad(dout, out, lse)
        with computed_by("torch"):
            plain, plain_lse = case.forward()
            plain_grads = case.grad(dout, out, lse)
        for a, b in zip((plain, plain_lse, *plain_grads), (out, lse, *grads), strict=True):
            close(a, b)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_keys_are_widened_exactly(side: str, dtype: torch.dtype) -> None:
    case = Case.of(70, 90, [(0, 70, 0, 90, NO_LOW, 20)])
    narrow = replace(case, k=case.k.to(dtype), v=case.v.to(dtype))
    wide = replace(case, k=narrow.k.float(), v=narrow.v.float())
    with computed_by(side):
        out, lse = narrow.forward()
        assert torch.equal(out, wide.forward()[0])
        dout = torch.ones_like(out)
        grads = narrow.grad(dout, out, lse)
        assert all(map(torch.equal, grads, wide.grad(dout, out, lse)))
    assert all(x.dtype == torch.float32 for x in grads)


@pytest.mark.parametrize("side", SIDES)
def test_strided_inputs(side: str) -> None:
    case = Case.of(50, 60, [(0, 50, 0, 60, NO_LOW, 5)])
    strided = Case(*(torch.stack((x, x), 1)[:, 1] for x in (case.q, case.k, case.v)), case.runs,
                   case.scale)
    assert not strided.q.is_contiguous()
    with computed_by(side):
        out, lse = case.forward()
        assert all(map(torch.equal, strided.forward(), (out, lse)))
        dout = torch.randn(16, 4, 50).permute(2, 1, 0)
        assert all(map(torch.equal, strided.grad(dout, out, lse),
                       case.grad(dout.contiguous(), out, lse)))


@pytest.mark.parametrize("side", SIDES)
def test_nothing_to_do(side: str) -> None:
    with computed_by(side):
        for tokens, keys in ((0, 0), (3, 0), (0, 3), (3, 5)):
            case = Case.of(tokens, keys, [])
            out, lse = case.forward()
            assert out.shape == case.q.shape and not out.any() and (lse == -math.inf).all()
            grads = case.grad(out, out, lse)
            assert [x.shape for x in grads] == [case.q.shape, case.k.shape, case.v.shape]
            assert not any(x.any() for x in grads)
            merge_(out, lse, out.clone(), lse.clone())


def test_bands_are_normalised() -> None:
    bands = bands_of([(0, 0, 3, 9, 0, 0), (2, 5, 4, 4, 0, 0), (2, 5, 4, 8, -2**63, 2**63 - 1)])
    assert bands.runs.tolist() == [[2, 5, 4, 8, NO_LOW, NO_HIGH]]
    assert (bands.queries, bands.keys) == (5, 8)
    assert (bands_of([]).queries, bands_of([]).keys) == (0, 0)


@pytest.mark.parametrize(("runs", "says"), [
    ([(0, 4, 0, 4, 0, 0), (3, 6, 4, 8, 0, 0)], "disjoint ranges of queries"),
    ([(0, 4, 0, 4, 0, 0), (0, 5, 4, 8, 0, 0)], "disjoint ranges of queries"),
    ([(4, 8, 0, 4, 0, 0), (0, 4, 0, 4, 0, 0)], "sorted by q0"),
    ([(0, 4, 0, 4, 0, 0), (4, 8, 0, 4, 0, 0), (0, 4, 4, 8, 0, 0)], "sorted by q0"),
    ([(0, 4, 5, 9, 0, 0), (0, 4, 0, 6, 0, 0)], "disjoint keys"),
    ([(-1, 4, 0, 4, 0, 0)], "0 <= q0 <= q1"),
    ([(0, 4, 4, 3, 0, 0)], "0 <= k0 <= k1")])
def test_bad_bands(runs: list[Run], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bands_of(runs)


def test_bands_of_another_type() -> None:
    for runs in (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int32)):
        with pytest.raises(ValueError, match="int64"):
            Bands(runs)


def test_bad_inputs() -> None:
    case = Case.of(8, 9, [(0, 8, 0, 9, NO_LOW, 0)])
    out, lse = case.forward()

    def check(says: str, **other: Tensor | list[Run]) -> None:
        with pytest.raises(ValueError, match=says):
            replace(case, **other).forward()

    check("query 8 and key 9", q=case.q[:7])
    check("query 8 and key 10", runs=[(0, 8, 0, 10, 0, 0)])
    check("float32", q=case.q.double())
    check("keys and values must be one of", k=case.k.double(), v=case.v.double())
    check("multiple of G", q=case.q[:, :3])
    check("multiple of G", v=case.v[:8])
    with pytest.raises(ValueError, match="lse"):
        case.grad(out, out, lse.T)
    with pytest.raises(ValueError, match="lse"):
        case.grad(out[:7], out, lse)
    with pytest.raises(ValueError, match="Merging"):
        merge_(out, lse, out[:7], lse[:7])
    with pytest.raises(ValueError, match="contiguous"):
        merge_(torch.stack((out, out), 1)[:, 0], lse, out, lse)


def test_operators_are_well_behaved() -> None:
    case = Case.of(8, 9, [(0, 8, 0, 9, NO_LOW, 0)])
    out, lse = case.forward()
    runs = bands_of(case.runs).runs
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(module._forward_op, (case.q, case.k, case.v, runs, 0.3),
                          test_utils=tests)
    torch.library.opcheck(module._gradient_op, (out, case.q, case.k, case.v, out, lse, runs, 0.3),
                          test_utils=tests)
    torch.library.opcheck(module._merge_op, (out, lse, out.clone(), lse.clone()),
                          test_utils=tests)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        bands = Bands(torch.empty(3, 6, dtype=torch.int64))
        q, k = torch.empty(7, 6, 16), torch.empty(9, 2, 16)
        out, lse = band_attention(q, k, k, bands, scale=1.0)
        assert out.shape == (7, 6, 16) and lse.shape == (7, 6)
        merge_(out, lse, out.clone(), lse.clone())
        grads = band_attention_grad(out, q, k, k, out, lse, bands, scale=1.0)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def test_autograd_is_refused_not_forgotten() -> None:
    case = Case.of(8, 9, [(0, 8, 0, 9, NO_LOW, 0)])
    case.q.requires_grad_()
    out, _ = case.forward()
    with pytest.raises(RuntimeError):
        out.sum().backward()
