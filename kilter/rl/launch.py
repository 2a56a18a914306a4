"""`kilter rl` as a program for `kilter.train.elastic`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from datetime import timedelta

from kilter.mesh.layout import Layout
from kilter.models.spec import ModelSpec
from kilter.parallel.context.plan import check_context
from kilter.parallel.heads import split_model
from kilter.rl.config import RLJob
from kilter.rl.failures import FAILURES
from kilter.rl.loop import FREE, RLRun
from kilter.rl.prompts import Prompts
from kilter.rl.rewards.config import resolve
from kilter.rl.roles import RLInputs, Roles
from kilter.rl.tasks import build_task
from kilter.tokens import Tokenizer
from kilter.train import elastic
from kilter.train.elastic import Exit, Program
from kilter.train.inputs import check_products, check_tensorboard, open_start
from kilter.train.loop import last_checkpoint, stop_signals
from kilter.train.peft import read_start
from kilter.weights.bridge import ModelSource, open_model
from kilter.weights.pull import resolve as find_model
from kilter.weights.tokenizer import open_tokenizer


def run(job: RLJob) -> Exit:
    """Runs a job, in this process or in as many as its placement asks for.

    Raises:
        ValueError: for a job that cannot be run, before anything was started.
    """
    if job.placement.ray:
        from kilter.rl.distributed.launch import run as run_distributed

        return run_distributed(RL, job)
    return elastic.run(RL, job)


def open_rl(job: RLJob) -> RLInputs:
    """Opens what a job names, and checks it against each other.

    Raises:
        ValueError: for anything that is not there, cannot be read or does not fit together.
    """
    check_tensorboard(job.log.tensorboard)
    check_products(job.model, job.launch)
    start = open_start(job.model)
    if job.lora is not None and job.lora.path is not None:
        read_start(job.lora, start.spec)  # refuses an adapter that cannot be trained
    last_checkpoint(job, FREE)  # refuses another job's
    split_model(start.spec, job.rollout.tp)
    _check_layout(job, job.layout, start.spec)
    if job.rollout.environment is not None:
        resolve(job.rollout.environment)
    splits = ["train", "held_out"] if job.eval.prompts else ["train"]
    for split in splits:
        task = build_task(job.task, split)  # type: ignore[arg-type]
        Prompts(task, start.tokenizer, samples=1, format=job.rollout.format, seed=None).at(0)
        if split == "held_out" and len(task) < job.eval.prompts:
            raise ValueError(f"eval.prompts is {job.eval.prompts}, but the held-out split has "
                             f"{len(task)} prompts; ask fewer, or make the split larger.")

    def model_of(path: str | None) -> ModelSource | None:
        return None if path is None else open_model(find_model(path), reward=True)

    critic = model_of(None if job.critic is None else job.critic.path)
    reward = model_of(None if job.reward_model is None else job.reward_model.path)
    if reward is not None and not reward.is_reward:
        raise ValueError(f"reward_model.path is {reward.path}, which is a language model and has "
                         "no verdict to give; name a reward model (kilter train with kind = "
                         '"reward" makes one).')
    reference = None
    if job.reference is not None and job.reference.path is not None:
        reference = open_model(find_model(job.reference.path))
    for name, source in (("critic", critic), ("reward_model", reward), ("reference", reference)):
        if source is not None:
            _check_tokens(name, source, start.tokenizer)
    if job.critic is not None:
        _check_layout(job, job.layout_of("critic"), (critic or start).spec)
    if job.made.reference and job.lora is None:
        _check_layout(job, job.layout_of("reference"), (reference or start).spec)
    if reward is not None:
        _check_layout(job, job.layout_of("reward_model"), reward.spec)
    return RLInputs(start, critic, reward, reference)


def _check_tokens(name: str, source: ModelSource, tokenizer: Tokenizer) -> None:
    """That a model reads the actor's tokens as what they are. Special ones may have other names,
    and a folder without a tokenizer is taken at its word."""
    if source.spec.vocab_size < tokenizer.vocab_size:
        raise ValueError(f"The {name} in {source.path} has {source.spec.vocab_size} tokens, but "
                         f"the actor's tokenizer {tokenizer.vocab_size}: it reads what the actor "
                         "writes, so it needs the same tokenizer.")
    if source.kind == "hf" and not (source.folder / "tokenizer.json").is_file():
        return
    other = open_tokenizer(source)
    for token in range(tokenizer.vocab_size):
        ours, theirs = tokenizer.token_bytes(token), other.token_bytes(token)
        if ours != theirs and token not in tokenizer.special_ids:
            raise ValueError(f"The {name} in {source.path} has another tokenizer than the actor: "
                             f"to the actor token {token} is {ours!r}, to it {theirs!r}. It reads "
                             "the actor's tokens, so it needs the same ones; name a model that "
                             "was made from the actor's.")


def _check_layout(job: RLJob, layout: Layout, spec: ModelSpec) -> None:
    layout.check(layout.world, spec)
    split_model(spec, layout.tp)
    job.pipeline.layers_of(spec, layout.pp)
    check_context(spec, layout, job.context)


def _work(job: RLJob, inputs: RLInputs, device: str, timeout: timedelta | None) -> str:
    with stop_signals() as stop, ExitStack() as closing:
        return RLRun(job, inputs, Roles(job, inputs, device, timeout), closing).go(stop).text


RL = Program("kilter.rl.launch", RLJob, lambda job: job.placement.world(job.layout.world), open_rl,
             _work, FAILURES)

if __name__ == "__main__":
    elastic.main(RL, *sys.argv[1:])
