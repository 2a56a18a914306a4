"""`kilter rl` as it is typed: what comes out, exit codes, its ranks, and being told to stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kilter import cli
from kilter.rl import launch
from kilter.rl.gate import Disagreement
from kilter.rl.loop import RLRun
from kilter.rl.rewards.score import Unavailable
from kilter.train.launch import Exit
from tests.rl.tiny_job import MODEL, job_table, make_job, told


def write_job(folder: Path, **changes: Any) -> Path:
    path = folder / "job.toml"
    path.write_text("".join(f"{key} = {_toml(value)}\n"
                            for key, value in job_table(folder, **changes).items()))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(v)}' for key, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["rl", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_on_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, write_job(tmp_path), "steps=2", "export=true",
                          "eval.prompts=3")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "grpo on pp 1 · dp 1 · cp 1 · tp 1; 2 steps of 4 prompts x 4 samples."
    assert lines[1].startswith("step 0/2  held-out reward ") and lines[1].endswith("3 prompts")
    assert lines[2].startswith("step 1/2  reward 0.") and "rollout-trainer 0 " in lines[2]
    assert lines[4].startswith("step 2/2  held-out reward ")
    assert lines[5].startswith("Finished 2 steps") and lines[5].endswith("run/model.")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    code, out, _ = said(capsys, tmp_path / "job.toml", "steps=3")
    assert code == 0 and "Going on from the checkpoint of step 2." in out


@pytest.mark.parametrize(("settings", "words"), [
    (["rolout.prompts=1"], "rolout is not a setting; did you mean rollout?"),
    (["steps=-1"], "steps is -1 but must not be negative"),
    (["steps=0"], "eval.prompts is 0; say how many are asked, or take steps"),
    (["algorithm=foo"], "algorithm is 'foo' but must be one of ppo, grpo"),
    (["rollout.tp=9"], "rollout.tp is 9"),
    (["layout.tp=9"], "tp 9 is more than"),
    (["layout.cp=2", "context.method=ring"], "context.method is ring, and with layout.cp above 1"),
    (["context.method=ulysses", "context.placement=contiguous"], "context is set, but no layout"),
    (["layout.cp=3", "context.method=ulysses", "context.placement=contiguous"],
     "cannot spread 4 query heads over 3 ranks"),
    (["rollout.format=chat"], 'no chat template; set rollout.format = "text"'),
    (["model.tokenizer=nowhere"], "nowhere is neither a path that exists nor"),
    (["task.python=tests.rl.tiny_job:Nothing"], "Nothing"),
    (["eval.prompts=99"], "eval.prompts is 99, but the held-out split has 64 prompts"),
    (["algorithm=ppo"], "ppo has a critic; add [critic]"),
    (["rollout.environment=tests.rl.tiny_job:nothing"], "nothing"),
    (["update.token_budget=8", "rollout.max_tokens=12"], "raise the token budget")])
def test_mistakes_are_one_sentence(settings: list[str], words: str, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, write_job(tmp_path), *settings)
    assert code == 2 and words in err and err.count("\n") == 1
    assert err.startswith("kilter: error: ") and err[-2:] in (".\n", "?\n")


def test_a_language_model_is_no_reward_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                             ) -> None:
    """Its verdicts would all be 0."""
    path = write_job(tmp_path)
    assert said(capsys, path, "steps=1", "export=true")[0] == 0
    code, _, err = said(capsys, path, f"output={tmp_path / 'other'}",
                        f"reward_model.path={tmp_path / 'run' / 'model'}")
    assert code == 2 and "is a language model and has no verdict to give" in err


def test_a_judge_reads_the_actors_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                          ) -> None:
    """Before anything is sampled: a smaller vocabulary, or tokens that mean something else. Names
    of special tokens do not matter."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    path = write_job(tmp_path)

    def judged(name: str, vocab: int, tokens: str) -> tuple[int, str]:
        folder = tmp_path / name
        LlamaForSequenceClassification(LlamaConfig(
            **MODEL | {"vocab_size": vocab}, num_labels=1, pad_token_id=0)).save_pretrained(folder)
        if tokens:
            (folder / "tokenizer.json").write_text(tokens)
        code, _, err = said(capsys, path, "steps=1", f"output={folder / 'run'}",
                            f"reward_model.path={folder}")
        return code, err

    tokens = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
    code, err = judged("small", 39, "")
    assert code == 2 and "has 39 tokens, but the actor's tokenizer 40" in err
    other = json.loads(tokens)
    vocab = other["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    code, err = judged("other", 40, json.dumps(other))
    assert code == 2 and (f"to the actor token {vocab['B']} is b'A', to it b'B'. It reads the "
                          "actor's tokens") in err
    assert judged("same", 40, tokens.replace("<pad>", "<fill>"))[0] == 0
    assert judged("silent", 40, "")[0] == 0


def test_held_out_prompts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an ordinary run says of its start; nothing is saved, however often it is asked."""
    more = {"algorithm": "ppo", "critic": {}, "recipe": {"kl": "reward", "kl_beta": 0.1},
            "eval": {"prompts": 3, "samples": 2}, "export": True}
    job, path = make_job(tmp_path, **more), write_job(tmp_path, **more)
    for _ in range(2):
        code, out, err = said(capsys, path, "steps=0")
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[0].endswith("tp 1; held-out prompts only.")
        assert lines[1].startswith("step 0/0  held-out reward ")
        assert lines[2] == (f"Asked 3 held-out prompts and learned nothing; the result is in "
                            f"{tmp_path / 'run' / 'metrics.jsonl'}.")
        assert len(lines) == 3 and told(job) == []
        [row] = told(job, "eval")
        assert row["memory_bytes"] > 1 << 20
        assert not (tmp_path / "run" / "model").exists()
        assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert said(capsys, path, "steps=1")[0] == 0
    first, last = told(job, "eval")
    assert (first["reward"], first["parts"], first["step"]) == (row["reward"], row["parts"], 0)
    assert [row["step"] for row in told(job)] == [last["step"]] == [1]
    code, _, err = said(capsys, path, "steps=0")
    assert code == 2 and "is past the 0 steps of this job" in err


def environment(rollout: object, tokenizer: object) -> None:
    raise KeyError("none")


def test_an_environment_that_raises_is_one_sentence(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, write_job(tmp_path), "rollout.engine.eos_token_ids=[20,21,22,23]",
                        f"rollout.environment={__name__}:environment")
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(f"kilter: error: The environment {__name__}:environment failed on sample")


def test_a_reward_that_can_judge_nothing_is_one_sentence(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_step(self: RLRun) -> None:
        raise Unavailable("A package is missing.")

    monkeypatch.setattr(RLRun, "take_step", take_step)
    assert launch.run(make_job(tmp_path)) == Exit(1, "A package is missing.")


def test_a_disagreement_is_a_plain_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no reason to start again."""
    def take_step(self: RLRun) -> None:
        raise Disagreement("They disagree.")

    monkeypatch.setattr(RLRun, "take_step", take_step)
    assert launch.run(make_job(tmp_path)) == Exit(1, "They disagree.")


def test_two_ranks_told_to_stop_and_going_on(tmp_path: Path) -> None:
    """Through the launcher, in processes of its own: SIGTERM is a checkpoint after the present
    step and exit code 0, and the same command goes on from there."""
    changes: dict[str, Any] = {"steps": 500, "layout": {"dp": 2, "zero": 3},
                               "placement": {"rollout": 1}}
    job, path = make_job(tmp_path, **changes), write_job(tmp_path, **changes)
    command = [sys.executable, "-m", "kilter", "rl", str(path)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 600
        metrics = Path(job.output) / "metrics.jsonl"
        while time.monotonic() < end and process.poll() is None and not (
                metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    last = told(job)[-1]["step"]
    assert process.returncode == 0, err
    assert out.splitlines()[0].startswith("grpo on 3 ranks: actor on 2 (")
    assert out.splitlines()[-1] == (
        f"Stopped after step {last} of 500; the same command goes on from there.")
    done = subprocess.run([*command, f"steps={last + 1}"], text=True, capture_output=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"Going on from the checkpoint of step {last}." in done.stdout
    assert [row["step"] for row in told(job)] == list(range(1, last + 2))
    assert all(row["gate"]["max"] == 0.0 for row in told(job))
