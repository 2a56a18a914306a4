"""A training contender in its own process: `python train_turns.py WHICH THREADS FORMAT ARGS…`, one
step per turn. FORMAT is fp32, or bf16 for torch's autocast.

Prints "ready", then for every line on stdin runs one whole training step (forward, backward, clip,
AdamW) and prints its seconds; at the end of stdin, its peak memory in bytes. Alone and waiting it
costs nothing, so contenders take turns. The peers run in whatever environment has them; nothing of
Kilter is imported for those.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import torch

LR, CLIP = 1e-4, 1.0
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


def turns(step: Callable[[], None]) -> None:
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)


def stepping(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """A plain torch training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS,
                                  weight_decay=DECAY, fused=True)

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def litgpt(bf16: bool, rows: int, length: int) -> None:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    model = GPT(Config.from_name("SmolLM2-135M"))
    ids = torch.randint(1000, 40000, (rows, length))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(ids)
        result: torch.Tensor = chunked_cross_entropy(logits[:, :-1].float(), ids[:, 1:],
                                                     chunk_size=0)
        return result

    turns(stepping(model, loss))


def trainer(bf16: bool, folder: str, rows: int, length: int) -> None:
    """transformers' Trainer; its loop waits for the turn before a step and reports after it."""
    import tempfile

    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                              attn_implementation="sdpa")
    ids = torch.randint(1000, 40000, (rows, length))
    rows_of = [{"input_ids": row, "labels": row} for row in ids] * 1000

    class Turns(transformers.TrainerCallback):
        began = 0.0

        def on_train_begin(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            print("ready", flush=True)

        def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if not sys.stdin.readline():
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                print(peak, flush=True)
                raise SystemExit
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            print(time.perf_counter() - self.began, flush=True)

    with tempfile.TemporaryDirectory() as out:
        args = transformers.TrainingArguments(
            out, per_device_train_batch_size=rows, max_steps=1000, learning_rate=LR,
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=DECAY, max_grad_norm=CLIP,
            optim="adamw_torch_fused", use_cpu=True, bf16=bf16, save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
        transformers.Trainer(model=model, args=args, train_dataset=rows_of,
                             callbacks=[Turns()]).train()


if __name__ == "__main__":
    which, threads, products, *rest = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    if which == "litgpt":
        litgpt(products == "bf16", int(rest[0]), int(rest[1]))
    else:
        trainer(products == "bf16", rest[0], int(rest[1]), int(rest[2]))
