"""Proves and measures the CUDA side of Kilter on the GPU at hand. Run it with bench/gpu_check.sh.

    correctness   every op against float64
    exactness     the same bits for a row at any row count, tile, chunk, page size, split; then a
                  Llama-like 1B model with random weights: a text whole, in chunks of 1, 7 and 64
    speed         linear against torch.matmul, attention against SDPA, the model exact against fast

Times are medians of CUDA-graph replays over inputs that do not fit the L2 cache together (the
model's, where stock kernels cannot be captured, are of eager steps). Everything goes to one JSON
file, written after each section, so a run that is cut short still leaves what it learnt.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilter.models.batch import Batch, KVView
from kilter.models.decoder import Decoder
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.ops.cuda import activation, attention, embedding, linear, logprob, norm, rope

BUDGET_S = 330.0  # no new measurement starts after this
DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PAGE = 16
LLAMA_1B = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=2048, ffn_size=8192,
    num_heads=32, num_kv_heads=8, head_dim=64, layers=(LayerSpec(RopeSpec(theta=5e5)),) * 16,
    max_positions=4096, tied_head=True)


class Report:
    """Checks and measurements of one run; `save` writes them all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.monotonic()
        self.facts: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []
        self.speed: list[dict[str, Any]] = []

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [c for c in self.checks if not c["ok"]]

    def check(self, name: str, ok: bool, **details: Any) -> None:
        self.checks.append({"name": name, "ok": ok, **details})
        print(f"  {'ok  ' if ok else 'FAIL'} {name}  {_words(details)}")

    def measure(self, name: str, **numbers: Any) -> None:
        self.speed.append({"name": name, **numbers})
        print(f"  {name:44s} {_words(numbers)}")

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({
            "ok": not self.failures, "seconds": round(time.monotonic() - self.start, 1),
            "facts": self.facts, "checks": self.checks, "speed": self.speed}, indent=1))
        part.replace(self.path)

    def section(self, title: str, body: Callable[[Report], None]) -> None:
        print(f"\n{title}")
        if time.monotonic() - self.start > BUDGET_S:
            print("  left out: the time is up")
            self.facts.setdefault("left_out", []).append(title)
            return
        try:
            body(self)
        except Exception as error:  # one broken op must not hide what the others do
            self.check(f"{title} runs", False, error=f"{type(error).__name__}: {error}"[:500])
        self.save()


def _words(numbers: dict[str, Any]) -> str:
    return "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                     for k, v in numbers.items())


def main() -> int:
    """Runs all sections. 0: all good; 1: a check failed; 2: no GPU."""
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU and a torch built for CUDA; this machine's torch "
              f"({torch.__version__}) sees none. Nothing was checked.", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or "bench/results/gpu_check.json")
    report = Report(out / "gpu_check.json" if out.is_dir() else out)
    torch.manual_seed(0)
    with torch.inference_mode():
        report.section("Machine", machine)
        report.section("Correctness against float64", correctness)
        report.section("Exactness of ops", exactness)
        for name, dtype in DTYPES.items():
            report.section(f"Exactness of a 1B model, {name}",
                           partial(model_exactness, name=name, spec=LLAMA_1B, dtype=dtype))
        report.section("Speed: limits and linear", linear_speed)
        report.section("Speed: attention", attention_speed)
        report.section("Speed: 1B model in bf16, exact and fast", model_speed)
    report.save()
    print(f"\n{len(report.checks) - len(report.failures)} of {len(report.checks)} checks passed in "
          f"{time.monotonic() - report.start:.0f} s; numbers are in {report.path}.")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


def machine(report: Report) -> None:
    import triton

    properties: Any = torch.cuda.get_device_properties(0)
    report.facts |= {
        "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": properties.L2_cache_size / 2**20, "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__,
        "python": sys.version.split()[0]}
    print("  " + _words(report.facts))


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# --- correctness -----------------------------------------------------------------------------


