"""Training on pairs is one device's under every layout, and goes on under another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.train.preference.pairs_run import folder, inputs, pairs_job
from tests.train.tiny_run import losses, metrics, run

__all__ = ["folder", "inputs"]

LAYOUTS = [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}, {"tp": 2, "pp": 2}]


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


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 3}, {"tp": 2, "pp": 2}], ids=str)
def test_a_reference_without_adapters_is_one_devices(folder: Path, ranks: RankPool,
                                                     layout: dict[str, Any]) -> None:
    """It is a forward pass of its own in each step, and in the evaluation."""
    lora = {"rank": 2}
    one = pairs_job(folder, "dpo", lora=lora, output=str(folder / "one"))
    run(None, one)
    job = pairs_job(folder, "dpo", lora=lora, layout=layout)
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
