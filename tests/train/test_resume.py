"""A run that was cut and resumed is the run that was not: bit for bit on the same ranks, within
rounding on others, with the same samples in the same steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kilter.job import build, dump
from kilter.train.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    checkpoints,
    read_facts,
)
from kilter.train.config import TrainJob
from kilter.train.data import DataLoader, SampleId
from kilter.train.metrics import Monitor
from kilter.train.pieces import PiecesError, save_pieces
from tests.ranks import RankPool
from tests.train.tiny_run import (
    folder,
    job_table,
    losses,
    make_job,
    metrics,
    new_run,
    run,
    run_rank,
    tensors,
)

__all__ = ["folder"]

FSDP4, FSDP2 = {"dp": 4, "zero": 3}, {"dp": 2, "zero": 3}
EVERY_5 = {"every": 5, "keep": 0}


class Died(Exception):
    pass


def die_after(job: dict[str, Any], step: int) -> None:
    """Trains until a step was told of, and stops there as if the process were gone."""
    tell = Monitor.tell

    def told(self: Monitor, number: int, *args: Any, **kwargs: Any) -> None:
        tell(self, number, *args, **kwargs)
        if number == step:
            raise Died

    with mock.patch.object(Monitor, "tell", told), pytest.raises(Died):
        run_rank(job)


def ids_of(job: dict[str, Any]) -> list[list[tuple[SampleId, ...]]]:
    """What this rank's packs of every step are made of."""
    seen = []
    next_step = DataLoader.next_step

    def noted(self: DataLoader) -> Any:
        packs = next_step(self)
        seen.append([pack.ids for pack in packs])
        return packs

    with mock.patch.object(DataLoader, "next_step", noted):
        run_rank(job)
    return seen


def everyone(ranks: RankPool, function: Any, job: TrainJob, *args: Any) -> list[Any]:
    if job.layout.world == 1:
        return [function(dump(job), *args)]
    return ranks.run(job.layout.world, function, dump(job), *args)


def in_order(by_rank: list[list[list[Any]]]) -> list[list[Any]]:
    """Micro-batches of every step in the order of the stream: rank r has r, r + dp, …"""
    return [[pack for turn in zip(*step, strict=True) for pack in turn]
            for step in zip(*by_rank, strict=True)]


def facts_of(job: TrainJob, step: int) -> dict[str, Any]:
    path = Path(job.output) / "checkpoints" / f"step-{step:08d}" / "trainer.json"
    return json.loads(path.read_text())


@pytest.mark.parametrize("layout", [{}, FSDP2, {"dp": 2, "zero": 1}, {"tp": 2}, {"pp": 2}],
                         ids=["one", "fsdp2", "zero1", "tp2", "pp2"])
def test_cut_and_resumed_is_bitwise_the_whole_run(layout: dict[str, Any], folder: Path,
                                                  ranks: RankPool) -> None:
    """Cut at step 7, after the checkpoint of step 5: steps 6 and 7 are taken again."""
    whole = make_job(folder, layout=layout, output=str(folder / "whole"))
    cut = make_job(folder, layout=layout, output=str(folder / "cut"), checkpoint=EVERY_5)
    run(ranks, whole)
    everyone(ranks, die_after, cut, 7)
    state = torch.get_rng_state()
    run(ranks, cut)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn behind anybody's back
    assert losses(cut) == losses(whole)
    left, right = tensors(whole, 10), tensors(cut, 10)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert facts_of(whole, 10)["loader"] == facts_of(cut, 10)["loader"]
    assert facts_of(whole, 10)["tokens"] == facts_of(cut, 10)["tokens"]


@pytest.mark.parametrize(("before", "after"), [
    (FSDP4, {"dp": 2, "tp": 2}), (FSDP4, FSDP2), ({"tp": 2, "dp": 2, "zero": 2}, {}),
    ({}, {"tp": 4}),
], ids=["fsdp4-tp2ddp2", "4-2", "tp2zero2-1", "1-tp4"])
def test_resume_on_other_ranks(before: dict[str, Any], after: dict[str, Any], folder: Path,
                               ranks: RankPool) -> None:
    whole = make_job(folder, layout=before, output=str(folder / "whole"))
    ids = in_order(everyone(ranks, ids_of, whole)[::before.get("tp", 1)])
    first = make_job(folder, layout=before, output=str(folder / "cut"), checkpoint=EVERY_5)
    everyone(ranks, die_after, first, 6)
    second = make_job(folder, layout=after, output=str(folder / "cut"))
    later = in_order(everyone(ranks, ids_of, second)[::after.get("tp", 1)])
    assert later == ids[5:]
    one, other = losses(whole), losses(second)
    assert one.keys() == other.keys()
    assert max(abs(one[step] - other[step]) / one[step] for step in one) < 1e-6
    left, right = tensors(whole, 10), tensors(second, 10)
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=1e-5, atol=1e-6, msg=name)


