"""One training step (forward and backward, fp32) beside `transformers`, in one run.

    python -m bench.train_step [--repeats 5] [--tokens 2048] [--threads 2]

Kilter packs documents of mixed lengths, about 256 tokens each, into one flat batch on the exact
path. transformers gets its two best forms of as many tokens, both without padding: equal documents
of 256 side by side, and one sequence. Contenders take turns; seconds are medians over the turns, as
the clock and as the processor counts them (the second says more on a busy machine), and ratios are
medians of the ratios turn by turn. That Kilter's gradients are the same bits in every turn, and
close to transformers' on the same documents, is checked. Writes bench/results/train_step.json and
the section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.foundation import hf_folder
from bench.page import provenance, write_section
from kilter.models import Batch, Decoder
from kilter.ops.cpu.library import set_num_threads
from kilter.weights.bridge import open_model
from kilter.weights.pull import pull
from kilter.weights.tokenizer import write_tokenizer

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
DOCUMENT = 256


def documents(tokens: int) -> list[list[int]]:
    """Random texts of half to one and a half times `DOCUMENT` tokens, `tokens` together."""
    rng = random.Random(5)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = rng.randint(DOCUMENT // 2, DOCUMENT * 3 // 2)
        lengths.append(left if left < length + DOCUMENT // 2 else length)
    return [[rng.randrange(1000, 40000) for _ in range(n)] for n in lengths]


def kilter_step(model: Decoder, texts: list[list[int]]) -> Callable[[], None]:
    batch = Batch.of(texts)
    targets = torch.tensor([t for text in texts for t in [*text[1:], 0]])
    valid = torch.tensor([float(i + 1 < len(text)) for text in texts for i in range(len(text))])
    counts = valid / valid.sum()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss, _ = model.ops.head_loss(model.hidden(batch), model.embed.weight, targets, counts)
        loss.backward()

    return step


def peer_step(model: Any, rows: int, tokens: int) -> Callable[[], None]:
    ids = torch.tensor([t for text in documents(tokens) for t in text]).view(rows, -1)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, use_cache=False).loss.backward()

    return step


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """(seconds on the clock, seconds of the processor)."""
    clock, processor = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - clock, time.process_time() - processor


def gradients(model: Decoder) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_against(peer: Any, model: Decoder) -> float:
    """The largest relative difference (Frobenius norm) of two gradients by the same documents: of
    the embedding, which everything flows back to, and of the last norm."""
    texts = documents(256)
    kilter_step(model, texts)()
    peer.zero_grad(set_to_none=True)
    total = sum(len(text) - 1 for text in texts)
    for text in texts:
        ids = torch.tensor([text])
        (peer(ids, labels=ids, use_cache=False).loss * ((len(text) - 1) / total)).backward()
    worst = 0.0
    for ours, theirs in ((model.embed.weight, peer.model.embed_tokens.weight),
                         (model.norm.weight, peer.model.norm.weight)):
        assert isinstance(ours, Tensor) and ours.grad is not None
        worst = max(worst, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
    if worst > 1e-4:
        raise AssertionError(f"Gradients differ from transformers' by {worst:.1e}.")
    return worst


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    folder = hf_folder(pull(MODEL, after=write_tokenizer))
    source = open_model(folder)
    model = Decoder(source.spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = source.read(name)
            assert isinstance(value, Tensor)
            parameter.copy_(value)
    transformers.logging.set_verbosity_error()
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa").train()
    difference = check_against(peer, model)

    texts, rows = documents(args.tokens), args.tokens // DOCUMENT
    steps = {"kilter, packed": kilter_step(model, texts),
             f"transformers, {rows} x {DOCUMENT}": peer_step(peer, rows, args.tokens),
             f"transformers, 1 x {args.tokens}": peer_step(peer, 1, args.tokens)}
    names = list(steps)
    for step in steps.values():
        step()
    first = gradients(model)
    turns: list[dict[str, tuple[float, float]]] = []
    for _ in range(args.repeats):
        turns.append({name: timed(step) for name, step in steps.items()})
        if any(not torch.equal(grad, first[name]) for name, grad in gradients(model).items()):
            raise AssertionError("A gradient was not the same as in the turn before.")

    def medians(which: int) -> tuple[dict[str, float], float]:
        seconds = {n: statistics.median(turn[n][which] for turn in turns) for n in names}
        fastest = min(names[1:], key=seconds.__getitem__)
        return seconds, statistics.median(turn[fastest][which] / turn[names[0]][which]
                                          for turn in turns)

    clock, ratio = medians(0)
    processor, processor_ratio = medians(1)
    result = {"tokens": args.tokens, "documents": len(texts), "threads": args.threads,
              "seconds": clock, "processor_seconds": processor,
              "ratio_to_faster_peer": ratio, "processor_ratio_to_faster_peer": processor_ratio,
              "gradients_equal_bit_for_bit_in_every_turn": True,
              "gradient_difference_to_transformers": difference}
    out = HERE / "results" / "train_step.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    write_section("train_step", "\n".join([
        f"{provenance()} SmolLM2 135M, fp32, {args.tokens} tokens in {len(texts)} documents, "
        f"forward and backward, {args.threads} threads.", "",
        "| | seconds | tokens/s | processor seconds |", "|---|---|---|---|",
        *(f"| {n} | {clock[n]:.2f} | {args.tokens / clock[n]:.0f} | {processor[n]:.2f} |"
          for n in names), "",
        f"Kilter is {ratio:.2f}× the faster peer on the clock, {processor_ratio:.2f}× by the "
        "processor's count. Its gradients are the same bits in every turn."]))


if __name__ == "__main__":
    main()
