"""64 mixed requests in one call, one by one, and through `transformers` with padding.

    python -m bench.offline [--repeats 3]

The requests share prefixes and differ in length, sampling, stops and number of answers. That the
answers of one call equal those one by one, bit for bit, is checked in every turn; the tokens per
second of the three ways are medians over the turns, which take turns within one run. transformers
decodes greedily, left-padded, 16 at a time, the same prompts to the same lengths. Writes
bench/results/offline.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.foundation import hf_folder
from bench.page import provenance, write_section
from kilter.serve.llm import LLM, Answer
from kilter.serve.params import SamplingParams
from kilter.weights.pull import pull
from kilter.weights.tokenizer import write_tokenizer

HERE = Path(__file__).parent
SUBJECTS = ("rivers", "prime numbers", "bread", "the moon", "trains", "glass", "bees", "maps")


def requests(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Eight groups of eight with a long common beginning each."""
    rng = random.Random(11)
    prompts, params = [], []
    for subject in SUBJECTS:
        shared = llm.tokenizer.encode(
            f"Notes on {subject}. " + "They were collected over many years and by many hands. " * 6)
        for i in range(8):
            prompts.append(shared + llm.tokenizer.encode(f" Note {i}: " + "and so on " * i))
            kind = i % 4
            params.append(SamplingParams(
                max_tokens=rng.choice([8, 16, 32, 64]), temperature=0.0 if kind < 2 else 0.8,
                top_p=0.9 if kind == 2 else 1.0, top_k=40 if kind == 3 else 0, seed=i,
                stop=("\n",) if kind == 1 else (), ignore_eos=kind == 0,
                frequency_penalty=0.5 if kind == 3 else 0.0, logprobs=1 if i == 5 else 0))
    return prompts, params


def facts(answer: Answer) -> tuple:
    best = answer.completions[0]
    return best.token_ids, best.text, best.logprobs, best.finish_reason


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = pull("smollm2-135m", after=write_tokenizer)
    llm = LLM(folder, context=1024, kv_tokens=16384, max_running=64)
    prompts, params = requests(llm)
    transformers.logging.set_verbosity_error()
    peer = transformers.AutoModelForCausalLM.from_pretrained(hf_folder(folder), dtype=torch.float32)
    peer.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def padded(lengths: list[int]) -> None:
        for start in range(0, len(prompts), 16):
            batch, wanted = prompts[start:start + 16], lengths[start:start + 16]
            width, new = max(map(len, batch)), max(wanted)
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            with torch.inference_mode():
                peer.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new,
                              min_new_tokens=new)

    seconds: dict[str, list[float]] = {"one call": [], "one by one": [], "transformers": []}
    tokens = 0
    for _ in range(args.repeats):
        llm.engine.flush_cache()
        start = time.perf_counter()
        together = llm.generate(prompts, params, progress=False)
        seconds["one call"].append(time.perf_counter() - start)
        llm.engine.flush_cache()
        start = time.perf_counter()
        alone = [llm.generate(p, s, progress=False)[0]
                 for p, s in zip(prompts, params, strict=True)]
        seconds["one by one"].append(time.perf_counter() - start)
        if [facts(a) for a in together] != [facts(a) for a in alone]:
            raise AssertionError("A request's answer depended on its company.")
        lengths = [len(answer.token_ids) for answer in together]
        tokens = sum(lengths)
        start = time.perf_counter()
        padded(lengths)
        seconds["transformers"].append(time.perf_counter() - start)
    result: dict[str, Any] = {
        "requests": len(prompts), "prompt_tokens": sum(map(len, prompts)), "tokens": tokens,
        "equal_bit_for_bit": True,
        "tokens_per_s": {way: tokens / statistics.median(s) for way, s in seconds.items()},
        "ratio_to_one_by_one": statistics.median(
            b / a for a, b in zip(seconds["one call"], seconds["one by one"], strict=True)),
        "ratio_to_transformers": statistics.median(
            b / a for a, b in zip(seconds["one call"], seconds["transformers"], strict=True)),
    }
    out = HERE / "results" / "offline.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    rates = result["tokens_per_s"]
    write_section("offline", "\n".join([
        f"{provenance()} {len(prompts)} requests, {result['prompt_tokens']} prompt tokens, "
        f"{tokens} new ones, 2 threads; answers of one call and one by one equal bit for bit.", "",
        "| way | tokens/s |", "|---|---|",
        *(f"| {way} | {rate:.1f} |" for way, rate in rates.items()), "",
        f"One call is {result['ratio_to_one_by_one']:.2f}× one by one and "
        f"{result['ratio_to_transformers']:.2f}× transformers."]))


if __name__ == "__main__":
    main()
