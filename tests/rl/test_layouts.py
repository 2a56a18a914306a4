"""The same job on any ranks, in any placement: the same samples, at equal weights the same bits of
log-probabilities, and the same step within rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kilter.job import dump
from kilter.models.batch import Batch
from kilter.rl.rewards import Sample
from kilter.rl.tasks import TaskItem
from tests.ranks import RankPool
from tests.rl.tiny_job import MODEL, Letters, everyone, make_job, new_run

CRITIC = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-6}}
FSDP2 = {"dp": 2, "zero": 3}
WIDE = {"config": {**MODEL, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}}
# Of everything: a critic, a reference, a reward of each token, two micro-batches to a rank.
PPO = {"algorithm": "ppo", "critic": CRITIC, "seed": 1, "recipe": {"kl": "reward", "kl_beta": 0.1},
       "rollout": {"max_tokens": 12}, "update": {"gate": "pass"}, "model": WIDE}


def two_steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What this rank knows of two steps: samples, what models say of them, and how it learns."""
    found = []
    with new_run(job) as run:
        for _ in range(2):
            sent = run.roles.send_weights(run.step)
            experience, _ = run.sample(run.step)
            one: dict[str, Any] = {
                "ids": experience.ids, "tokens": experience.tokens_T,
                "rewards": experience.rewards["total"],
                "sampled": experience.logprobs_T.nan_to_num(),
                "scored": run.roles.logprobs(experience).nan_to_num()}
            if run.recipe.reference:
                one["reference"] = run.roles.reference_logprobs(experience).nan_to_num()
            if run.recipe.critic:
                one["values"] = run.roles.values(experience)[0].nan_to_num()
            learned, _ = run.learn(experience, run.step, sent)
            one |= {name: learned[name] for name in ("loss", "grad_norm", "gate")}
            if run.recipe.critic:
                one["critic"] = learned["critic"]
            found.append(one)
            run.step += 1
    return found


