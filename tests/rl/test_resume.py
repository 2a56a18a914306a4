"""A run that was cut and resumed is the run that was not: bit for bit on the same ranks, within
rounding on others, with the same prompts, samples and weight of the divergence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kilter.job import dump
from kilter.rl.config import RLJob
from kilter.rl.monitor import Monitor
from kilter.train.checkpoint import CheckpointError
from tests.ranks import RankPool
from tests.rl.tiny_job import MODEL, everyone, make_job, new_run, run_rank, tensors, told

FSDP2 = {"dp": 2, "zero": 3}
# State of every kind: a critic, an adaptive weight, prompts that are replaced, minibatches.
ALL: dict[str, Any] = {
    "algorithm": "ppo", "seed": 1, "steps": 6,
    "critic": {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-6}},
    "recipe": {"kl": "reward", "kl_beta": 0.1, "kl_target": 0.01, "kl_horizon": 100,
               "dynamic": True},
    "update": {"minibatches": 2, "gate": "pass"}, "schedule": {"name": "linear"},
    "checkpoint": {"every": 3, "keep": 0}, "log": {"samples": 99}}


class Died(Exception):
    pass


def die_after(job: dict[str, Any], step: int) -> None:
    """Runs until a step was told of, and stops there as if the process were gone."""
    tell = Monitor.tell

    def stop(self: Monitor, number: int, *args: Any) -> None:
        tell(self, number, *args)
        if number == step:
            raise Died

    with mock.patch.object(Monitor, "tell", stop), pytest.raises(Died):
        run_rank(job)


def cut_and_whole(folder: Path, ranks: RankPool, before: Any, after: Any, **changes: Any
                  ) -> tuple[RLJob, RLJob]:
    """A run of six steps; and one that died at step 5, after the checkpoint of step 3."""
    settings = {**ALL, **changes}
    whole = make_job(folder, **settings, layout=before, output=str(folder / "whole"))
    everyone(ranks, run_rank, whole)
    everyone(ranks, die_after, make_job(folder, **settings, layout=before,
                                        output=str(folder / "cut")), 5)
    cut = make_job(folder, **settings, layout=after, output=str(folder / "cut"))
    everyone(ranks, run_rank, cut)
    return whole, cut


def samples(job: RLJob) -> list[tuple[Any, ...]]:
    lines = (Path(job.output) / "rollouts.jsonl").read_text().splitlines()
    return [(row["step"], row["id"], row["answer"]) for row in map(json.loads, lines)]


def column(job: RLJob, name: str) -> list[Any]:
    return [row[name] for row in told(job)]


@pytest.mark.parametrize("layout", [{}, FSDP2, {"pp": 2}], ids=str)
def test_cut_and_resumed_is_bitwise_the_whole_run(layout: dict[str, Any], tmp_path: Path,
                                                  ranks: RankPool) -> None:
    whole, cut = cut_and_whole(tmp_path, ranks, layout, layout)
    left, right = tensors(whole, 6), tensors(cut, 6)
    assert left.keys() == right.keys()
    assert {name.split(".")[0] for name in left} == {"model", "optimizer", "critic"}
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert samples(cut) == samples(whole) and len(samples(whole)) > 60
    for name in ("step", "reward", "loss", "grad_norm", "kl_beta", "kl", "critic", "lr", "rounds",
                 "gate", "explained_variance"):
        assert column(cut, name) == column(whole, name), name
    assert len(set(column(whole, "kl_beta"))) > 3 and len(set(column(whole, "rounds"))) > 0
    assert [gate["max"] for gate in column(cut, "gate")] == [0.0] * 6


@pytest.mark.parametrize(("before", "after"), [
    ({}, {"dp": 2, "tp": 2, "zero": 3}), (FSDP2, {}), ({"tp": 2}, {"pp": 2})], ids=str)
def test_resumed_on_other_ranks(before: dict[str, Any], after: dict[str, Any], tmp_path: Path,
                                ranks: RankPool) -> None:
    whole, cut = cut_and_whole(tmp_path, ranks, before, after)
    assert samples(cut) == samples(whole)
    assert [gate["max"] for gate in column(cut, "gate")] == [0.0] * 6
    assert column(cut, "kl_beta") == pytest.approx(column(whole, "kl_beta"), rel=1e-5)
    left, right = tensors(whole, 6), tensors(cut, 6)
    for name in left:
        if "optimizer" not in name:
            torch.testing.assert_close(right[name], left[name], rtol=1e-5, atol=1e-5, msg=name)


def test_adapters_resume_bitwise(tmp_path: Path, ranks: RankPool) -> None:
    """The frozen weights are not in the checkpoint; they come from the start again."""
    whole, cut = cut_and_whole(tmp_path, ranks, {}, {}, algorithm="grpo", critic=None,
                               lora={"rank": 4}, recipe={"kl": "loss", "kl_beta": 0.1})
    left, right = tensors(whole, 6), tensors(cut, 6)
    assert all(".adapter." in name for name in left) and left
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert samples(cut) == samples(whole)


def save_model(folder: Path, seed: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)


def test_another_start_is_refused(tmp_path: Path) -> None:
    """Its reference would be another one."""
    save_model(tmp_path / "start", 0)
    job = make_job(tmp_path, steps=2, model={"config": None, "std": 0.02,
                                             "path": str(tmp_path / "start")})
    run_rank(dump(job))
    save_model(tmp_path / "start", 1)
    longer = make_job(tmp_path, steps=3, model={"config": None, "std": 0.02,
                                                "path": str(tmp_path / "start")})
    with pytest.raises(CheckpointError, match=r"started from other weights than .* has now"):
        run_rank(dump(longer))
    save_model(tmp_path / "start", 0)
    assert run_rank(dump(longer)).step == 3


def test_what_may_change_and_what_may_not(tmp_path: Path) -> None:
    run_rank(dump(make_job(tmp_path, steps=2)))
    with pytest.raises(CheckpointError, match=r"another job: optimizer\.eps, recipe\.entropy"):
        run_rank(dump(make_job(tmp_path, steps=4, optimizer={"eps": 1e-3},
                               recipe={"entropy": 0.1})))
    ending = run_rank(dump(make_job(tmp_path, steps=3, log={"samples": 1},
                                    recompute={"mode": "full"})))
    assert ending.step == 3
    with pytest.raises(CheckpointError, match="past the 2 steps of this job"):
        run_rank(dump(make_job(tmp_path, steps=2)))


def test_what_a_run_is_steered_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Learning rates and clipping may change on the way, the critic's too; and it is told."""
    ppo: dict[str, Any] = {"algorithm": "ppo", "critic": {"optimizer": {"lr": 1e-2}}}
    run_rank(dump(make_job(tmp_path, steps=2, **ppo)))
    ppo["critic"] = {"optimizer": {"lr": 0.0}}
    job = make_job(tmp_path, steps=3, **ppo, update={"max_norm": 0.5}, optimizer={"lr": 0.0},
                   checkpoint={"every": 1})
    assert run_rank(dump(job)).step == 3
    told = capsys.readouterr().out
    for change in ("critic.optimizer.lr 0.0 in place of 0.01", "optimizer.lr 0.0 in place of 0.01",
                   "update.max_norm 0.5 in place of 1.0"):
        assert change in told
    before, after = tensors(job, 2), tensors(job, 3)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.split(".")[-1] in ("exp_avg", "exp_avg_sq", "step")
                         for name in moved)


def test_answers_end_as_they_will_when_served(tmp_path: Path) -> None:
    """With the end tokens of the model's own files, which a tokenizer need not know of."""
    save_model(tmp_path / "start", 0)
    config = tmp_path / "start" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [2, 7]}))
    (tmp_path / "start" / "generation_config.json").unlink()
    job = make_job(tmp_path, model={"config": None, "std": 0.02, "path": str(tmp_path / "start")})
    with new_run(dump(job)) as run:
        engine = run.roles.engine.engine
        assert {2, 7} <= set(engine.eos_token_ids)


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    job = make_job(tmp_path, steps=2)
    run_rank(dump(job))
    before = (Path(job.output) / "metrics.jsonl").read_bytes()
    checkpoints = sorted(os.listdir(Path(job.output) / "checkpoints"))
    assert run_rank(dump(job)).step == 2
    assert (Path(job.output) / "metrics.jsonl").read_bytes() == before
    assert sorted(os.listdir(Path(job.output) / "checkpoints")) == checkpoints
