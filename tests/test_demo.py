"""The pieces of `make demo` on a tiny model: what it tells is so, and its stages fit together."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kilter.job import read_job
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.models.spec import ModelSpec
from kilter.parallel.apply import apply
from kilter.rl.config import RLJob
from kilter.rl.reshard_layout import rollout_parts
from kilter.weights.bridge import open_model
from tests.models import tiny
from tests.ranks import RankPool
from tests.serve.tiny_tokenizer import save_byte_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "demo.py"))


@pytest.fixture(scope="module")
def plot() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "plot_rewards.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.make("llama-smollm2-like", path)  # 3 KV heads
    save_byte_tokenizer(path, 131)
    return path


def held_bytes(spec: ModelSpec, dp: int) -> int:
    """Of this rank's parameters under ZeRO 3."""
    with torch.device("meta"):
        model = Decoder(spec)
    spread = apply(model, Mesh(Layout(dp=dp, zero=3), "cpu"))
    spread.initialise(0, 0.02)
    return sum(tensor.numel() * tensor.element_size() for tensor, _ in spread.local.values())


def test_the_memory_account_is_what_ranks_hold(demo: dict[str, Any], ranks: RankPool,
                                               folder: Path) -> None:
    spec = replace(open_model(folder).spec, ffn_size=96)  # 88 rows are no three parts
    found = demo["memory_of"](spec, 3, 3, 64)
    held = ranks.run(3, held_bytes, spec, 3)
    assert found.parameters == max(held) == held[0]
    assert found.moments == 2 * found.gradients == 2 * found.parameters
    with torch.device("meta"):
        model = Decoder(spec)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert sum(held) == whole
    parts = [4 * sum(box.numel for shard in part.values() for box in shard.boxes)
             for part in rollout_parts(model, 3)]
    assert found.rollout == max(parts)
    # keys and values of one KV head of three, in fp32
    assert found.cache == 64 * spec.num_layers * 2 * spec.head_dim * 4
    assert found.total == (found.parameters * 4 + found.gathered + found.rollout + found.cache)


def test_a_cut_run_is_gone_on_with_and_a_finished_one_is_not(demo: dict[str, Any], tmp_path: Path
                                                             ) -> None:
    base, next_folder = tmp_path / "runs" / "demo", demo["next_folder"]
    assert next_folder(base, lambda folder: True) == tmp_path / "runs" / "demo-1"
    (tmp_path / "runs" / "demo-2").mkdir(parents=True)
    (tmp_path / "runs" / "demo-10").mkdir()
    (tmp_path / "runs" / "demo-x").mkdir()
    assert next_folder(base, lambda folder: True) == tmp_path / "runs" / "demo-10"
    assert next_folder(base, lambda folder: False) == tmp_path / "runs" / "demo-11"
    (tmp_path / "runs" / "demo-10" / "model").mkdir()
    assert next_folder(base, lambda folder: True) == tmp_path / "runs" / "demo-11"


def test_what_is_missing_is_said_first(demo: dict[str, Any]) -> None:
    demo["need"]("json", "kilter")
    with pytest.raises(demo["Failed"], match=r"needs no_such_a and no_such_b, which"):
        demo["need"]("no_such_a", "json", "no_such_b")


def test_a_shown_command_can_be_given_by_hand(demo: dict[str, Any]) -> None:
    words = ["-p", "What is it?", "a'b c", 'say "hi there"', "$HOME x", "plain", "x!y z", "a\\b c"]
    assert shlex.split(" ".join(map(demo["_quoted"], words))) == words
    assert demo["_quoted"]("What is it?") == '"What is it?"'


def test_the_summary_adds_up(demo: dict[str, Any]) -> None:
    def step(number: int, worst: float) -> dict[str, Any]:
        return {"kind": "step", "step": number, "seconds": {"rollout": 1.5, "total": 2.0},
                "comm": {"dp": {"all_gather": {"calls": 2, "bytes": 100}},
                         "tp": {"all_reduce": {"calls": number, "bytes": 1}}},
                "gate": {"max": worst, "tokens": 5}, "sent": {"bytes": 512}}

    lines = [{"kind": "eval", "step": 0, "reward": 0.25, "prompts": 8}, step(1, 0.0), step(2, 0.0),
             {"kind": "eval", "step": 2, "reward": 0.5, "prompts": 8}]
    page = demo["summary_page"](lines)
    assert re.search(r"dp +all_gather +4 +200 +200 B", page)
    assert re.search(r"tp +all_reduce +3 +2 +2 B", page)
    assert re.search(r"rollout +3\.0\n +total +4\.0", page)
    assert "1.0 KiB over all ranks and steps" in page
    assert "rollout against trainer: 0.0 (10 tokens compared)" in page
    assert "0.250 before, 0.500 after 2 steps (8 prompts)" in page
    assert "trainer: 0.125 " in demo["summary_page"]([step(1, 0.125), step(2, 0.0)])


def test_a_drawing_has_its_points_where_they_belong(plot: dict[str, Any], tmp_path: Path) -> None:
    lines = [{"kind": "eval", "step": 0, "reward": 0.0}, {"kind": "step", "step": 1, "reward": 0.4},
             {"kind": "eval", "step": 2, "reward": 0.5}, {"kind": "eval", "step": 4, "reward": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "curve.svg"
    assert plot["main"]([str(out), f"<a>={tmp_path}"]) == 0
    root = ElementTree.fromstring(out.read_text(encoding="utf-8"))
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter()
               if c.tag.endswith("circle")]
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.1) and x0 < x1
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.1) and y0 > y1
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[1]))
    assert plot["main"]([str(out), str(tmp_path)]) == 2


def test_a_tiny_model_lives_from_training_to_an_answer(demo: dict[str, Any], folder: Path,
                                                       tmp_path: Path,
                                                       capfd: pytest.CaptureFixture[str]) -> None:
    changes = [f"model.path={folder}", f"output={tmp_path / 'demo'}", "layout.dp=1",
               "layout.zero=0", "rollout.tp=1", "steps=2", "rollout.prompts=2",
               "rollout.samples=2", "eval.prompts=2", "rollout.engine.kv_tokens=512",
               "rollout.engine.max_context=128", "launch.threads=1",
               "launch.device=cpu"]
    job = read_job(RLJob, EXAMPLES / "demo.toml", changes)
    output = demo["train"](job, changes)
    lines = demo["read_lines"](output / "metrics.jsonl")
    assert [line["kind"] for line in lines] == ["eval", "step", "step", "eval"]
    assert output.name == "demo-1" and (output / "model" / "config.json").exists()
    assert "rollout against trainer: 0.0 " in demo["summary_page"](lines)
    assert "config.json" in demo["folder_page"](output / "model")
    demo["serve_and_ask"](output / "model", job)
    said = capfd.readouterr().out
    assert "step 2/2" in said and "Answers of step 2" in said
    assert "is served at http://127.0.0.1:" in said
    assert len(re.findall(r"arithmetic problem: .*\(reference: -?\d+\)", said)) == 6
    assert demo["can_resume"](job, output)
    assert not demo["can_resume"](read_job(RLJob, EXAMPLES / "demo.toml", [*changes, "seed=1"]),
                                  output)
