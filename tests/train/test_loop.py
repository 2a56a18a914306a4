"""What a run does beside stepping: stopping, scoring, telling, exporting; and that the ranks agree
on all of it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

from kilter.job import build, dump
from kilter.models.batch import Batch
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec
from kilter.train import loop
from kilter.train.config import TrainJob
from kilter.train.export import whole_parameters
from kilter.train.loop import Ending
from kilter.train.metrics import Monitor, training_flops
from kilter.train.step import NotFinite, StepResult
from kilter.weights.bridge import open_model
from kilter.weights.load import load_decoder
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


# Stopping


@contextmanager
def sigterm(rank: int, step: int) -> Iterator[None]:
    """It comes to one rank in the middle of a step."""
    step_of = loop.train_step
    taken = 0

    def stepped(*args: Any, **kwargs: Any) -> StepResult:
        nonlocal taken
        taken += 1
        if taken == step and args[0].mesh.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(*args, **kwargs)

    with mock.patch.object(loop, "train_step", stepped):
        yield


def stop_one_rank(job: dict[str, Any], rank: int, step: int) -> Ending:
    with sigterm(rank, step):
        return run_rank(job, told_to_stop=True)


def test_sigterm_on_one_rank_stops_all_after_that_step(folder: Path, ranks: RankPool) -> None:
    whole = make_job(folder, layout={"dp": 2}, output=str(folder / "whole"))
    job = make_job(folder, layout={"dp": 2})
    run(ranks, whole)
    endings = ranks.run(2, stop_one_rank, dump(job), 1, 4)
    assert [(e.step, e.stopped) for e in endings] == [(4, True)] * 2
    assert endings[0].text == ("Stopped after step 4 of 10; the same command goes on from there.")
    assert run(ranks, job) == replace(run(ranks, whole), text=mock.ANY)
    assert losses(job) == losses(whole)


def test_a_signal_from_outside_ends_the_tests(folder: Path) -> None:
    """Else that of a `timeout` would be a failure of whatever test trains at the time."""
    with sigterm(0, 2), pytest.raises(pytest.exit.Exception, match="in the middle of a run"):
        run_rank(job_table(folder))


def test_handlers_are_given_back() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job behind & ignores it
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with loop.stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    signal.signal(signal.SIGINT, usual)


# What is not finite


def poison(job: dict[str, Any], rank: int, step: int) -> tuple[str, bool]:
    """One rank's weights turn NaN before a step. What that says, and whether the rank's
    parameters are what they were when the step began."""
    step_of = loop.train_step
    taken = 0
    before: list[Tensor] = []
    held: list[Any] = []

    def stepped(spread: Any, *args: Any, **kwargs: Any) -> StepResult:
        nonlocal taken
        taken += 1
        if taken == step:
            if spread.mesh.rank == rank:
                with torch.no_grad():
                    spread.held[3].tensor[0] = torch.nan
                spread.updated()
            held.extend(spread.held)
            before.extend(h.tensor.detach().clone() for h in held)
        return step_of(spread, *args, **kwargs)

    with mock.patch.object(loop, "train_step", stepped), pytest.raises(NotFinite) as error:
        run_rank(job)
    same = all(torch.equal(h.tensor, old) or bool(old.isnan().any())
               for h, old in zip(held, before, strict=True))
    return str(error.value), same


def test_nan_on_one_rank_stops_all_before_anything_changes(folder: Path, ranks: RankPool) -> None:
    """Case 23, at a step that is not told of."""
    job = make_job(folder, layout={"dp": 4}, log={"every": 10})
    told = ranks.run(4, poison, dump(job), 2, 4)
    assert all(same for _, same in told)
    assert len({text for text, _ in told}) == 1
    assert "the step was not taken" in told[0][0] and "rank 2: the loss" in told[0][0]
    assert "rank 1: the loss" not in told[0][0] and "rank 0: the loss" not in told[0][0]


# Layouts


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "dp": 2, "zero": 3}],
                         ids=["tp4", "tp2fsdp2"])
def test_packs_that_do_not_divide_among_tensor_ranks(layout: dict[str, Any], folder: Path,
                                                     ranks: RankPool) -> None:
    """Sequence parallelism needs T divisible: what is added for it changes no loss and no count."""
    changes: dict[str, Any] = {"steps": 3, "data": {"seq_len": 49}}
    one = make_job(folder, output=str(folder / "one"), **changes)
    other = make_job(folder, layout=layout, **changes)
    run(ranks, one)
    run(ranks, other)
    for mine, theirs in zip(metrics(other), metrics(one), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert (mine["tokens"], mine["targets"]) == (theirs["tokens"], theirs["targets"])


def test_held_out_loss_is_the_mean_over_targets_on_any_ranks(folder: Path, ranks: RankPool) -> None:
    """Case 2, with an odd number of packs, and a limit that the ranks do not divide."""
    for limit in (0, 3):
        found = []
        for layout in ({}, {"dp": 2}, {"tp": 2}):
            job = make_job(folder, steps=1, layout=layout, eval={"batches": limit},
                           output=str(folder / f"{limit}-{layout}"), optimizer={"lr": 1e-9})
            run(ranks, job)
            found += metrics(job, "eval")
        assert len({line["targets"] for line in found}) == 1
        assert max(line["loss"] for line in found) == pytest.approx(
            min(line["loss"] for line in found), rel=1e-6)


def test_held_out_loss_weighs_targets_alike(folder: Path) -> None:
    job = make_job(folder)
    with new_run(job) as made:
        loss = made.score()
        with torch.no_grad():
            sums = [(-float(made.spread.forward(pack.batch(), pack.labels_T).sum()), pack.valid)
                    for pack in made._evaluation_packs()]
    assert len(sums) > 1
    assert loss == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), rel=1e-6)
    assert loss != pytest.approx(sum(s / n for s, n in sums) / len(sums), rel=1e-6)


def test_epochs_end_where_the_data_does(folder: Path) -> None:
    job = make_job(folder, steps=None, epochs=2, micro_batches=3, log={"every": 1000})
    ids: list[Any] = []
    with new_run(job) as made:
        for _ in range(made.steps):
            packs = made.loader.next_step()
            ids += [sample for pack in packs for sample in pack.ids]
    counts = Counter(ids)
    assert len(counts) == made.inputs.data.train.sizes[0] and set(counts.values()) == {2}


# What is told


def test_metrics_of_a_step(folder: Path, ranks: RankPool) -> None:
    job = make_job(folder, layout={"dp": 2, "zero": 1}, steps=4, log={"every": 2},
                   eval={"every": 2}, checkpoint={"every": 2})
    run(ranks, job)
    first, last = metrics(job)
    assert (first["step"], last["step"]) == (2, 4)
    factor = job.schedule.factor(3, 4)
    assert last["lr"] == job.optimizer.lr * factor
    assert set(last["seconds"]) >= {"data", "forward", "backward", "reduce", "optimizer", "total"}
    assert sum(v for k, v in last["seconds"].items() if k != "total") <= last["seconds"]["total"]
    size = 4 * sum(torch.Size(t.shape).numel() for name, t in tensors(job, 4).items()
                   if name.startswith("model."))
    moved = last["comm"]["dp_shard_cp"]
    # ZeRO-1 over two ranks: gradients once, parameters once, half of them each.
    assert moved["reduce_scatter"]["bytes"] == pytest.approx(size / 2, rel=0.05)
    assert moved["all_gather"]["bytes"] == pytest.approx(size / 2, rel=0.05)
    assert [line["step"] for line in metrics(job, "eval")] == [2, 4]
    (start,) = metrics(job, "start")
    assert start["parameters"] * 4 == size and start["ranks"] == 2


def test_flops_against_a_count_token_by_token() -> None:
    spec = ModelSpec("LlamaForCausalLM", 11, 8, 16, 4, 2, 2,
                     (LayerSpec(RopeSpec()), LayerSpec(RopeSpec(), window=3)), 32)
    keys = [min(i + 1, window) for n in (1, 2, 7) for window in (n, 3) for i in range(n)]
    assert training_flops(spec, 100, [1, 2, 7]) == 3 * (10 * 2 * 100 + sum(keys) * 4 * 4 * 2)


def test_mfu_is_a_share_of_the_declared_peak(folder: Path) -> None:
    for peak in (1e9, 4e9):
        job = make_job(folder, steps=2, log={"peak_flops": peak}, output=str(folder / f"{peak}"))
        run_rank(dump(job))
        for line in metrics(job):
            assert line["mfu"] * peak / line["tokens_per_second"] == pytest.approx(
                training_flops_per_token(job, line["step"]), rel=1e-6)


def training_flops_per_token(job: TrainJob, step: int) -> float:
    with new_run(replace(job, output=job.output + "-again")) as made:
        packs = [made.loader.next_step() for _ in range(step)][-1]
        matrices = sum(p.numel() for n, p in made.spread.model.named_parameters() if p.dim() == 2)
        lengths = [n for pack in packs for n in pack.cu_seqlens_S1.diff().tolist()]
        return training_flops(made.inputs.spec, matrices, lengths) / sum(lengths)


def test_lines_of_lost_steps_are_taken_back(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 4}\n{"kind": "train", "step": 5}\n{"kind": "tr')
    job = make_job(folder, output=str(folder), steps=9)
    with new_run(job) as made:
        Monitor(job, made.spread, 4, 9).close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()][-1] == "start"
    assert '"step": 5' not in path.read_text()


def test_tensorboard_and_profile(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = make_job(folder, steps=3, log={"tensorboard": True, "profile": [2, 2]})
    run_rank(dump(job))
    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        list(losses(job).values()))
    trace = json.loads((folder / "run" / "profile" / "steps-2-2.json").read_text())
    assert any("AdamW" in str(event.get("name")) for event in trace["traceEvents"])


def test_only_the_last_checkpoints_are_kept(folder: Path) -> None:
    job = make_job(folder, steps=7, checkpoint={"every": 2, "keep": 2})
    run_rank(dump(job))
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == [
        "step-00000006", "step-00000007"]


# The finished model


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(("layout", "tied"), [
    ({}, True), ({"dp": 2, "zero": 3}, True), ({"tp": 2, "dp": 2, "zero": 2}, False)],
    ids=["one", "fsdp2-tied", "tp2zero2"])
def test_export_loads_everywhere(layout: dict[str, Any], tied: bool, folder: Path, ranks: RankPool
                                 ) -> None:
    """Case 24: transformers reads it strictly and our own loader too, with the logits of the
    model that was trained."""
    job = make_job(folder, layout=layout, steps=2, export=True,
                   model={"config": {**job_table(folder)["model"]["config"],
                                     "tie_word_embeddings": tied}})
    run(ranks, job)
    place = folder / "run" / "model"
    saved = tensors(job, 2)
    tokens = [5, 7, 11, 13, 17, 19]
    ours = load_decoder(open_model(place))
    with torch.no_grad():
        own = ours(Batch.of([tokens]))
    theirs, notes = transformers.AutoModelForCausalLM.from_pretrained(
        place, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(logits_of(theirs, tokens), own, rtol=1e-5, atol=1e-5)
    for name in open_model(place).names():
        assert torch.equal(open_model(place).read(name), saved[f"model.{name}"]), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    assert tokenizer("abc").input_ids == made_by(folder, "abc")
    assert transformers.AutoConfig.from_pretrained(place).eos_token_id == tokenizer.eos_token_id


def made_by(folder: Path, text: str) -> list[int]:
    from kilter.tokens import Tokenizer

    return list(Tokenizer.from_folder(folder / "tokenizer").encode(text))


def test_bf16_export_is_what_was_computed_with(folder: Path) -> None:
    """With precision bf16 the loader gets the very numbers that the last forward would use."""
    job = make_job(folder, steps=2, precision="bf16", export=True)
    run_rank(dump(job))
    with new_run(job) as made:
        tokens = [3, 1, 4, 1, 5, 9, 2, 6]
        targets = torch.tensor([*tokens[1:], -100])
        with torch.no_grad():
            trained = made.spread.forward(Batch.of([tokens]), targets)[:-1]
            masters = dict(whole_parameters(made.spread))
    model = load_decoder(open_model(folder / "run" / "model"))
    with torch.no_grad():
        served = model.ops.token_logprobs(model(Batch.of([tokens]))[:-1], targets[:-1])
    assert torch.equal(trained, served)
    assert any(whole is not None and not torch.equal(whole, whole.bfloat16().float())
               for whole in masters.values())


def test_a_run_from_a_model_goes_on_from_its_weights(folder: Path) -> None:
    first = make_job(folder, steps=2, export=True, output=str(folder / "first"))
    run_rank(dump(first))
    table = job_table(folder, steps=1, output=str(folder / "second"))
    table["model"] = {"path": str(folder / "first" / "model")}
    second = build(TrainJob, table)
    with new_run(second) as made:
        started = dict(whole_parameters(made.spread))
    assert made.inputs.tokenizer.vocab_size == made.inputs.spec.vocab_size
    for name, value in tensors(first, 2).items():
        if name.startswith("model."):
            assert torch.equal(started[name.removeprefix("model.")], value)