def correctness(report: Report) -> None:
    for name, dtype in DTYPES.items():
        limit = 2e-6 if dtype == torch.float32 else 5e-3

        def close(op: str, actual: Tensor, expected: Tensor, limit: float = limit,
                  name: str = name) -> None:
            error = float((actual.double() - expected).norm() / expected.norm())
            report.check(f"{op} {name}", error <= limit, relative_error=error)  # NaN fails

        for rows in (1, 100, 1000):
            x, w = randn(rows, 1000, dtype=dtype), randn(520, 1000, dtype=dtype)
            bias, residual = randn(520, dtype=dtype), randn(rows, 520, dtype=dtype)
            y = x.double() @ w.double().T + bias.double()
            close(f"linear {rows}x1000x520", linear.linear(x, w, bias, residual),
                  y + residual.double())
        close("linear, 8 splits", linear.linear(x, w, bias, splits=8), y)
        close("linear_grad_input", linear.linear_grad_input(residual, w),
              residual.double() @ w.double())
        gate, up = linear.linear(x, w, bias).double().chunk(2, -1)
        close("gated_linear silu", linear.gated_linear(x, w, bias), F.silu(gate) * up)
        close("gated_linear gelu_tanh", linear.gated_linear(x, w, bias, "gelu_tanh"),
              F.gelu(gate, approximate="tanh") * up)
        weight, v = randn(1000, dtype=dtype), x.double()
        close("rms_norm", norm.rms_norm(x, weight, 1e-6),
              v * (v.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double())
        tokens = torch.randint(0, 520, (70,), device=DEVICE)
        close("embed", embedding.embed(tokens, w, 3.7), w[tokens].double() * 3.7)
        logits = randn(9, 50001, dtype=dtype) * 5
        close("log_softmax", logprob.log_softmax(logits), logits.double().log_softmax(-1), 2e-6)
        report.check(f"argmax {name}", torch.equal(logprob.argmax(logits), logits.argmax(-1)))

        qkv, angles = randn(50, 2, 6, 96, dtype=dtype), randn(50, 48)
        q, key, value = rope.rope_qkv(qkv, torch.arange(50, device=DEVICE), angles.cos(),
                                      angles.sin(), kv_dtype=dtype)
        close("rope q", q, _rotated(qkv[:, :, :4].reshape(50, 8, 96), angles))
        close("rope k", key, _rotated(qkv[:, :, 4], angles))
        report.check(f"rope v {name}", torch.equal(value, qkv[:, :, 5]))
        for dim, window in ((64, None), (128, 200), (96, None), (256, None)):
            q, k, v = (randn(300, n, dim, dtype=dtype) for n in (6, 2, 2))
            y = attention.attention(q, k, v, ints(0, 300), scale=dim ** -0.5, window=window,
                                    max_seqlen=300)
            close(f"attention d={dim} window={window}", y, _attention(q, k, v, window))


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    (a, b), c, s = x.double().chunk(2, -1), angles.double().cos(), angles.double().sin()
    c, s = c[:, None], s[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    length, repeat = q.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    place = torch.arange(length, device=q.device)
    distance = place[:, None] - place
    scores = torch.einsum("thd,shd->hts", q.double(), k) * q.shape[-1] ** -0.5
    seen = (distance >= 0) & (distance < (window or length))
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


# --- exactness -------------------------------------------------------------------------------


def exactness(report: Report, rows: int = 300) -> None:
    for name, dtype in DTYPES.items():
        x, w = randn(rows, 2000, dtype=dtype), randn(1030, 2000, dtype=dtype)
        whole = linear.linear(x, w)
        bad = [n for n in range(1, rows + 1) if not torch.equal(linear.linear(x[:n], w), whole[:n])
               or not torch.equal(linear.linear(x[-n:], w), whole[-n:])]
        report.check(f"linear {name}: rows 1..{rows}, first and last", not bad, differing=bad[:20])
        order = torch.randperm(rows, device=DEVICE)
        report.check(f"linear {name}: rows in another order",
                     torch.equal(linear.linear(x[order], w), whole[order]))
        tiles = linear.TILES_16_BIT if dtype == torch.bfloat16 else linear.TILES_FP32
        odd = [str(t) for t in tiles
               if not torch.equal(linear.launch(x, w, None, None, tile=t), whole)]
        report.check(f"linear {name}: every tile", not odd, differing=odd)
        both = linear.linear(x, w)
        for act in activation.ACTIVATIONS:
            report.check(f"gated_linear {name} {act} = linear, then activation",
                         torch.equal(linear.gated_linear(x, w, None, act),
                                     activation.gated_activation(both, act)))
        weight = randn(2000)
        normed, scores = norm.rms_norm(x, weight, 1e-6), logprob.log_softmax(whole)
        report.check(f"rms_norm and log_softmax {name}: each row alone", all(
            torch.equal(norm.rms_norm(x[t:t + 1], weight, 1e-6)[0], normed[t])
            and torch.equal(logprob.log_softmax(whole[t:t + 1])[0], scores[t])
            for t in range(0, rows, 7)))
        _attention_exactness(report, name, dtype, rows)
    x, w = randn(rows, 2000), randn(1030, 2000, dtype=torch.bfloat16)
    report.check("linear: float32 rows, bfloat16 weights = the weights widened",
                 torch.equal(linear.linear(x, w), linear.linear(x, w.float())))


def _attention_exactness(report: Report, name: str, dtype: torch.dtype, length: int) -> None:
    dim = 64
    q, k, v = (randn(length, n, dim, dtype=dtype) for n in (8, 2, 2))
    for window in (None, 100):
        whole = attention.attention(q, k, v, ints(0, length), scale=0.125, window=window,
                                    max_seqlen=length)
        for page, chunk in ((16, 1), (16, 7), (1, 64), (48, length)):
            pages = -(-length // page)
            order = torch.randperm(pages + 3, device=DEVICE)[:pages]
            slots = order[torch.arange(length, device=DEVICE) // page] * page + torch.arange(
                length, device=DEVICE) % page
            caches = [torch.full(((pages + 3) * page, 2, dim), torch.nan, dtype=dtype,
                                 device=DEVICE) for _ in "kv"]
            caches[0][slots], caches[1][slots] = k, v
            parts = [attention.attention(
                q[a:a + chunk], caches[0], caches[1], ints(0, min(chunk, length - a)),
                context_S=ints(min(a + chunk, length)), page_table_SP=order.int()[None],
                page_size=page, scale=0.125, window=window, max_seqlen=chunk)
                for a in range(0, length, chunk)]
            report.check(f"attention {name} window={window}: chunks of {chunk}, pages of {page}",
                         torch.equal(torch.cat(parts), whole))
        tile = replace(attention.choose(dtype, dim, q.device), segment=1)
        one, many = (attention.launch(
            q[-1:], caches[0], caches[1], ints(0, 1), ints(length), order.int()[None], page, 0.125,
            window, 1, tile, parts)[0] for parts in (0, -(-length // tile.keys)))
        report.check(f"attention {name} window={window}: segments side by side",
                     torch.equal(one, many))


def build(spec: ModelSpec, dtype: torch.dtype, exact: bool = True) -> Decoder:
    """A decoder with random weights of one dtype."""
    with torch.device(DEVICE):
        model = Decoder(spec, exact=exact, kv_dtype=dtype).to(dtype)
    for path, parameter in model.named_parameters():
        if path.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    return model.eval().requires_grad_(False)


def cached_batch(model: Decoder, tokens_ST: Tensor, past: int, kv: KVView | None = None) -> Batch:
    """The next tokens [S, n] of S sequences with ``past`` cached tokens each."""
    spec, (sequences, new) = model.spec, tokens_ST.shape
    pages = -(-spec.max_positions // PAGE)
    if kv is None:
        shape = (sequences * pages * PAGE, spec.num_kv_heads, spec.head_dim)
        caches = [torch.full(shape, torch.nan, dtype=model.kv_dtype, device=DEVICE)
                  for _ in range(2 * spec.num_layers)]
        table = torch.arange(sequences * pages, dtype=torch.int32, device=DEVICE)
        kv = KVView(caches[::2], caches[1::2], PAGE, table.view(sequences, pages), table, table)
    place = torch.arange(past, past + new, device=DEVICE)
    slots = kv.page_table_SP[:, place // PAGE] * PAGE + place % PAGE
    view = replace(kv, context_S=ints(*[past + new] * sequences), slots_T=slots.flatten().int())
    bounds = torch.arange(0, sequences * new + 1, new, dtype=torch.int32, device=DEVICE)
    return Batch(tokens_ST.flatten(), place.int().repeat(sequences), bounds, new, view)


def model_exactness(report: Report, name: str, spec: ModelSpec, dtype: torch.dtype,
                    length: int = 300) -> None:
    model = build(spec, dtype)
    tokens = torch.randint(0, spec.vocab_size, (4, length), device=DEVICE)
    whole = model(Batch.of(tokens[:1].tolist(), DEVICE))
    report.check(f"model {name}: finite logits", bool(whole.isfinite().all()))
    for chunk in (1, 7, 64):
        kv, parts = None, []
        for start in range(0, length, chunk):
            batch = cached_batch(model, tokens[:1, start:start + chunk], start, kv)
            parts.append(model(batch))
            kv = batch.kv
        difference = float((torch.cat(parts).float() - whole.float()).abs().max())
        report.check(f"model {name}: {length} tokens in chunks of {chunk}", difference == 0.0,
                     max_difference=difference)
    packed = model(Batch.of(tokens.flip(0).tolist(), DEVICE))[-length:]
    report.check(f"model {name}: last of a batch of 4", torch.equal(packed, whole))
    cached = model(cached_batch(model, tokens.flip(0), 0))[-length:]
    report.check(f"model {name}: last of a batch of 4, cached", torch.equal(cached, whole))


# --- speed -----------------------------------------------------------------------------------


def graph_ms(calls: list[Callable[[], Any]], repeats: int = 15) -> float:
    """Milliseconds per call: the median replay of a CUDA graph that runs all of them in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return eager_ms(graph.replay, repeats) / len(calls)


def eager_ms(call: Callable[[], Any], repeats: int = 15) -> float:
    """Milliseconds of a call, launch overhead included: the median by CUDA events."""
    times = []
    for i in range(repeats + 2):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(before.elapsed_time(after))
    return statistics.median(times)


def copies(bytes_each: int, least: int = 2) -> int:
    """How many inputs it takes to overflow the L2 cache twice."""
    properties: Any = torch.cuda.get_device_properties(0)
    return max(least, min(64, -(-2 * properties.L2_cache_size // bytes_each)))


def linear_speed(report: Report) -> None:
    a, b = randn(8192, 8192, dtype=torch.bfloat16), randn(8192, 8192, dtype=torch.bfloat16)
    peak = 2 * 8192**3 / graph_ms([partial(torch.matmul, a, b)]) / 1e9
    source, target = torch.empty(2, 1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    bandwidth = 2 * source.numel() / graph_ms([partial(target.copy_, source)]) / 1e6
    del source, target
    report.facts |= {"matmul_tflops": round(peak, 1), "copy_gb_s": round(bandwidth)}
    report.measure("limits", matmul_tflops=peak, copy_gb_s=bandwidth)

    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336)):
        ws = [randn(n, k, dtype=torch.bfloat16) * 0.02 for _ in range(copies(2 * n * k))]
        for rows in (1, 16, 64, 256, 4096):
            x = randn(rows, k, dtype=torch.bfloat16)
            ours = graph_ms([partial(linear.linear, x, w) for w in ws])
            torchs = graph_ms([partial(F.linear, x, w) for w in ws])
            tflops, moved = 2 * rows * n * k / ours / 1e9, 2 * (n * k + rows * (n + k)) / ours / 1e6
            report.measure(f"linear bf16 {rows}x{k} -> {n}", ms=ours, torch_ms=torchs,
                           times_torch=ours / torchs, tflops=tflops, of_peak=tflops / peak,
                           gb_s=moved, of_copy=moved / bandwidth)
            if n == k:
                report.measure("  by tile, ms", **{
                    f"{t.rows}x{t.columns}": graph_ms([
                        partial(linear.launch, x, w, None, None, tile=t) for w in ws])
                    for t in linear.TILES_16_BIT if rows > t.rows // 2 or t.rows == 64})
    w32 = [randn(4096, 4096) for _ in range(copies(4 << 24))]
    for rows in (1, 512):
        x = randn(rows, 4096)
        ours = graph_ms([partial(linear.linear, x, w) for w in w32])
        torchs = graph_ms([partial(F.linear, x, w) for w in w32])
        report.measure(f"linear fp32 {rows}x4096 -> 4096", ms=ours, times_torch=ours / torchs,
                       tflops=2 * rows * 4096**2 / ours / 1e9)
    x, weight = randn(4096, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    ours = graph_ms([partial(norm.rms_norm, x, weight, 1e-6, False, x)] * 8)
    report.measure("rms_norm + residual 4096x4096", ms=ours, gb_s=3 * 2 * x.numel() / ours / 1e6)


def attention_speed(report: Report) -> None:
    bandwidth = report.facts.get("copy_gb_s", float("nan"))
    heads, groups = 32, 8
    for dim in (64, 128):
        for length in (1024, 8192):
            q, k, v = (randn(length, n, dim, dtype=torch.bfloat16) for n in (heads, groups, groups))
            cu, scale = ints(0, length), dim ** -0.5
            ours = graph_ms([partial(attention.attention, q, k, v, cu, scale=scale,
                                     max_seqlen=length)])
            sdpa = graph_ms([partial(_sdpa, q, k, v)])
            tflops = 2 * length**2 * heads * dim / ours / 1e9
            report.measure(f"attention prefill {length} d={dim}", ms=ours, sdpa_ms=sdpa,
                           times_sdpa=ours / sdpa, tflops=tflops)
    for sequences, context in ((1, 8192), (16, 8192), (64, 1024)):
        pages = context // PAGE
        k, v = (randn(sequences * context, groups, 128, dtype=torch.bfloat16) for _ in "kv")
        table = torch.randperm(sequences * pages, device=DEVICE).int().view(sequences, pages)
        q = randn(sequences, heads, 128, dtype=torch.bfloat16)
        cu, contexts = ints(*range(sequences + 1)), ints(*[context] * sequences)
        ours = graph_ms([partial(
            attention.attention, q, k, v, cu, context_S=contexts, page_table_SP=table,
            page_size=PAGE, scale=128 ** -0.5, max_seqlen=1)] * 4)
        k, v = (c.view(sequences, context, groups, 128).transpose(1, 2) for c in (k, v))
        sdpa = graph_ms([partial(
            F.scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True)] * 4)
        moved = 2 * 2 * sequences * context * groups * 128 / ours / 1e6
        report.measure(f"attention decode {sequences} x {context}", ms=ours,
                       times_sdpa=ours / sdpa, gb_s=moved, of_copy=moved / bandwidth)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def model_speed(report: Report) -> None:
    bandwidth = report.facts.get("copy_gb_s", float("nan"))
    exact = build(LLAMA_1B, torch.bfloat16)
    fast = build(LLAMA_1B, torch.bfloat16, exact=False)
    weights = sum(p.numel() * p.element_size() for p in exact.parameters())
    for sequences, new, past in ((1, 1, 500), (16, 1, 500), (1, 2048, 0)):
        tokens = torch.randint(0, LLAMA_1B.vocab_size, (sequences, new), device=DEVICE)
        batch = cached_batch(exact, tokens, past)
        assert batch.kv is not None
        for cache in (*batch.kv.keys, *batch.kv.values):
            cache.normal_()
        slow_path, fast_path = eager_ms(partial(exact, batch)), eager_ms(partial(fast, batch))
        replayed = graph_ms([partial(exact, batch)])
        report.measure(
            f"model {'decode' if new == 1 else 'prefill'} {sequences} x {new}",
            exact_ms=slow_path, fast_ms=fast_path, exact_times_fast=slow_path / fast_path,
            exact_graph_ms=replayed, tokens_per_s=sequences * new / replayed * 1e3,
            weight_gb_s=weights / replayed / 1e6, of_copy=weights / replayed / 1e6 / bandwidth)


if __name__ == "__main__":
    sys.exit(main())
