"""rope_qkv: values against the definition in float64, the cache it writes, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kilter.ops import rope as module
from kilter.ops.cpu import library
from kilter.ops.cpu.tape import Tape
from kilter.ops.rope import rope_qkv
from tests.ops import runnable_isas, use_library

EPS = 1e-6
POSITIONS = 50


def tables(dim: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(POSITIONS)[:, None] * 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    return angle.cos(), angle.sin()


def expected(qkv: Tensor, positions: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
             zero_centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Each pair (j, j + d/2) as a complex number, turned by its angle."""
    dim = qkv.shape[-1]
    cos, sin = tables(dim)
    turn = torch.complex(cos.double(), sin.double())[positions.long()][:, None, None]

    def rotate(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
            x = x * (norm + 1 if zero_centred else norm)
        z = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    q = rotate(qkv[:, :, :-2], q_norm).flatten(1, 2)
    return q, rotate(qkv[:, :, -2:-1], k_norm)[:, :, 0], qkv[:, :, -1]


def inputs(tokens: int, groups: int, per: int, dim: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(dim)
    return (torch.randn(tokens, groups, per + 2, dim),
            torch.randint(POSITIONS, (tokens,), dtype=torch.int32))


@pytest.mark.parametrize(("groups", "per", "dim"), [(1, 1, 2), (3, 3, 64), (2, 1, 24), (1, 4, 80),
                                                    (2, 2, 256)])
@pytest.mark.parametrize("norms", ["none", "both", "zero_centred", "k"])
def test_values(side: str, groups: int, per: int, dim: int, norms: str) -> None:
    qkv, positions = inputs(9, groups, per, dim)
    q_norm = torch.randn(dim) if norms in ("both", "zero_centred") else None
    k_norm = torch.randn(dim) if norms != "none" else None
    got = rope_qkv(qkv, positions, *tables(dim), q_norm=q_norm, k_norm=k_norm, eps=EPS,
                   zero_centred=norms == "zero_centred")
    want = expected(qkv.double(), positions, q_norm, k_norm, norms == "zero_centred")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [24, 64])
def test_the_cache_holds_what_would_be_returned(side: str, dtype: torch.dtype, dim: int) -> None:
    qkv, positions = inputs(5, 2, 2, dim)
    qkv[0, 0, -1, :6] = torch.tensor([1e-7, 3e-8, 7e4, -math.inf, math.nan, 65519.0])
    k_norm = torch.randn(dim)
    q, k, v = rope_qkv(qkv, positions, *tables(dim), k_norm=k_norm)
    keys = torch.full((12, 2, dim), 7.0, dtype=dtype)
    values, slots = keys.clone(), torch.tensor([3, 11, 0, 7, 8], dtype=torch.int32)
    q_2, *caches = rope_qkv(qkv, positions, *tables(dim), k_norm=k_norm,
                            kv=(keys, values, slots))
    assert torch.equal(q_2, q) and caches[0] is keys and caches[1] is values
    for cache, x in ((keys, k), (values, v)):
        torch.testing.assert_close(cache[slots.long()], x.to(dtype), atol=0, rtol=0,
                                   equal_nan=True)
        assert (cache[[1, 2, 4, 5, 6, 9, 10]] == 7).all()
    _, k_2, v_2 = rope_qkv(qkv, positions, *tables(dim), k_norm=k_norm, kv_dtype=dtype)
    torch.testing.assert_close((k_2, v_2), (k.to(dtype), v.to(dtype)), atol=0, rtol=0,
                               equal_nan=True)


def test_a_token_alone_has_the_same_bits(side: str) -> None:
    qkv, positions = inputs(40, 3, 3, 40)
    norm = torch.randn(40)
    batch = rope_qkv(qkv, positions, *tables(40), q_norm=norm, k_norm=norm)
    for t in range(0, 40, 7):
        alone = rope_qkv(qkv[t:t + 1].clone(), positions[t:t + 1].clone(), *tables(40),
                         q_norm=norm, k_norm=norm)
        assert all(torch.equal(a[0], b[t]) for a, b in zip(alone, batch, strict=True))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set(monkeypatch: pytest.MonkeyPatch, isa: str,
                               dtype: torch.dtype) -> None:
    qkv, positions = inputs(30, 3, 3, 48)
    qkv[:, :, -1] *= torch.logspace(-9, 6, 48)  # subnormal, normal and too large for fp16
    norm = torch.randn(48)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        return rope_qkv(qkv, positions, *tables(48), q_norm=norm, k_norm=norm, kv_dtype=dtype)

    use_library(monkeypatch, runnable_isas()[0])
    want = run()
    for threads in (1, 2):
        use_library(monkeypatch, isa, threads)
        assert all(map(torch.equal, run(), want))


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_gradients(side: str, zero_centred: bool, kv_dtype: torch.dtype) -> None:
    qkv, positions = inputs(6, 2, 3, 10)
    leaves = [qkv, torch.randn(10), torch.randn(10)]
    exact = [x.double().requires_grad_() for x in leaves]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        return rope_qkv(leaves[0], positions, *tables(10), q_norm=leaves[1], k_norm=leaves[2],
                        eps=EPS, zero_centred=zero_centred, kv_dtype=kv_dtype)

    plain = run()
    leaves = [x.requires_grad_() for x in leaves]
    out = run()
    assert all(map(torch.equal, out, plain))
    weights = [torch.randint(-4, 5, x.shape).float() for x in out]  # exact in bf16
    torch.autograd.backward(out, [w.to(x.dtype) for w, x in zip(weights, out, strict=True)])
    want = expected(exact[0], positions, exact[1], exact[2], zero_centred)
    sum((x * w).sum() for x, w in zip(want, weights, strict=True)).backward()
    for got, x in zip(leaves, exact, strict=True):
        assert got.grad is not None and x.grad is not None
        torch.testing.assert_close(got.grad.double(), x.grad, atol=1e-4, rtol=1e-4)


def test_operators_are_well_behaved() -> None:
    qkv, positions = inputs(3, 2, 1, 8)
    norm = torch.randn(8, requires_grad=True)
    torch.library.opcheck(module._rope_qkv_op, (qkv.requires_grad_(), positions, *tables(8), norm,
                                                norm, EPS, False, torch.float32))
    cache, slots = torch.zeros(4, 2, 8), torch.tensor([0, 2, 3], dtype=torch.int32)
    torch.library.opcheck(module._rope_qkv_cache_op, (
        qkv.detach(), positions, *tables(8), None, None, EPS, False, cache, cache.clone(), slots))
    with FakeTensorMode():
        fake, index = torch.empty(3, 2, 5, 8), torch.empty(3, dtype=torch.int32)
        table = torch.empty(9, 4)
        q, k, v = rope_qkv(fake, index, table, table, kv_dtype=torch.bfloat16)
        assert q.shape == (3, 6, 8) and k.shape == v.shape == (3, 2, 8)
        assert k.dtype == torch.bfloat16
        cache = torch.empty(4, 2, 8)
        assert rope_qkv(fake, index, table, table, kv=(cache, cache.clone(), index))[1] is cache


def test_no_tokens(side: str) -> None:
    q, k, _ = rope_qkv(torch.empty(0, 2, 3, 8), torch.empty(0, dtype=torch.int32), *tables(8))
    assert q.shape == (0, 2, 8) and k.shape == (0, 2, 8)


def test_errors(side: str) -> None:
    qkv, positions = inputs(3, 2, 1, 8)
    for bad in (-1, POSITIONS):
        with pytest.raises(ValueError, match=f"position is out of range: {bad}"):
            rope_qkv(qkv, torch.tensor([0, bad, 1], dtype=torch.int32), *tables(8))
    cache = torch.zeros(4, 2, 8)
    for bad in (-1, 4):
        kv = (cache, cache.clone(), torch.tensor([0, bad, 1], dtype=torch.int32))
        with pytest.raises(ValueError, match=f"slot is out of range: {bad}"):
            rope_qkv(qkv, positions, *tables(8), kv=kv)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="carry no gradient"):
        rope_qkv(qkv.clone().requires_grad_(), positions, *tables(8), kv=(cache, cache, slots))
    with pytest.raises(ValueError, match=r"positions must be.*cos must be"):
        rope_qkv(qkv, positions.long(), *tables(10))
    with pytest.raises(ValueError, match="d even"):
        rope_qkv(torch.randn(3, 2, 3, 7), positions, *tables(8))
    with pytest.raises(ValueError, match="cannot be stored as torch"):
        rope_qkv(qkv, positions, *tables(8), kv_dtype=torch.int8)


@pytest.mark.skipif(not library.available(), reason="no compiler")
def test_a_tape_shows_a_bad_position_as_nan() -> None:
    qkv, positions = inputs(1, 1, 1, 8)
    cache, slots = torch.zeros(2, 1, 8), torch.zeros(1, dtype=torch.int32)
    tape = Tape()
    with tape.record():
        q, _, _ = rope_qkv(qkv, positions, *tables(8), kv=(cache, cache.clone(), slots))
    positions.fill_(POSITIONS)
    before = cache.clone()
    tape.replay()
    assert q.isnan().all() and torch.equal(cache, before)