def test_resume_over_three_layouts(folder: Path, ranks: RankPool) -> None:
    """fsdp4 → tp2·pp2 → cp2·dp2: the losses and the samples of the run that was not cut."""
    whole = make_job(folder, layout=FSDP4, output=str(folder / "whole"))
    ids = in_order(everyone(ranks, ids_of, whole))
    cut = {"output": str(folder / "cut"), "checkpoint": {"every": 3, "keep": 0}}
    everyone(ranks, die_after, make_job(folder, layout=FSDP4, **cut), 4)
    everyone(ranks, die_after, make_job(folder, layout={"tp": 2, "pp": 2}, **cut), 7)
    last = make_job(folder, layout={"cp": 2, "dp": 2}, **cut)
    later = in_order(everyone(ranks, ids_of, last)[::2])  # one rank of each cp pair
    assert later == ids[6:]
    one, other = losses(whole), losses(last)
    assert one.keys() == other.keys()
    assert max(abs(one[step] - other[step]) / one[step] for step in one) < 1e-6
    left, right = tensors(whole, 10), tensors(last, 10)
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=1e-5, atol=1e-6, msg=name)


def save_again(job: dict[str, Any], place: str) -> None:
    """What a rank has after it was restored, written by the layout it has now."""
    with new_run(build(TrainJob, job)) as run:
        facts = read_facts(checkpoints(run.output / "checkpoints")[-1])
        checkpointer = Checkpointer(Path(place) / "checkpoints", CheckpointConfig(),
                                    run.mesh.axis("world"))
        checkpointer.save(run.step, run.pieces(), facts)
        checkpointer.close()


ZBV = {"schedule": "zb-v"}
GRID: dict[str, list[tuple[dict[str, Any], dict[str, Any] | None]]] = {
    "all": [({}, None), ({"tp": 4}, None), ({"dp": 3, "zero": 3}, None),
            ({"pp": 2, "tp": 2}, None), ({"pp": 2, "dp": 2, "zero": 1}, ZBV),
            ({"dp": 4, "zero": 2, "replicate": 2}, None), ({"cp": 2, "dp": 2, "zero": 3}, None),
            ({"tp": 2, "sequence_parallel": False}, None)],
    "adapters": [({"tp": 4}, None), ({"dp": 2, "zero": 3}, None), ({"pp": 2}, ZBV), ({}, None)]}


@pytest.mark.parametrize("trained", GRID)
def test_every_tensor_survives_resharding(trained: str, folder: Path, ranks: RankPool) -> None:
    """Cases 10 and 12: TP2×FSDP2, then read and written by one layout after another: the same
    bytes all the way, moments included."""
    config = job_table(folder)["model"]["config"] | {"num_hidden_layers": 4}
    lora = {"rank": 2, "dora": True} if trained == "adapters" else None

    def made(place: str, layout: dict[str, Any], pipeline: dict[str, Any] | None) -> TrainJob:
        return make_job(folder, layout=layout, pipeline=pipeline or {}, output=str(folder / place),
                        steps=3, micro_batches=12, model={"config": config},
                        **({} if lora is None else {"lora": lora}))

    job = made("0", {"dp": 2, "tp": 2, "zero": 3}, None)
    run(ranks, job)
    saved = tensors(job, 3)
    assert any(name.endswith("exp_avg_sq") for name in saved)
    assert all(saved[name].item() == 3.0 for name in saved if name.endswith(".step"))
    layer = "model.layers.{}.attn.qkv." + ("weight" if lora is None else "adapter.q_proj.lora_a")
    assert len({saved[layer.format(i)].sum().item() for i in range(4)}) == 4
    for turn, (layout, pipeline) in enumerate(GRID[trained]):
        everyone(ranks, save_again, made(str(turn), layout, pipeline), str(folder / str(turn + 1)))
        read = tensors(made(str(turn + 1), {}, None), 3)
        assert read.keys() == saved.keys()
        assert all(torch.equal(read[name], saved[name]) for name in saved), layout


def test_resumed_twice(folder: Path, ranks: RankPool) -> None:
    """Case 22: step, learning rate and losses do not know how often a run was cut."""
    whole = make_job(folder, output=str(folder / "whole"))
    run(ranks, whole)
    cut = make_job(folder, output=str(folder / "cut"), checkpoint={"every": 3, "keep": 0})
    for step in (4, 8):
        die_after(dump(cut), step)
    run(ranks, cut)
    assert [(m["step"], m["lr"], m["loss"], m["tokens"]) for m in metrics(cut)] == [
        (m["step"], m["lr"], m["loss"], m["tokens"]) for m in metrics(whole)]


