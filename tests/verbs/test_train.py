"""`kilter train` as it is typed: what comes out, and that mistakes are one sentence before any rank
starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kilter import cli
from kilter.job import dump, read_job
from kilter.train.config import TrainJob
from tests.train.tiny_run import folder, write_job

__all__ = ["folder"]


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["train", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_on_one_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, write_job(folder), "steps=2", "export=true", "log.every=2")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("26.9 k parameters on 1 rank (") and "2 steps of 4 packs" in lines[0]
    assert lines[1].startswith("Data: ")
    assert lines[2].startswith("step 2/2  loss ") and "tokens/s" in lines[2]
    assert lines[3].startswith("step 2/2  held-out loss ")
    assert lines[4].startswith("Finished 2 steps over ") and lines[4].endswith("run/model.")
    assert (folder / "run" / "model" / "model.safetensors").is_file()
    code, out, _ = said(capsys, folder / "job.toml", "steps=3", "export=false")
    assert code == 0 and "Going on from the checkpoint of step 2." in out


@pytest.mark.parametrize(("settings", "words"), [
    (["optimiser.lr=1"], "optimiser is not a setting; did you mean optimizer?"),
    (["steps=many"], "steps is 'many' but must be a whole number."),
    (["steps=0"], "steps is 0 but must be at least 1"),
    (["epochs=2"], "give either steps or epochs"),
    (["micro_batches=3", "layout.dp=2"], "2 data-parallel ranks cannot share"),
    (["layout.pp=4"], "pp 4 asks for more stages than the model's 2 layers"),
    (["layout.tp=9"], "tp 9 is more than the 4 parts"),
    (["model.path=nowhere"], "A model needs either path"),
    (["model.tokenizer=nowhere"], "nowhere is neither a path that exists nor"),
    (["model.config.architectures=Foo"], "architecture 'Foo'; there are LlamaForCausalLM"),
    (["model.config.vocab_size=9"], "tokens but the model only 9"),
    (["model.config.hidden_size=0"], "hidden_size is 0"),
    (["data.seq_len=4096"], "data.seq_len is 4096, but this model takes at most 128"),
    (["data.sources.0.paths=[\"none.txt\"]"], "none.txt"),
    (["kind=sft"], "no data source has chat = true"),
    (["data.eval_fraction=0", "eval.every=5"], "the data has nothing held out"),
    (["max_norm=nan"], "max_norm is nan but must be a finite number."),
    (["log.every=0"], "log: every is 0"),
    (["launch.threads=0"], "launch: threads is 0"),
    (["launch.timeout=1e300"], "launch: timeout is 1e+300 but must be from 1 to 31536000 seconds"),
    (["launch.grace=-1"], "launch: grace is -1"),
    (["layout.dp=1000000", "micro_batches=1000000"], "The layout has 1000000 ranks, but this mach"),
    (["output=/dev/null/run"], "output is /dev/null/run, but /dev/null is no folder; name another"),
    (["log.profile=[11,12]"], "log.profile is [11, 12], but the run has 10 steps"),
    (["model.config.rms_norm_epsilon=1"], "rms_norm_epsilon. Leave them out."),
    (["data.eval_fraction=0", "eval.batches=5"], "eval is set, but the data has nothing held out"),
    (["data.chat.turns=last"], "data.chat is set, but no data source has conversations"),
    (["recompute.every=2"], "every is set, but mode is none; leave it out, or set mode to full"),
    (["recompute.mode=full", "recompute.parts=[\"mlp\"]"], "parts is set, but mode is full"),
    (["optimizer.muon_lr=1"], "muon_lr set, but name is adamw; leave it out, or set name to muon"),
    (["schedule.name=cos"], "schedule.name is 'cos' but must be one of constant, cosine"),
    (["recompute.mode=half"], "recompute.mode is 'half'"),
    (["precision=fp8"], "precision is 'fp8' but must be one of fp32, bf16"),
])
def test_mistakes_are_one_sentence(settings: list[str], words: str, folder: Path,
                                   capsys: pytest.CaptureFixture[str],
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("kilter.train.elastic._elastic", started)
    monkeypatch.setattr("kilter.train.launch.train", started)
    code, out, err = said(capsys, write_job(folder), *settings)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("kilter: error: ") and err.count("\n") == 1
    assert not (folder / "run").exists()


def test_memory_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, write_job(folder), "model.config.hidden_size=100000000")
    assert code == 1 and err.startswith("kilter: error: There is not enough memory for this: ")
    assert "you tried to allocate" in err and err.count("\n") == 1


def test_another_run_in_the_folder_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, write_job(folder), "steps=1")
    monkeypatch.setattr("kilter.train.elastic._elastic", None)
    code, _, err = said(capsys, folder / "job.toml", "seed=9", "layout.dp=2")
    assert code == 2 and "belongs to another job: seed differs." in err


def test_the_file_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no job file" in said(capsys, folder / "none.toml")[2]
    (folder / "bad.toml").write_text("x = ")
    assert "is not valid TOML" in said(capsys, folder / "bad.toml")[2]


@pytest.mark.parametrize("name", ["pretrain.toml", "sft.toml"])
def test_the_examples_are_jobs(name: str) -> None:
    job = read_job(TrainJob, Path(__file__).parents[2] / "examples" / name)
    assert json.loads(json.dumps(dump(job)))["output"].startswith("runs/")
