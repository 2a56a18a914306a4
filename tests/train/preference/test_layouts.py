"""Training on pairs is one device's under every layout, and goes on under another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kilter.job import build, dump
from kilter.train.config import TrainJob
from kilter.train.step import token_losses, train_step
from tests.parallel.gradients import Gradients, assert_same
from tests.ranks import RankPool
from tests.train.preference.pairs_run import folder, inputs, pairs_job
from tests.train.tiny_run import losses, metrics, new_run, run

__all__ = ["folder", "inputs"]

LAYOUTS = [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}, {"tp": 2, "pp": 2}]
GATHER = {"method": "all_gather", "placement": "zigzag"}
ULYSSES = {"method": "ulysses", "placement": "contiguous"}
RING = {"method": "ring", "placement": "striped"}
# (layout, context)
OF_CONTEXT = [({"cp": 2}, GATHER), ({"cp": 2}, ULYSSES), ({"cp": 3}, RING),
              ({"cp": 2, "tp": 2, "zero": 3}, GATHER), ({"cp": 2, "pp": 2}, ULYSSES)]


@pytest.fixture(scope="module")
def one_device(inputs: Path) -> dict[str, dict[int, float]]:
    """The losses of three steps and of the evaluation after them (step 0), by kind."""
    found = {}
    for kind in ("reward", "dpo"):
        job = pairs_job(inputs, kind, output=str(inputs / kind))
        run(None, job)
        found[kind] = told(job)
    return found


def told(job: Any) -> dict[int, float]:
    return losses(job) | {0: metrics(job, "eval")[-1]["loss"]}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_any_layout_is_one_device(folder: Path, ranks: RankPool, kind: str, layout: dict[str, Any],
                                  one_device: dict[str, dict[int, float]]) -> None:
    job = pairs_job(folder, kind, layout=layout)
    run(ranks, job)
    assert told(job) == pytest.approx(one_device[kind], rel=1e-5)
    assert [line["targets"] for line in metrics(job, "eval")] == [30]


@pytest.mark.parametrize(("layout", "context"), OF_CONTEXT, ids=str)
@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_sequences_over_ranks_are_one_device(
        folder: Path, inputs: Path, ranks: RankPool, kind: str, layout: dict[str, Any],
        context: dict[str, Any], one_device: dict[str, dict[int, float]]) -> None:
    """Both answers of a pair in parts on several ranks: losses, means, and the reference's table,
    to the bit where the method keeps bits."""
    job = pairs_job(folder, kind, layout=layout, context=context)
    run(ranks, job)
    assert told(job) == pytest.approx(one_device[kind], rel=1e-5)
    one = pairs_job(inputs, kind, output=str(inputs / kind))  # that of the fixture
    for name in ("accuracy", "margin", "chosen_reward", "rejected_reward"):
        value = metrics(one)[2][name]
        assert metrics(job)[2][name] == pytest.approx(value, rel=1e-4) and value != 0.0
    if kind == "dpo":
        tables = [load_file(Path(made.output) / "reference.safetensors") for made in (job, one)]
        for name, table in tables[0].items():
            if context == RING:
                torch.testing.assert_close(table, tables[1][name], rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(table, tables[1][name])
                assert losses(job)[1] == math.log(2.0)


def gradients(job: Mapping[str, Any]) -> Gradients:
    """Of a run's first step, on this rank."""
    with new_run(build(TrainJob, job)) as run:
        found = Gradients()

        def step(factor: float) -> None:
            for held in run.spread.held:
                assert held.tensor.grad is not None
                found.parts[held.name] = [(box.slices, part.clone()) for box, _, part in
                                          held.shard.parts(held.tensor.grad)]

        run.optimizer.step = step  # type: ignore[method-assign]
        result = train_step(run.spread, run.optimizer, run.loader.next_step(), max_norm=None,
                            losses=run._pairs or token_losses)
        found.loss, found.norm = result.loss, result.grad_norm
        found.largest = max(float(part.abs().max()) for parts in found.parts.values()
                            for _, part in parts)
        return found


@pytest.mark.parametrize(("layout", "context"), OF_CONTEXT[:3], ids=str)
@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_gradients_over_sequences_are_one_devices(
        folder: Path, ranks: RankPool, kind: str, layout: dict[str, Any], context: dict[str, Any]
        ) -> None:
    one = gradients(dump(pairs_job(folder, kind)))
    found = ranks.run(layout["cp"], gradients, dump(pairs_job(
        folder, kind, output=str(folder / "spread"), layout=layout, context=context)))
    assert one.norm > 1e-3
    assert_same(found, one, 1e-5)


@pytest.mark.parametrize(("layout", "context"), [
    ({"dp": 2, "zero": 3}, None), ({"tp": 2, "pp": 2}, None), ({"cp": 2}, GATHER)], ids=str)
def test_a_reference_without_adapters_is_one_devices(folder: Path, ranks: RankPool,
                                                     layout: dict[str, Any],
                                                     context: dict[str, Any] | None) -> None:
    """It is a forward pass of its own in each step, and in the evaluation."""
    lora = {"rank": 2}
    one = pairs_job(folder, "dpo", lora=lora, output=str(folder / "one"))
    run(None, one)
    more = {} if context is None else {"context": context}
    job = pairs_job(folder, "dpo", lora=lora, layout=layout, **more)
    run(ranks, job)
    assert told(job) == pytest.approx(told(one), rel=1e-5)
    assert not (folder / "run/reference.safetensors").exists()


def test_a_resume_may_have_another_layout(folder: Path, ranks: RankPool,
                                          one_device: dict[str, dict[int, float]]) -> None:
    run(ranks, pairs_job(folder, "reward", steps=2, layout={"dp": 2, "zero": 3}))
    job = pairs_job(folder, "reward", steps=3, layout={"tp": 2})
    run(ranks, job)
    assert losses(job)[3] == pytest.approx(one_device["reward"][3], rel=1e-5)


def test_a_lost_reference_is_computed_again(folder: Path, ranks: RankPool) -> None:
    """From the starting model, though the run is past it, and on another layout."""
    run(None, pairs_job(folder, "dpo", steps=2))
    (folder / "run/reference.safetensors").unlink()
    run(ranks, pairs_job(folder, "dpo", steps=5, layout={"dp": 2}))
    run(None, whole := pairs_job(folder, "dpo", steps=5, output=str(folder / "whole")))
    assert losses(pairs_job(folder, "dpo")) == pytest.approx(losses(whole), rel=1e-5)
