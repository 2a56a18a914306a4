"""The CUDA kernels that treat each row by itself (and the linears), in Triton's interpreter where
there is no GPU: values against torch in float64, and what exactness promises, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kilter.ops.cuda import activation, embedding, launch, linear, logprob, norm, rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Relative error in the Frobenius norm: rounding of the output's format and no more."""
    limit = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}[actual.dtype]
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= limit, f"relative error {error:.2e} over {limit:.0e}"


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same bits on a GPU; close in the interpreter, whose products are BLAS's, which may sum
    a row otherwise for another number of rows or columns."""
    if DEVICE == "cuda":
        assert torch.equal(actual, expected)
    else:
        assert_close(actual, expected.double())


def poisoned(x: Tensor) -> Tensor:
    """x, in memory surrounded by NaN."""
    room = torch.full((x.numel() + 64,), float("nan"), dtype=x.dtype, device=x.device)
    inner = room[32:32 + x.numel()].view(x.shape)
    inner.copy_(x)
    return inner


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, depth, columns", [(1, 48, 20), (70, 200, 150)])
def test_linear_is_the_product(dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    x, w = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype)
    bias, residual = randn(columns, dtype=dtype), randn(rows, columns, dtype=dtype)
    product = x.double() @ w.double().T
    assert_close(linear.linear(poisoned(x), poisoned(w)), product)
    assert_close(linear.linear(x, w, bias, residual), product + bias.double() + residual.double())
    assert_close(linear.linear_grad_input(residual, w), residual.double() @ w.double())
    assert_close(linear.linear(x, w, bias, splits=4), product + bias.double())


def test_float32_rows_take_bfloat16_weights_exactly() -> None:
    x, w = randn(5, 64), randn(24, 64, dtype=torch.bfloat16)
    assert torch.equal(linear.linear(x, w), linear.linear(x, w.float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_does_not_know_the_others(dtype: torch.dtype) -> None:
    x, w, residual = randn(80, 160, dtype=dtype), randn(40, 160, dtype=dtype), randn(80, 40)
    residual = residual.to(dtype)
    tile = linear.TILES_16_BIT[2] if dtype != torch.float32 else linear.TILES_FP32[1]
    whole = linear.launch(x, w, None, residual, tile=tile)
    for start, rows in [(0, 1), (79, 1), (3, 7), (16, 64)]:
        part = slice(start, start + rows)
        y = linear.launch(x[part], w, None, residual[part], tile=tile)
        assert_same(y, whole[part])
    others = x.clone()
    others[1:] = float("nan")
    assert_same(linear.launch(others, w, None, residual, tile=tile)[0], whole[0])


@pytest.mark.parametrize("tile", [*linear.TILES_16_BIT, *linear.TILES_FP32],
                         ids=lambda t: f"{t.rows}x{t.columns}x{t.depth}")
def test_every_tile_covers_the_output(tile: linear.Tile) -> None:
    """On a GPU their bits agree too; the interpreter's products are BLAS's, in BLAS's order."""
    dtype = torch.bfloat16 if tile in linear.TILES_16_BIT else torch.float32
    x, w = randn(tile.rows + 3, 100, dtype=dtype), randn(tile.columns + 5, 100, dtype=dtype)
    expected = x.double() @ w.double().T
    assert_close(linear.launch(x, w, None, None, tile=tile), expected)
    chunks = linear.launch(x, w, None, None, splits=2, tile=tile)
    assert_close(chunks.sum(0), expected)
    if DEVICE == "cuda":
        assert torch.equal(linear.launch(x, w, None, None, tile=tile), linear.linear(x, w))


def test_splits_add_up_in_a_balanced_tree() -> None:
    """Three parts are (a + b) + c; sizes are chosen so that every other order rounds otherwise."""
    x = torch.tensor([[2.0**24, 1.0, 1.0]], device=DEVICE)
    w = torch.ones(1, 3, device=DEVICE)
    assert linear.linear(x, w, splits=3).item() == 2.0**24
    assert linear.linear(x.flip(1), w, splits=3).item() == 2.0**24 + 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name, function", [
    ("silu", torch.nn.functional.silu),
    ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh"))])
