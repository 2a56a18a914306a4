"""Every algorithm learns, with rollouts that are the trainer's bits at every step; and what recipes
make of rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kilter.job import dump
from kilter.rl.algorithms import ALGORITHMS, RecipeConfig
from kilter.rl.experience import Experience, Rollout
from kilter.rl.lesson import make_lesson, shaped_rewards
from kilter.rl.rewards import Sample
from tests.rl.tiny_job import LETTERS, MODEL, make_job, new_run, run_rank, told

CRITIC = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-6}}
LEARN = {"model": {"config": {**MODEL, "num_hidden_layers": 1}}, "update": {"token_budget": 400},
         "rollout": {"samples": 16, "max_tokens": 4}}


class Enough:
    """Tells a run to stop once the mean reward of its last four steps is high."""

    def __init__(self, metrics: Path, reward: float) -> None:
        self._metrics, self._reward = metrics, reward

    def is_set(self) -> bool:
        rows = [json.loads(line) for line in self._metrics.read_text().splitlines()[-4:]]
        return len(rows) == 4 and sum(row["reward"] for row in rows) / 4 >= self._reward


def learned(folder: Path, algorithm: str, seed: int, **changes: Any) -> list[dict[str, Any]]:
    """Steps until the reward is 0.9, or 60."""
    job = make_job(folder, algorithm=algorithm, seed=seed, steps=60, output=str(folder / str(seed)),
                   **{**LEARN, **changes})
    with new_run(dump(job)) as run:
        run.go(Enough(Path(job.output) / "metrics.jsonl", 0.9))  # type: ignore[arg-type]
    return told(job)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_learns(algorithm: str, tmp_path: Path) -> None:
    """From chance (the letter is one of 40 tokens) to 0.9 of the most there is, in at most 60 steps
    from each of three seeds."""
    for seed in (1, 2, 3):
        rows = learned(tmp_path, algorithm, seed,
                       **{"critic": CRITIC} if algorithm == "ppo" else {})
        rewards = [row["reward"] for row in rows]
        assert rewards[0] < 0.2 and sum(rewards[-4:]) / 4 >= 0.9
        assert [row["gate"]["max"] for row in rows] == [0.0] * len(rows)
        assert all(row["gate"]["tokens"] > 0 and row["gate"]["skipped"] == 0 for row in rows)
        if algorithm == "ppo":
            assert max(row["explained_variance"] for row in rows) > 0.25


def by_letter(samples: list[Sample]) -> list[float]:
    """Whatever is answered."""
    return [LETTERS.index(str(sample.reference)) - 1.5 for sample in samples]


def test_the_critic_explains_what_a_prompt_decides(tmp_path: Path) -> None:
    """Alone at first: the policy stands still, and is not looked at."""
    job = make_job(tmp_path, algorithm="ppo", steps=26, critic={**CRITIC, "warmup": 25},
                   rewards=[{"kind": f"{__name__}:by_letter"}], **LEARN)
    run_rank(dump(job))
    rows = told(job)
    explained = [row["explained_variance"] for row in rows]
    assert explained[0] == 0.0 and min(explained[-6:]) > 0.8
    assert [row["sent"]["changed"] for row in rows[1:]] == [0] * 25
    assert ["gate" in row for row in rows] == [False] * 25 + [True]
    assert rows[-1]["gate"]["max"] == 0.0


def test_nothing_to_come_is_not_added(tmp_path: Path) -> None:
    """An answer that a limit cut off has been judged as it is, and its returns are the reward;
    `bootstrap` adds the value of its last state."""
    found = {}
    for bootstrap in (False, True):
        job = make_job(tmp_path, algorithm="ppo", critic=CRITIC, steps=2,
                       recipe={"bootstrap": bootstrap, "lam": 1.0})
        with new_run(dump(job)) as run:
            run.roles.send_weights(0)
            experience, _ = run.sample(0)
            assert bool(experience.truncated_S.any()) and not bool(experience.truncated_S.all())
            with torch.no_grad():
                assert run.roles.critic is not None
                run.roles.critic.spread.local["value.weight"][0].fill_(0.1)
            values_T, after_S = run.roles.values(experience)
            lesson = make_lesson(run.recipe, experience, experience.rewards["total"], kl_beta=0.0,
                                 values_T=values_T, bootstrap_S=after_S)
        assert lesson.returns_T is not None
        mask_T, sequence_T = lesson.mask_T, experience.sequence_T
        expected_S = experience.rewards["total"] + after_S
        torch.testing.assert_close(lesson.returns_T[mask_T], expected_S[sequence_T][mask_T])
        assert bool(((after_S != 0) == (experience.truncated_S & bootstrap)).all())
        found[bootstrap] = experience
    assert torch.equal(found[False].tokens_T, found[True].tokens_T)


# ---- dynamic sampling ----

def constant(samples: list[Sample]) -> list[float]:
    return [0.5] * len(samples)


def some_prompts(samples: list[Sample]) -> list[float]:
    """Only samples of the prompts that ask for the first letter differ."""
    return [len(sample.token_ids) % 2 if sample.reference == "!" else 0.0 for sample in samples]


def test_prompts_that_tell_nothing_apart_are_replaced(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm="dapo", steps=3, recipe={"dynamic_rounds": 8},
                   rewards=[{"kind": f"{__name__}:some_prompts"}],
                   rollout={"prompts": 3, "max_tokens": 6})
    with new_run(dump(job)) as run:
        run.roles.send_weights(0)
        experience, sampled = run.sample(0)
        assert sampled["rounds"] > 1 and run.place > 3
        assert 1 <= len(experience.group_S.unique()) <= 3
        for group in experience.group_S.unique():
            rewards = experience.rewards["total"][experience.group_S == group]
            assert rewards.min() < rewards.max() and len(rewards) == 4
            assert run.prompts.at(int(group)).item.reference == "!"


@pytest.mark.parametrize("algorithm", ["dapo", "online_dpo", "grpo"])
def test_no_prompt_tells_anything_apart(algorithm: str, tmp_path: Path) -> None:
    """Then a step changes nothing, says so, and the run goes on."""
    job = make_job(tmp_path, algorithm=algorithm, steps=2,
                   rewards=[{"kind": f"{__name__}:constant"}],
                   **({"recipe": {"dynamic_rounds": 2}} if algorithm == "dapo" else {}))
    with new_run(dump(job)) as run:
        before = run.roles.start_checksum
        told_of, _ = run.take_step()
        run.step += 1
        after, _ = run.take_step()
        assert run.roles.policy is not None
    assert told_of["loss"] == told_of["grad_norm"] == 0.0 and told_of["reward"] == 0.5
    assert told_of["rounds"] == (2 if algorithm == "dapo" else 1)
    assert after["sent"]["changed"] == 0 and before


# ---- shaping ----

def answers(*lengths: tuple[int, str]) -> Experience:
    return Experience.of([Rollout(
        [1] * (n + 1), [False] + [True] * n, [float("nan")] + [-1.0] * n, [-1] + [0] * n, 0,
        finish, f"a{i}") for i, (n, finish) in enumerate(lengths)])  # type: ignore[arg-type]


def test_overlong_and_cut_off_answers_pay() -> None:
    experience = answers((4, "stop"), (6, "stop"), (8, "stop"), (8, "length"))
    recipe = RecipeConfig(overlong=4, missing_eos=0.25).over("dapo", 8)
    assert shaped_rewards(recipe, experience, torch.ones(4), 8).tolist() == [1.0, 0.5, 0.0, -0.25]
    assert shaped_rewards(ALGORITHMS["dapo"], experience, torch.ones(4), 8).tolist() == [1.0] * 4