def test_muon_and_offload_resume_bitwise(folder: Path, ranks: RankPool) -> None:
    optimizer = {"name": "muon", "offload": True}
    whole = make_job(folder, layout=FSDP2, optimizer=optimizer, steps=6,
                     output=str(folder / "whole"))
    cut = make_job(folder, layout=FSDP2, optimizer=optimizer, steps=6, output=str(folder / "cut"),
                   checkpoint={"every": 3, "keep": 0})
    run(ranks, whole)
    everyone(ranks, die_after, cut, 4)
    run(ranks, cut)
    left, right = tensors(whole, 6), tensors(cut, 6)
    assert any(name.endswith("momentum") for name in left)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_another_job_in_the_same_folder_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_rank(job_table(folder, steps=2))
    with pytest.raises(CheckpointError, match=r"another job: optimizer\.eps, seed differ\."):
        run_rank(job_table(folder, steps=4, seed=4, optimizer={"eps": 1e-3}))
    # What does not change the result may change, and so may the number of steps.
    ending = run_rank(job_table(folder, steps=3, checkpoint={"every": 1, "keep": 1},
                                log={"every": 2}, recompute={"mode": "full"}))
    assert ending.step == 3
    with pytest.raises(CheckpointError, match="past the 2 steps of this job"):
        run_rank(job_table(folder, steps=2))
    # What a run is steered with may change too, and is told.
    capsys.readouterr()
    assert run_rank(job_table(folder, steps=4, max_norm=0.5,
                              schedule={"name": "constant"})).step == 4
    told = capsys.readouterr().out
    assert "checkpoint of step 3, with max_norm 0.5 in place of 1.0" in told
    assert "schedule.name constant in place of" in told


def test_a_finished_run_does_nothing_more(folder: Path) -> None:
    job = make_job(folder, steps=2)
    run_rank(dump(job))
    before = (Path(job.output) / "metrics.jsonl").read_text().splitlines()
    run_rank(dump(job))
    after = (Path(job.output) / "metrics.jsonl").read_text().splitlines()
    assert after[:-1] == before and json.loads(after[-1])["kind"] == "start"


def test_halves_of_checkpoints_are_not_resumed_from(folder: Path, ranks: RankPool) -> None:
    job = make_job(folder, steps=4, checkpoint={"every": 2, "keep": 0})
    run(ranks, job)
    place = Path(job.output) / "checkpoints"
    (place / "step-00000004").rename(place / "step-00000004.partial")
    with new_run(job) as resumed:
        assert resumed.step == 2
    assert [path.name for path in place.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "behind"])
def test_a_checkpoint_that_is_not_written_stops_the_run(asynchronous: bool, folder: Path) -> None:
    """Not at the next checkpoint only; and the same command goes on, with the same result."""
    whole = make_job(folder, output=str(folder / "whole"))
    run_rank(dump(whole))
    cut = make_job(folder, output=str(folder / "cut"), checkpoint={
        "every": 4, "keep": 1, "asynchronous": asynchronous})
    seen: list[Checkpointer] = []
    save, write, tell = Checkpointer.save, save_pieces, Monitor.tell

    def noted(self: Checkpointer, *args: Any) -> None:
        seen.append(self)
        save(self, *args)

    def full(pieces: Any, place: Path, group: Any) -> None:
        if "00000008" in place.name:
            raise PiecesError("rank 0: No space left on device")
        write(pieces, place, group)

    def told(self: Monitor, number: int, *args: Any, **kwargs: Any) -> None:
        tell(self, number, *args, **kwargs)
        while number == 9 and not seen[-1].failed:  # the writer is behind, but not that far
            time.sleep(0.01)

    with (mock.patch.object(Checkpointer, "save", noted), mock.patch.object(Monitor, "tell", told),
          mock.patch("kilter.train.checkpoint.save_pieces", full),
          pytest.raises(CheckpointError, match=r"step 8 .*No space.*goes on from step-00000004")):
        run_rank(dump(cut))
    assert max(losses(cut)) == (9 if asynchronous else 8)
    run_rank(dump(cut))
    left, right = tensors(whole, 10), tensors(cut, 10)
    assert losses(cut) == losses(whole)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("change", ["rms_norm_eps", "rope_theta"])
def test_another_architecture_in_the_same_files_is_refused(change: str, folder: Path) -> None:
    """All weights would fit, and the function would be another one."""
    first = make_job(folder, steps=1, export=True)
    run_rank(dump(first))
    table = job_table(folder, steps=1, output=str(folder / "second"))
    table["model"] = {"path": str(folder / "run" / "model")}
    run_rank(table)
    file = folder / "run" / "model" / "config.json"
    config = json.loads(file.read_text())
    (at,) = [place for place in (config, config.get("rope_parameters", {})) if change in place]
    at[change] = 0.01
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is now: (norm_eps|layers) differs\. Put the model"):
        run_rank(table | {"steps": 2})
