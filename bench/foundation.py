"""Decode, prefill and cold start beside `transformers`, in one run, as `make bench` does it.

    python -m bench.foundation [--repeats 5] [--quick]

Contenders take turns (A B C A B C …), so that a slow minute of the machine hits all of them; every
figure is the median over the turns and every ratio the median of the ratios turn by turn. Writes
bench/results/foundation.json and the table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.page import write_section
from kilter.home import home
from kilter.models.linear import Embedding, Linear
from kilter.ops.cpu.build import detect_isa
from kilter.ops.packed import PackedWeight
from kilter.report.machine import cpu_name, gemm_rate, read_bandwidth
from kilter.serve.engine import Engine
from kilter.serve.exactness import next_chunk
from kilter.serve.load import load_engine
from kilter.serve.params import SamplingParams
from kilter.serve.request import Request
from kilter.weights.bridge import open_model
from kilter.weights.export import export_hf
from kilter.weights.pull import pull
from kilter.weights.tokenizer import write_tokenizer

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
PROMPT_TOKENS = 16
NEW_TOKENS = 32
PREFILL_TOKENS = 512
BATCHES = (1, 8, 16)


@dataclass
class Contender:
    """Something that decodes and prefills: each call returns tokens per second."""

    name: str
    decode: Callable[[int], float]  # batch size -> generated tokens/s, all sequences together
    prefill: Callable[[], float]
    weight_bytes: int  # read once per decode step
    storage: str


def prompts(batch: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(1000, 40000, (batch, length), generator=generator).tolist()


def weight_bytes(engine: Engine) -> int:
    """Bytes of the matrices that one decode step reads: all linears and the output head."""
    total = 0
    model = engine.model
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            if isinstance(module, Embedding) and model.head is not None:
                continue  # an untied embedding gives single rows
            weight = module.weight
            total += (weight.nbytes if isinstance(weight, PackedWeight)
                      else weight.numel() * weight.element_size())
    return total


def kilter_contender(name: str, folder: Path, storage: str, exact: bool = True,
                     products: str = "fp32") -> Contender:
    engine = load_engine(folder, storage=storage, exact=exact, products=products, context=1024,
                         max_running=max(BATCHES))

    def decode(batch: int) -> float:
        params = SamplingParams(max_tokens=NEW_TOKENS + 1, temperature=0, ignore_eos=True)
        for prompt in prompts(batch, PROMPT_TOKENS):
            engine.submit(prompt, params)
        seen: set[int] = set()
        while len(seen) < batch:  # every prompt's first token comes from its prefill
            seen.update(delta.request for delta in engine.step())
        count, start = 0, time.perf_counter()
        while engine.busy:
            count += sum(len(delta.choices) for delta in engine.step())
        seconds = time.perf_counter() - start
        engine.flush_cache()
        return count / seconds

    def prefill() -> float:
        request = Request(0, prompts(1, PREFILL_TOKENS)[0], PREFILL_TOKENS)
        start = time.perf_counter()
        chunk = next_chunk(engine.executor.pool, request, PREFILL_TOKENS)
        engine.executor.run([chunk._replace(rows=1)])
        seconds = time.perf_counter() - start
        engine.executor.pool.release(request.pages)
        return PREFILL_TOKENS / seconds

    return Contender(name, decode, prefill, weight_bytes(engine), storage)


def transformers_contender(name: str, folder: Path, dtype: torch.dtype) -> Contender:
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def generate(batch: int, length: int, new: int) -> float:
        ids = torch.tensor(prompts(batch, length))
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=new, min_new_tokens=new)
        assert out.shape[1] == length + new
        return time.perf_counter() - start

    def decode(batch: int) -> float:
        one = generate(batch, PROMPT_TOKENS, 1)
        return batch * NEW_TOKENS / (generate(batch, PROMPT_TOKENS, NEW_TOKENS + 1) - one)

    def prefill() -> float:
        return PREFILL_TOKENS / generate(1, PREFILL_TOKENS, 1)

    size = sum(p.nbytes for p in model.parameters() if p.ndim == 2)
    return Contender(name, decode, prefill, size, str(dtype).removeprefix("torch."))


def hf_folder(model: Path) -> Path:
    """The GGUF's weights as an fp32 folder that `transformers` loads, made once."""
    folder = home() / "bench" / f"{MODEL}-hf"
    if not folder.exists():
        from kilter.weights.tokenizer import open_tokenizer

        folder.parent.mkdir(parents=True, exist_ok=True)
        source = open_model(model)
        export_hf(source, folder)
        open_tokenizer(source).save(folder)
    return folder


def cold_start(repeats: int) -> dict[str, float]:
    """Seconds from starting `kilter chat` to its first output byte, and the parts."""
    command = [sys.executable, "-m", "kilter", "chat", MODEL, "-p", "Hello", "--max-tokens", "8"]
    totals = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            if not child.stdout.read(1):
                raise RuntimeError(f"`{' '.join(command)}` printed nothing.")
            totals.append(time.perf_counter() - start)
            child.stdout.read()
    imports = []
    code = ("import time; start = time.perf_counter(); import kilter.serve.load; "
            "print(time.perf_counter() - start)")
    for _ in range(repeats):
        imports.append(float(subprocess.run([sys.executable, "-c", code], capture_output=True,
                                            text=True, check=True).stdout))
    loads = []
    for _ in range(repeats):
        start = time.perf_counter()
        load_engine(pull(MODEL), max_running=1)
        loads.append(time.perf_counter() - start)
    return {"first_byte_s": statistics.median(totals[1:]), "imports_s": statistics.median(imports),
            "load_and_pack_s": statistics.median(loads)}