def test_gated_linear_is_linear_then_activation(dtype: torch.dtype, name: str, function) -> None:
    x, w, bias = randn(9, 40, dtype=dtype), randn(34, 40, dtype=dtype), randn(34, dtype=dtype)
    both = linear.linear(x, w, bias)
    gate, up = both.double().chunk(2, -1)
    y = activation.gated_activation(both, name)
    assert_close(y, function(gate) * up)
    assert_same(linear.gated_linear(x, w, bias, name), y)
    extremes = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert activation.gated_activation(extremes, name).tolist() == [[0.0, 1e4, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_rms_norm(dtype: torch.dtype, zero_centred: bool) -> None:
    x, w, residual = randn(6, 75, dtype=dtype), randn(75), randn(6, 75, dtype=dtype)
    v = x.double()
    expected = v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (w.double() + zero_centred)
    assert_close(norm.rms_norm(poisoned(x), w, 1e-5, zero_centred), expected)
    y = norm.rms_norm(x, w, 1e-5, zero_centred, residual)
    assert_close(y, expected + residual.double())
    for t in range(6):  # rows of 75 numbers start at every alignment
        row = slice(t, t + 1)
        assert torch.equal(norm.rms_norm(x[row], w, 1e-5, zero_centred, residual[row]), y[row])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_norms_turns_and_writes_the_cache(dtype: torch.dtype, normed: bool) -> None:
    qkv, dim = randn(5, 2, 5, 20, dtype=dtype), 20
    positions = torch.tensor([0, 1, 2, 30, 7], dtype=torch.int32, device=DEVICE)
    angles = torch.outer(torch.arange(40.0), torch.rand(dim // 2)).to(DEVICE)
    q_norm, k_norm = (randn(dim), randn(dim)) if normed else (None, None)
    slots = torch.tensor([9, 0, 4, 5, 6], dtype=torch.int32, device=DEVICE)
    caches = [torch.full((10, 2, dim), float("nan"), dtype=dtype, device=DEVICE) for _ in "kv"]
    options = {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    q, keys, values = rope.rope_qkv(qkv, positions, angles.cos(), angles.sin(), **options,
                                    kv=(caches[0], caches[1], slots))
    assert keys is caches[0] and values is caches[1]

    at = angles.double()[positions.long()][:, None]
    queries, key, value = qkv[:, :, :3].reshape(5, 6, dim), qkv[:, :, 3], qkv[:, :, 4]
    if q_norm is not None and k_norm is not None:
        queries, key = rms(queries, q_norm), rms(key, k_norm)
    assert_close(q, rotated(queries, at.cos(), at.sin()))
    assert_close(keys[slots.long()], rotated(key, at.cos(), at.sin()))
    assert torch.equal(values[slots.long()], value)
    unwritten = [s for s in range(10) if s not in slots.tolist()]
    assert keys[unwritten].isnan().all() and values[unwritten].isnan().all()

    own = rope.rope_qkv(qkv, positions, angles.cos(), angles.sin(), **options, kv_dtype=dtype)
    assert torch.equal(own[0], q) and torch.equal(own[1], keys[slots.long()])
    for t in range(5):
        row = slice(t, t + 1)
        alone = rope.rope_qkv(qkv[row], positions[row], angles.cos(), angles.sin(), **options,
                              kv_dtype=dtype)
        assert all(torch.equal(a, b[row]) for a, b in zip(alone, own, strict=True))


def test_rope_rounds_keys_to_the_cache_format() -> None:
    qkv, positions = randn(3, 1, 4, 16), torch.arange(3, dtype=torch.int32, device=DEVICE)
    table = torch.rand(4, 8, device=DEVICE)
    _, wide, _ = rope.rope_qkv(qkv, positions, table, table)
    _, narrow, values = rope.rope_qkv(qkv, positions, table, table, kv_dtype=torch.float16)
    assert torch.equal(narrow, wide.half()) and torch.equal(values, qkv[:, :, 3].half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities(dtype: torch.dtype) -> None:
    logits = randn(4, 5001, dtype=dtype) * 6
    targets = torch.tensor([0, 5000, 2047, 2048], device=DEVICE)
    expected = logits.double().log_softmax(-1)
    out = logprob.log_softmax(poisoned(logits))
    assert (out - expected).abs().max() < 4e-6
    chosen, lse = logprob.token_logprobs(logits, targets)
    assert torch.equal(chosen, out[range(4), targets])
    assert (lse - logits.double().logsumexp(-1)).abs().max() < 4e-6
    top = logits.amax(-1).float()
    sums = [logprob.chunk_sums(logits[:, a:b], top, 128)
            for a, b in ((0, 128), (128, 2432), (2432, 5001))]
    at = logits.float()[range(4), targets]
    assert torch.equal(logprob.logprobs_from_sums(at, top, torch.cat(sums, 1))[0], chosen)
    outside = logprob.token_logprobs(logits, torch.tensor([-1, 0, 5001, 1], device=DEVICE))[0]
    assert outside.isnan().tolist() == [True, False, True, False]
    assert torch.equal(logprob.log_softmax(logits[2:3]), out[2:3])
    logits[0, 17:5001] = float("-inf")
    assert torch.equal(logprob.log_softmax(logits)[0, 17:], logits[0, 17:].float())


def test_argmax_takes_the_first_of_equals_and_the_first_nan() -> None:
    logits = randn(4, 5001)
    logits[1, [3000, 4000]] = 100.0
    logits[2, :] = float("-inf")
    logits[3, [2100, 4500]] = float("nan")
    logits[3, 7] = float("inf")
    assert logprob.argmax(logits).tolist() == [int(logits[0].argmax()), 3000, 0, 2100]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    weight, tokens = randn(11, 1030, dtype=dtype), torch.tensor([10, 0, 10], device=DEVICE)
    assert torch.equal(embedding.embed(tokens, weight), weight[tokens])
    assert_close(embedding.embed(tokens, weight, 25.3), weight[tokens].double() * 25.3)
    assert embedding.embed(torch.tensor([11, -1], device=DEVICE), weight).isnan().all()


def test_no_rows_give_no_rows() -> None:
    none, ints = randn(0, 16), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert linear.linear(none, randn(8, 16)).shape == (0, 8)
    assert norm.rms_norm(none, randn(16), 1e-6).shape == (0, 16)
    assert activation.gated_activation(none, "silu").shape == (0, 8)
    assert embedding.embed(ints, randn(4, 16)).shape == (0, 16)
    assert logprob.log_softmax(none).shape == (0, 16) and logprob.argmax(none).shape == (0,)
    table = randn(4, 8)
    assert rope.rope_qkv(randn(0, 1, 3, 16), ints, table, table)[0].shape == (0, 1, 16)


def test_bad_calls_name_every_problem() -> None:
    x = randn(3, 16)
    with pytest.raises(ValueError, match=r"bias has shape \[5\]; it must be \[8\].*cut in 3"):
        linear.linear(x, randn(8, 16), randn(5), splits=3)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16 and the weight torch\.float32"):
        linear.linear(x.bfloat16(), randn(8, 16))
    with pytest.raises(ValueError, match=r"a tensor is torch\.float64"):
        norm.rms_norm(x.double(), randn(16), 1e-6)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        linear.gated_linear(x, randn(8, 16), activation="relu")
    with pytest.raises(ValueError, match="one of q_norm and k_norm is missing"):
        rope.rope_qkv(randn(3, 1, 3, 16), torch.zeros(3, dtype=torch.int32, device=DEVICE),
                      randn(4, 8), randn(4, 8), q_norm=randn(16))


def test_a_missing_triton_is_named_when_a_kernel_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "triton", None)

    def _some_kernel() -> None: ...

    for kernel in (launch.jit(_some_kernel), launch.jit(do_not_specialize=["x"])(_some_kernel)):
        with pytest.raises(RuntimeError, match="some_kernel needs Triton"):
            kernel[(1,)]()
