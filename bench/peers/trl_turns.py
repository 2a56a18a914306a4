"""TRL's GRPO as a contender in its own process: one optimizer step per line on stdin.

    PYTHON trl_turns.py FOLDER PROMPTS THREADS PROMPTS_PER_STEP SAMPLES TOKENS ROWS

Prints "ready"; then for every line runs one iteration (generate, judge, learn) and prints its facts
as JSON; at the end of stdin, its peak memory in bytes. TRL generates with transformers, in fp32,
with the settings that are fastest where memory is enough: no gradient checkpointing, no reference,
no pass for old log-probabilities. Nothing of Kilter is imported; `bench.rl` takes the constants and
the reward from here.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from typing import Any

LR, CLIP, EPSILON = 1e-6, 1.0, 0.2
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.0


def reward(text: str) -> float:
    """The share of digits in an answer: cheap, and seldom the same for two answers."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def judge(completions: list[Any], **_: Any) -> list[float]:
    """TRL's form of it."""
    return [reward(messages[0]["content"]) for messages in completions]


def main() -> None:
    folder, path, *numbers = sys.argv[1:]
    threads, prompts, samples, tokens, rows = map(int, numbers)
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    with open(path, encoding="utf-8") as file:
        data = Dataset.from_list([{"prompt": json.loads(line)["messages"]} for line in file])
    seconds: dict[str, float] = {}

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Tells what parts of a step took."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            return timed("generate", super()._generate_single_turn, *args, **kwargs)

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            return timed("experience", super()._generate_and_score_completions, *args, **kwargs)

    def timed(name: str, work: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = work(*args, **kwargs)
        seconds[name] = time.perf_counter() - start
        return found

    class Turns(transformers.TrainerCallback):
        """Waits for the turn before a step, and reports after it."""

        began = processor = 0.0
        seen = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            print("ready", flush=True)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stdin.readline():
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                print(peak, flush=True)
                raise SystemExit
            self.began, self.processor = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            total = time.perf_counter() - self.began
            found = trainer._metrics["train"]
            for name in ("min", "max"):
                length = found[f"completions/{name}_length"][-1]
                if length != tokens:
                    raise AssertionError(f"An answer has {length} tokens, not {tokens}.")
            every, self.seen = state.num_input_tokens_seen - self.seen, state.num_input_tokens_seen
            print(json.dumps({
                "total": total, "processor": time.process_time() - self.processor,
                "generate": seconds["generate"],
                "judge": seconds["experience"] - seconds["generate"],
                "learn": total - seconds["experience"], "tokens": every}), flush=True)

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            out, use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=len(data),
            per_device_train_batch_size=rows, gradient_accumulation_steps=prompts * samples // rows,
            num_generations=samples, max_completion_length=tokens, temperature=1.0, top_k=0,
            generation_kwargs={"min_new_tokens": tokens}, shuffle_dataset=False, beta=0.0,
            epsilon=EPSILON, loss_type="grpo", learning_rate=LR, lr_scheduler_type="constant",
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, weight_decay=DECAY,
            max_grad_norm=CLIP, optim="adamw_torch_fused", save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa")
        trainer = Timed(model=model, reward_funcs=judge, args=config, train_dataset=data,
                        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
                        callbacks=[Turns()])
        trainer.train()


if __name__ == "__main__":
    main()
