"""A job of reinforcement learning: what is refused, in sentences, and that nothing is ignored."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kilter.job import JobError, build, dump
from kilter.rl.algorithms import ALGORITHMS, Recipe, RecipeConfig
from kilter.rl.config import RLJob
from kilter.rl.launch import open_rl
from kilter.rl.placement import PlacementConfig
from tests.rl.tiny_job import make_job

CRITIC: dict[str, Any] = {}


def test_a_run_may_change_every_part_of_a_recipe() -> None:
    assert [f.name for f in fields(RecipeConfig)] == [f.name for f in fields(Recipe)]
    assert all(str(f.type).removesuffix(" | None") in ("str", "int", "float", "bool")
               for f in fields(RecipeConfig))


def test_a_job_is_what_it_was_told(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm="ppo", critic={"warmup": 2, "layout": {"dp": 2}},
                   layout={"tp": 2}, recipe={"kl": "reward", "kl_beta": 0.1})
    assert build(RLJob, dump(job)) == job
    assert job.made.kl_estimator == "k1" and job.made.critic
    assert make_job(tmp_path, algorithm="dr_grpo").made.norm_length == 8


@pytest.mark.parametrize(("algorithm", "field", "value"), [
    ("grpo", "gamma", 0.9), ("grpo", "lam", 0.9), ("grpo", "whiten", False),
    ("grpo", "bootstrap", True), ("grpo", "value_clip", 0.1), ("grpo", "value_weight", 0.5),
    ("rloo", "std_ddof", 0), ("rloo", "eps_low", 0.1), ("rloo", "eps_high", 0.1),
    ("gspo", "dual_clip", 3.0), ("cispo", "dual_clip", 3.0), ("grpo", "norm_length", 9),
    ("grpo", "kl_estimator", "k3"), ("grpo", "kl_horizon", 9), ("grpo", "dynamic_rounds", 3),
    ("grpo", "correction_low", 0.4), ("grpo", "correction_high", 3.0), ("grpo", "beta", 0.2),
    ("grpo", "dpo_loss", "ipo"), ("online_dpo", "aggregation", "token_mean")])
def test_what_would_change_nothing_is_refused(algorithm: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} would change nothing in {algorithm} "):
        RecipeConfig(**{field: value}).over(algorithm, 8)
    known = {"norm_length": "dr_grpo", "dual_clip": "ppo", "beta": "online_dpo",
             "dpo_loss": "online_dpo", "dynamic_rounds": "dapo", "std_ddof": "dapo"}
    beside = {"kl_estimator": {"kl": "reward", "kl_beta": 0.1},
              "kl_horizon": {"kl": "reward", "kl_beta": 0.1, "kl_target": 0.1},
              "correction_low": {"correction": "mis"}, "correction_high": {"correction": "tis"}}
    made = RecipeConfig(**{field: value, **beside.get(field, {})}).over(
        known.get(field, "ppo"), 8)
    assert getattr(made, field) == value


@pytest.mark.parametrize(("recipe", "words"), [
    ({"kl": "loss"}, "kl is 'loss' and kl_beta 0.0; set both or neither"),
    ({"kl": "loss", "kl_beta": 0.1, "kl_estimator": "k1"}, "k1 as a loss has the expected gradi"),
    ({"kl": "reward", "kl_beta": 0.1}, "the advantage grpo is of whole sequences"),
    ({"kl": "both", "kl_beta": 0.1}, "kl is 'both' but must be one of none, reward, loss"),
    ({"advantage": "best"}, "advantage is 'best' but must be one of gae"),
    ({"loss": "dpo"}, "dpo, and no other, has none"),
    ({"loss": "hinge"}, "loss is 'hinge' but must be one of"),
    ({"aggregation": "mean"}, "aggregation is 'mean' but must be one of token_mean"),
    ({"correction": "some"}, "correction is 'some' but must be one of"),
    ({"correction": "mis", "correction_low": 1.5}, "must lie between them"),
    ({"dual_clip": 0.5}, "dual_clip is 0.5 but must be above 1"),
    ({"std_ddof": 3}, "std_ddof is 3 but must be 0 or 1"),
    ({"eps_low": 2.0}, "eps_low is 2.0"), ({"missing_eos": -1.0}, "missing_eos is -1.0"),
    ({"overlong": 9}, "overlong is 9 tokens, more than the 8"),
    ({"dynamic": True, "dynamic_rounds": 0}, "dynamic_rounds is 0"),
    ({"advantage": "gae"}, "grpo has a critic; add [critic]")], ids=str)
def test_recipes_that_cannot_be(recipe: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(tmp_path, words, recipe=recipe)


@pytest.mark.parametrize(("changes", "words"), [
    ({"output": ""}, "output is empty"), ({"steps": -1}, "steps is -1"),
    ({"steps": 0}, "steps is 0, which only asks held-out prompts, but eval.prompts is 0"),
    ({"rewards": []}, "there is no reward; give at least one of [[rewards]]"),
    ({"critic": CRITIC}, "grpo has no critic; leave [critic] out"),
    ({"rollout": {"samples": 1}}, "grpo compares the samples of a prompt"),
    ({"rollout": {"temperature": 0.0}}, "takes the likeliest token"),
    ({"rollout": {"max_tokens": 0}}, "max_tokens"),
    ({"rollout": {"format": "html"}}, "rollout.format is 'html'"),
    ({"rollout": {"prompts": 0}}, "prompts is 0 but must be at least 1"),
    ({"rollout": {"top_p": 0.9}}, "rollout.top_p is not a setting"),
    ({"rollout": {"tp": 2}}, "rollout.tp is 2, which does not divide the 1 ranks"),
    ({"update": {"minibatches": 17}}, "update.minibatches is 17, more than the 16 sequences"),
    ({"update": {"epochs": 0}}, "epochs is 0"), ({"update": {"gate": "on"}}, "gate is 'on'"),
    ({"update": {"max_norm": -1.0}}, "max_norm -1.0"),
    ({"layout": {"cp": 2}, "context": {"method": "ring"}},
     "context.method is ring, and with layout.cp above 1"),
    ({"context": {"method": "ring"}}, "context is set, but no layout has cp"),
    ({"layout": {"ep": 2, "dp": 2}}, "layout.ep is 2"),
    ({"pipeline": {"chunks": 2}}, "pipeline"),
    ({"algorithm": "ppo", "critic": {"layout": {"cp": 2}}, "placement": {"critic": 2},
      "context": {"method": "ring"}}, "context.method is ring, and with critic.layout.cp above 1"),
    ({"algorithm": "ppo", "critic": {"layout": {"dp": 2}}}, "critic.layout has 2 ranks, but 1"),
    ({"algorithm": "ppo", "critic": {"warmup": -1}}, "warmup is -1"),
    ({"placement": {"critic": 1}}, "placement.critic is 1, but this run has no critic"),
    ({"placement": {"reference": 1}}, "placement.reference is 1, but this run has no reference"),
    ({"placement": {"rollout": -1}}, "rollout is -1 but must not be negative"),
    ({"placement": {"max_staleness": 1}}, "max_staleness is 1"),
    ({"reference": {"path": "x"}}, "this grpo has no use for one"),
    ({"eval": {"every": 2}}, "every is set, but prompts is 0"), ({"log": {"every": 0}}, "every"),
    ({"precision": "fp8"}, "precision is 'fp8'")], ids=str)
def test_jobs_that_cannot_be(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(tmp_path, words, **changes)


def refused(folder: Path, words: str, **changes: Any) -> None:
    with pytest.raises(JobError) as error:
        make_job(folder, **changes)
    text = str(error.value)
    assert words in text and text.startswith("The job cannot be used: ") and text[-1] in ".?"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"output is empty.*steps is 0.*layout\.ep is 2"):
        make_job(tmp_path, output="", steps=0, layout={"ep": 2, "dp": 2})


def test_a_ring_is_for_runs_that_promise_no_bits(tmp_path: Path) -> None:
    ring: dict[str, Any] = {"layout": {"cp": 2}, "context": {"method": "ring"}}
    assert make_job(tmp_path, **ring, model={"exact": False}).context.method == "ring"
    assert make_job(tmp_path, layout={"cp": 2}).context.method == "all_gather"


def test_roles_have_runs_of_ranks() -> None:
    placement = PlacementConfig(rollout=2, critic=1, reward_model=1)
    assert placement.world(4) == 8
    assert [placement.ranks_of(role, 4) for role in (
        "actor", "rollout", "critic", "reference", "reward_model")] == [
        range(4), range(4, 6), range(6, 7), range(4), range(7, 8)]


def test_what_algorithms_need() -> None:
    assert [name for name, recipe in ALGORITHMS.items() if recipe.critic] == ["ppo"]
    assert [name for name, recipe in ALGORITHMS.items() if recipe.reference] == ["online_dpo"]
    assert [name for name, recipe in ALGORITHMS.items() if not recipe.groups] == [
        "ppo", "reinforce_pp"]


def test_tensorboard_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package tensorboard is not installed"):
        open_rl(make_job(tmp_path, log={"tensorboard": True}))