def measure(contenders: list[Contender], repeats: int) -> dict[str, dict[str, list[float]]]:
    """name -> kind ("decode 1", …, "prefill") -> tokens/s per turn."""
    figures: dict[str, dict[str, list[float]]] = {c.name: {} for c in contenders}
    kinds: list[tuple[str, Callable[[Contender], float]]] = [
        (f"decode {batch}", lambda c, b=batch: c.decode(b)) for batch in BATCHES]
    kinds.append(("prefill", lambda c: c.prefill()))
    for kind, call in kinds:
        for turn in range(repeats + 1):
            for contender in contenders:
                value = call(contender)
                if turn:  # the first turn warms up
                    figures[contender.name].setdefault(kind, []).append(value)
            print(f"{kind}: turn {turn} of {repeats}", file=sys.stderr, flush=True)
    return figures


def summarise(contenders: list[Contender], figures: dict[str, dict[str, list[float]]],
              bandwidth: float, gemm: float, flops_per_token: float) -> list[dict[str, object]]:
    base = figures["transformers"]
    rows = []
    for contender in contenders:
        row: dict[str, object] = {"name": contender.name, "storage": contender.storage,
                                  "weight_bytes": contender.weight_bytes}
        for kind, values in figures[contender.name].items():
            ratio = statistics.median(a / b for a, b in zip(values, base[kind], strict=True))
            row[kind] = {"tokens_per_s": statistics.median(values), "vs_transformers": ratio}
        decode = statistics.median(figures[contender.name]["decode 1"])
        prefill = statistics.median(figures[contender.name]["prefill"])
        row["memory_limit_fraction"] = decode * contender.weight_bytes / bandwidth
        row["gemm_limit_fraction"] = prefill * flops_per_token / gemm
        rows.append(row)
    return rows


def table(result: dict) -> str:
    lines = [
        f"{result['date']}, {result['cpu']} ({result['isa']}, {result['threads']} threads), "
        f"torch {result['torch']}: memory read {result['bandwidth'] / 1e9:.1f} GB/s, fp32 GEMM "
        f"{result['gemm'] / 1e9:.0f} GFLOP/s. {result['model']}; tokens/s, and the ratio to "
        "transformers in the same run.", "",
        "| | weights | decode ×1 | decode ×8 | decode ×16 | prefill 512 | of memory limit (×1) "
        "| of GEMM limit (prefill) |", "|---|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        cells = [f"{row[k]['tokens_per_s']:.1f} ({row[k]['vs_transformers']:.2f}×)"
                 for k in ("decode 1", "decode 8", "decode 16", "prefill")]
        lines.append(f"| {row['name']} | {row['storage']}, {row['weight_bytes'] / 1e6:.0f} MB | "
                     + " | ".join(cells) + f" | {row['memory_limit_fraction']:.0%} "
                     f"| {row['gemm_limit_fraction']:.0%} |")
    cold = result["cold_start"]
    lines += ["", f"Cold start of `kilter chat {MODEL} -p …`: first byte after "
              f"{cold['first_byte_s']:.2f} s (of it imports {cold['imports_s']:.2f} s, opening, "
              f"reading and packing the weights {cold['load_and_pack_s']:.2f} s)."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-docs", action="store_true", help="leave docs/benchmarks.md alone")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = pull(MODEL, after=write_tokenizer)
    hf = hf_folder(folder)
    contenders = [
        transformers_contender("transformers", hf, torch.float32),
        transformers_contender("transformers bf16", hf, torch.bfloat16),
        kilter_contender("kilter fp32", hf, "fp32"),
        kilter_contender("kilter bf16", hf, "bf16"),
        kilter_contender("kilter int8", hf, "int8"),
        kilter_contender("kilter file's own (auto)", folder, "auto"),
        kilter_contender("kilter bf16 --products bf16", hf, "bf16", products="bf16"),
        kilter_contender("kilter auto --products bf16", folder, "auto", products="bf16"),
        kilter_contender("kilter --fast fp32", hf, "fp32", exact=False),
    ]
    bandwidth, gemm = read_bandwidth(2.0), gemm_rate(2.0)
    figures = measure(contenders, args.repeats)
    bandwidth, gemm = max(bandwidth, read_bandwidth(2.0)), max(gemm, gemm_rate(2.0))
    # 2 FLOPs per weight of the layers' matrices; the head runs on the last token only.
    spec = open_model(folder).spec
    per_layer = (spec.qkv_rows + spec.num_heads * spec.head_dim + 3 * spec.ffn_size)
    flops_per_token = 2.0 * spec.num_layers * spec.hidden_size * per_layer
    result = {
        "date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "isa": detect_isa(),
        "threads": args.threads, "torch": torch.__version__, "python": platform.python_version(),
        "model": MODEL, "repeats": args.repeats, "bandwidth": bandwidth, "gemm": gemm,
        "rows": summarise(contenders, figures, bandwidth, gemm, flops_per_token),
        "cold_start": cold_start(args.repeats),
        "figures": figures,
    }
    out = HERE / "results" / "foundation.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    if not args.no_docs:
        write_section("foundation", text)
    print(text)


if __name__ == "__main__":
    main()