Alone = Callable[[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """`two_steps` of a job on one rank; of each job once."""
    known: dict[str, list[dict[str, Any]]] = {}

    def found(changes: dict[str, Any]) -> list[dict[str, Any]]:
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            known[key] = two_steps(dump(make_job(tmp_path_factory.mktemp("alone"), **changes)))
        return known[key]

    return found


def same_steps(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    first, other = found[0], expected[0]
    for name, value in other.items():
        if isinstance(value, Tensor):
            assert torch.equal(first[name], value), name
    assert torch.equal(first["sampled"], first["scored"])
    for one, two in zip(found, expected, strict=True):
        assert one["ids"] == two["ids"] and one["gate"]["max"] == 0.0
        assert torch.equal(one["tokens"], two["tokens"])
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5, abs=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
        if "critic" in two:
            assert one["critic"]["loss"] == pytest.approx(two["critic"]["loss"], rel=1e-5)
            assert one["critic"]["clip_fraction"] == pytest.approx(
                two["critic"]["clip_fraction"], abs=0.02)


@pytest.mark.parametrize(("layout", "tp"), [
    ({"dp": 2}, 1), (FSDP2, 2), ({"tp": 2}, 2), ({"dp": 2, "tp": 2, "zero": 3}, 1),
    ({"dp": 2, "tp": 2, "zero": 3}, 2), ({"dp": 2, "tp": 2, "zero": 3}, 4), ({"pp": 2}, 1),
    ({"pp": 2, "dp": 2}, 2), ({"cp": 2}, 2), ({"cp": 2, "dp": 2, "zero": 3}, 1),
    ({"cp": 2, "tp": 2}, 1), ({"cp": 2, "pp": 2}, 1)], ids=str)
def test_any_layout(layout: dict[str, Any], tp: int, alone: Alone, tmp_path: Path,
                    ranks: RankPool) -> None:
    expected = alone(PPO)
    job = make_job(tmp_path, **{**PPO, "layout": layout, "rollout": {"max_tokens": 12, "tp": tp},
                                "update": {"gate": "pass", "token_budget": 30}})
    for found in everyone(ranks, two_steps, job):
        same_steps(found, expected)


@pytest.mark.parametrize(("placement", "layout"), [
    ({"rollout": 1}, {}), ({"rollout": 2}, FSDP2), ({"critic": 1, "reference": 1}, {}),
    ({"rollout": 1, "critic": 2, "reference": 1}, {"tp": 2})], ids=str)
def test_any_placement(placement: dict[str, int], layout: dict[str, Any], alone: Alone,
                       tmp_path: Path, ranks: RankPool) -> None:
    """Every rank knows everything in the end, and the same."""
    expected = alone(PPO)
    job = make_job(tmp_path, **PPO, layout=layout, placement=placement)
    for found in everyone(ranks, two_steps, job):
        same_steps(found, expected)


class Words(Letters):
    """Prompts that samples share rows of, where they can."""

    def __getitem__(self, index: int) -> TaskItem:
        item = super().__getitem__(index)
        return replace(item, messages=({"role": "user", "content": 6 * item.reference},))


def test_sequences_over_ranks_by_heads(tmp_path: Path, ranks: RankPool) -> None:
    """The other method that keeps bits; and a critic on ranks of its own that are spread so."""
    changes = {**PPO, "task": {"python": f"{__name__}:Words"},
               "recipe": {**PPO["recipe"], "value_clip": 1e-3},
               "update": {"gate": "pass", "epochs": 2, "token_budget": 60}}
    expected = two_steps(dump(make_job(tmp_path, **changes)))
    assert expected[1]["critic"]["clip_fraction"] > 0.1
    ulysses = {"method": "ulysses", "placement": "contiguous"}
    job = make_job(tmp_path, **{
        **changes, "layout": {"cp": 2}, "context": ulysses, "placement": {"critic": 2},
        "critic": {**CRITIC, "layout": {"cp": 2}}})
    for found in everyone(ranks, two_steps, job):
        same_steps(found, expected)


@pytest.mark.parametrize("layout", [FSDP2, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_pairs_on_any_ranks(layout: dict[str, Any], alone: Alone, tmp_path: Path,
                            ranks: RankPool) -> None:
    """Online DPO, whose loss is of two sequences that are on different ranks."""
    online: dict[str, Any] = {"algorithm": "online_dpo", "seed": 1, "rollout": {"max_tokens": 12},
                              "update": {"token_budget": 24}}
    expected = alone(online)
    assert expected[0]["grad_norm"] > 0.0
    for found in everyone(ranks, two_steps, make_job(tmp_path, **online, layout=layout)):
        same_steps(found, expected)


def rare(samples: list[Sample]) -> list[float]:
    """Only samples of one letter differ."""
    return [len(sample.token_ids) % 2 if sample.reference == "!" else 0.0 for sample in samples]


def nothing(samples: list[Sample]) -> list[float]:
    return [0.0] * len(samples)


@pytest.mark.parametrize("kind", ["rare", "nothing"])
@pytest.mark.parametrize("layout", [FSDP2, {"pp": 2, "dp": 2}, {"cp": 2, "dp": 2}], ids=str)
def test_dynamic_sampling_on_ranks(kind: str, layout: dict[str, Any], alone: Alone,
                                   tmp_path: Path, ranks: RankPool) -> None:
    """Fewer sequences than ranks, and rounds until none is left to ask."""
    dapo: dict[str, Any] = {"algorithm": "dapo", "seed": 1, "recipe": {"dynamic_rounds": 2},
                            "rollout": {"prompts": 2, "samples": 2, "max_tokens": 8},
                            "rewards": [{"kind": f"{__name__}:{kind}"}]}
    expected = alone(dapo)
    for found in everyone(ranks, two_steps, make_job(tmp_path, **dapo, layout=layout)):
        same_steps(found, expected)
    if kind == "nothing":
        assert all(one["grad_norm"] == 0.0 for one in expected)


def save_judge(folder: Path) -> None:
    """A classifier of transformers with one label."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(1)
    model = LlamaForSequenceClassification(LlamaConfig(**MODEL, num_labels=1, pad_token_id=0))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def test_a_reward_model_on_ranks_of_its_own(tmp_path: Path, ranks: RankPool) -> None:
    """Its verdicts are those of the model called alone, and of the total its share."""
    folder = tmp_path / "judge"
    save_judge(folder)
    judged: dict[str, Any] = {"seed": 1, "rollout": {"max_tokens": 12},
                              "reward_model": {"path": str(folder), "weight": 0.5}}
    one = make_job(tmp_path, **judged)
    with new_run(dump(one)) as run:
        run.roles.send_weights(0)
        experience, _ = run.sample(0)
        assert run.roles.reward_model is not None
        model = run.roles.reward_model.spread.model
        for s, rollout in enumerate(experience.to_rollouts()):
            with torch.no_grad():
                verdict = model(Batch.of([list(rollout.tokens)]))[-1]
            assert rollout.rewards["reward_model"] == float(verdict) != 0.0
            assert float(experience.rewards["total"][s]) == pytest.approx(
                rollout.rewards["share"] + 0.5 * float(verdict), abs=1e-6)
    expected = two_steps(dump(one))
    for found in everyone(ranks, two_steps, make_job(
            tmp_path, **judged, placement={"reward_model": 1, "rollout": 1}, layout={"dp": 2})):
        same_steps(found, expected)
