"""The loop in every setting: rollout and trainer agree bit for bit, and a run says what it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kilter.job import dump
from kilter.rl.config import RLJob
from kilter.rl.experience import Rollout
from kilter.rl.gate import Disagreement
from kilter.rl.launch import open_rl
from kilter.rl.prompts import Prompts
from kilter.rl.rewards import Sample
from kilter.rl.rewards.score import Unavailable
from kilter.rl.tasks import TaskItem
from kilter.train.step import NotFinite
from tests.ranks import RankPool
from tests.rl.tiny_job import Letters, everyone, make_job, new_run, run_rank, told


def ran(folder: Path, **changes: Any) -> tuple[RLJob, list[dict[str, Any]]]:
    """A job and what it told of its steps."""
    job = make_job(folder, **changes)
    run_rank(dump(job))
    return job, told(job)


def even(samples: Sequence[Sample]) -> list[float]:
    """A reward that tells most samples apart."""
    return [sum(t % 2 == 0 for t in s.token_ids) / max(len(s.token_ids), 1) for s in samples]


@pytest.mark.parametrize("changes", [
    {"rollout": {"temperature": t}} for t in (0.3, 0.6, 0.7, 1.5)] + [
    {"precision": "bf16", "rollout": {"temperature": 0.7}},
    {"precision": "bf16", "model": {"kv_dtype": "bf16"}},
    {"lora": {"rank": 4, "dora": True}, "recipe": {"kl": "loss", "kl_beta": 0.1}},
    {"recipe": {"kl": "loss", "kl_beta": 0.1, "kl_estimator": "k3", "entropy": 0.01}},
    {"algorithm": "reinforce_pp", "recipe": {"kl": "reward", "kl_beta": 0.1, "kl_target": 0.01,
                                             "kl_horizon": 64}},
    {"update": {"epochs": 2, "minibatches": 3}, "recipe": {"dual_clip": 3.0}},
    *({"recipe": {"correction": name}, "update": {"epochs": 2, "minibatches": 2}}
      for name in ("tis", "mis", "icepop", "geometric")),
    {"recipe": {"overlong": 4, "missing_eos": 0.5}},
    {"algorithm": "ppo", "critic": {}, "recipe": {"whiten": False, "gamma": 0.9},
     "update": {"epochs": 2, "minibatches": 2}}], ids=json.dumps)
def test_the_gate_is_exact(changes: dict[str, Any], tmp_path: Path) -> None:
    """At every step, after updates of the weights."""
    gate = "pass" if "correction" in json.dumps(changes) else "training"
    _, rows = ran(tmp_path, **{**changes, "steps": 3, "rewards": [{"kind": f"{__name__}:even"}],
                               "update": {**changes.get("update", {}), "gate": gate}})
    assert [row["gate"]["max"] for row in rows] == [0.0] * 3
    assert all(row["gate"]["tokens"] and row["grad_norm"] > 0.0 for row in rows)
    assert all(row["sent"]["changed"] > 0 for row in rows)
    if changes.get("recipe", {}).get("kl"):
        assert rows[0]["kl"] == rows[0]["kl_k1"] == 0.0  # the same bits, not nearly so
        assert rows[1]["kl"] > 0.0 and rows[2]["kl"] > 0.0
    assert ("entropy" in rows[0]) == ("entropy" in changes.get("recipe", {}))
    if "kl_target" in changes.get("recipe", {}):
        assert len({row["kl_beta"] for row in rows}) == 3
    if "overlong" in changes.get("recipe", {}):
        assert rows[0]["shaped_reward"] < rows[0]["reward"]


def test_nothing_moves_at_learning_rate_zero(tmp_path: Path) -> None:
    """Case 18: the difference stays 0 and the weights the same, for as long as it runs. (A rate of
    exactly 0 is refused; this one is below every weight's last bit.)"""
    _, rows = ran(tmp_path, steps=20, optimizer={"lr": 0.0},
                  rewards=[{"kind": f"{__name__}:even"}])
    assert [row["gate"]["max"] for row in rows] == [0.0] * 20
    assert len({row["sent"]["checksum"] for row in rows}) == 1
    assert rows[0]["sent"]["changed"] == rows[0]["sent"]["tensors"]
    assert [row["sent"]["changed"] for row in rows[1:]] == [0] * 19
    assert all(row["grad_norm"] > 0.0 for row in rows)


@pytest.mark.parametrize("update", [{}, {"gate": "pass"}, {"token_budget": 24}], ids=str)
def test_another_temperature_of_the_trainer_stops_the_run(update: dict[str, Any], tmp_path: Path
                                                          ) -> None:
    job = make_job(tmp_path, update=update)
    with new_run(dump(job)) as run:
        run.take_step()
        run.step += 1
        assert run.roles.policy is not None
        run.roles.policy.temperature = 1.0001
        with pytest.raises(Disagreement, match=r"disagree by up to .* of sample 'p\d+/\d'"):
            run.take_step()


def test_weights_that_did_not_arrive_stop_the_run(tmp_path: Path) -> None:
    with new_run(dump(make_job(tmp_path))) as run:
        run.take_step()
        assert run.roles.engine is not None
        run.roles.engine.version = 1  # as if they had come
        run.roles.send_weights = lambda version: None  # type: ignore[method-assign]
        run.roles.engine.engine.weights_changed(1)  # type: ignore[union-attr]
        run.step = 1
        with pytest.raises(Disagreement):
            run.take_step()


def test_without_exactness_the_difference_is_told(tmp_path: Path) -> None:
    job = make_job(tmp_path, model={"exact": False})
    with new_run(dump(job)) as run:
        assert run.roles.policy is not None
        run.roles.policy.temperature = 1.1
        found, _ = run.take_step()
    assert found["gate"]["max"] > 0.01
    _, rows = ran(tmp_path, steps=2, update={"gate": "off"})
    assert all("gate" not in row for row in rows)


def test_adapters_alone_are_sent(tmp_path: Path, ranks: RankPool) -> None:
    """Case 22, and the reference is the model without them, bit for bit."""
    changes = {"lora": {"rank": 2}, "steps": 3, "recipe": {"kl": "loss", "kl_beta": 0.1}}
    job = make_job(tmp_path, **changes, layout={"dp": 2, "zero": 3})
    everyone(ranks, run_rank, job)
    first, second, third = (row["sent"] for row in told(job))
    assert 0 < second["bytes"] == third["bytes"] < first["bytes"] / 3
    assert second["tensors"] == third["tensors"] < first["tensors"]
    assert second["changed"] > 0 and third["changed"] == third["tensors"]
    assert [row["gate"]["max"] for row in told(job)] == [0.0] * 3
    job = make_job(tmp_path, **changes, output=str(tmp_path / "one"))
    with new_run(dump(job)) as run:
        run.roles.send_weights(0)
        experience, _ = run.sample(0)
        before_T = run.roles.logprobs(experience)
        run.learn(experience, 0, None)
        after_T, ref_T = run.roles.logprobs(experience), run.roles.reference_logprobs(experience)
        here = experience.is_action_T
        assert torch.equal(ref_T[here], before_T[here])
        assert not torch.equal(after_T[here], before_T[here])


def test_it_starts_from_an_adapter(tmp_path: Path) -> None:
    first, _ = ran(tmp_path, lora={"rank": 2}, steps=2, export=True)
    adapter = str(tmp_path / "run" / "adapter")
    changes = {"output": str(tmp_path / "on"), "lora": {"rank": 2, "path": adapter}}

    def adapters(job: RLJob) -> dict[str, torch.Tensor]:
        with new_run(dump(job)) as run:
            return {held.name: held.tensor.clone() for held in run.roles.policy.spread.held}  # type: ignore[union-attr]

    ended, started = adapters(first), adapters(make_job(tmp_path, **changes))
    assert all(torch.equal(ended[name], started[name]) for name in ended)
    _, rows = ran(tmp_path, **changes, steps=1)
    assert rows[0]["gate"]["max"] == 0.0
    changes["lora"] = {"rank": 4, "path": adapter}
    with pytest.raises(ValueError, match=r"the table says rank = 2\."):
        ran(tmp_path, **changes)


# ---- turns ----

SAID = [5, 5, 4]  # what the environment says: letters that the reward counts, if it saw them


def environment(rollout: Rollout, tokenizer: object) -> Sequence[int] | None:
    """Answers twice."""
    turns = sum(a and not b for a, b in zip(rollout.is_action, rollout.is_action[1:], strict=False))
    return SAID if turns < 2 else None


def letters(samples: Sequence[Sample]) -> list[float]:
    """Of the environment's, in what it is given."""
    return [sum(token in SAID for token in sample.token_ids) + sample.answer_text.count("$")
            for sample in samples]


def test_turns_are_masked_and_not_rewarded(tmp_path: Path) -> None:
    """Case 6: what the environment said is no action, has no log-probability, and no reward sees
    it; case 7: the reward stands at the last action."""
    job = make_job(tmp_path, algorithm="reinforce_pp", steps=2, seed=1,
                   rewards=[{"kind": f"{__name__}:letters"}],
                   rollout={"max_tokens": 30, "environment": f"{__name__}:environment",
                            "engine": {"kv_tokens": 1024, "page_size": 4, "max_context": 48,
                                       "eos_token_ids": list(range(20, 32))}},
                   update={"token_budget": 100})
    with new_run(dump(job)) as run:
        run.roles.send_weights(0)
        experience, _ = run.sample(0)
        rollouts = experience.to_rollouts()
        found, _ = run.learn(experience, 0, None)
    assert found["gate"]["max"] == 0.0
    turns = 0
    for rollout in rollouts:
        acted = [t for t, a in zip(rollout.tokens, rollout.is_action, strict=True) if a]
        said = [t for t, a in zip(rollout.tokens, rollout.is_action, strict=True) if not a][1:]
        assert said == SAID * (len(said) // 3) and len(said) <= 6
        turns += len(said) // 3
        text = run.roles.tokenizer.decode(acted, skip_special_tokens=True)
        assert rollout.rewards["total"] == sum(t in SAID for t in acted) + text.count("$")
        for t, act in enumerate(rollout.is_action):
            assert (rollout.logprobs[t] == rollout.logprobs[t]) == act  # NaN is not itself
    assert turns > 10


# ---- what a run tells ----

def test_held_out_prompts_are_asked_the_same_every_time(tmp_path: Path) -> None:
    job, _ = ran(tmp_path, steps=4, optimizer={"lr": 0.0},
                 eval={"every": 2, "prompts": 8, "samples": 2})
    rows = told(job, "eval")
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert len({row["reward"] for row in rows}) == 1 and rows[0]["prompts"] == 8


def test_evaluations_change_nothing(tmp_path: Path) -> None:
    _, plain = ran(tmp_path, steps=3)
    _, other = ran(tmp_path, steps=3, eval={"every": 1, "prompts": 4},
                   output=str(tmp_path / "other"))
    for name in ("reward", "loss", "grad_norm"):
        assert [row[name] for row in plain] == [row[name] for row in other]


def test_some_rollouts_are_shown(tmp_path: Path) -> None:
    job, rows = ran(tmp_path, steps=4, log={"every": 2, "samples": 3})
    assert [row["step"] for row in rows] == [2, 4]
    shown = [json.loads(line) for line in
             (Path(job.output) / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in shown] == [2, 2, 2, 4, 4, 4]
    assert all(row["prompt"] in "!\"#$" and "share" in row["rewards"] for row in shown)


# ---- what goes wrong on some ranks ----

def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def raising(samples: Sequence[Sample]) -> list[float]:
    if last_rank():
        raise KeyError("none")
    return [0.0] * len(samples)


def nan(samples: Sequence[Sample]) -> list[float]:
    return [float("nan") if last_rank() else 0.0] * len(samples)


def few(samples: Sequence[Sample]) -> list[float]:
    return [0.0] * (len(samples) - last_rank())


def unable(samples: Sequence[Sample]) -> list[float]:
    if last_rank():
        raise Unavailable("Nothing can be judged here.")
    return [0.0] * len(samples)


class Long(Letters):
    """Prompts as long as the context."""

    def __getitem__(self, index: int) -> TaskItem:
        return TaskItem(({"role": "user", "content": "!" * 24},), "!", str(index))


def broken(rollout: Rollout, tokenizer: object) -> None:
    raise KeyError("none")


def number(rollout: Rollout, tokenizer: object) -> int:
    return 7


def tokens_beyond(rollout: Rollout, tokenizer: object) -> list[int]:
    return [3, 40]


def raw_bytes(rollout: Rollout, tokenizer: object) -> bytes:
    return b"!!"


def failed(job: Mapping[str, Any]) -> tuple[str, str]:
    """How a run ends that cannot: the exception's name and text."""
    with new_run(job) as run:
        if run.roles.policy is not None and run.roles.recipe.loss == "reinforce":
            run.roles.policy.learn = not_finite  # type: ignore[method-assign]
        try:
            run.take_step()
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def not_finite(*args: Any, **named: Any) -> Any:
    raise NotFinite("The loss is nan.")


APART = {"layout": {"dp": 2, "zero": 3}, "placement": {"rollout": 2}}
ENDS = {"rollout": {"environment": f"{__name__}:broken",
                    "engine": {"eos_token_ids": list(range(20, 32))}}}


@pytest.mark.parametrize(("changes", "name", "words"), [
    ({"layout": {"dp": 2}, "rewards": [{"kind": f"{__name__}:raising"}]}, "RewardError",
     "The reward raising failed on sample 0"),
    ({**APART, "rewards": [{"kind": f"{__name__}:raising"}]}, "RewardError",
     "The reward raising failed on sample 0"),
    ({**APART, "rewards": [{"kind": f"{__name__}:nan"}]}, "RewardError", "which is not finite"),
    ({**APART, "rewards": [{"kind": f"{__name__}:few"}]}, "RewardError",
     "returned 7 values for 8 samples"),
    ({**APART, "rewards": [{"kind": f"{__name__}:unable"}]}, "Unavailable", "Nothing can be"),
    ({"placement": {"rollout": 1}, "task": {"python": f"{__name__}:Long"}}, "ValueError",
     "which leaves no room for an answer"),
    ({**ENDS, "layout": {"tp": 2}}, "ValueError", "test_loop:broken failed on sample"),
    ({**ENDS, "layout": {"dp": 2}, "rollout": {**ENDS["rollout"], "tp": 2}}, "ValueError",
     "test_loop:broken failed on sample"),
    ({"placement": {"rollout": 1}, "algorithm": "rloo"}, "NotFinite", "The loss is nan.")],
    ids=str)
def test_a_failure_of_some_ranks_is_said_by_all(
        changes: dict[str, Any], name: str, words: str, tmp_path: Path, ranks: RankPool) -> None:
    found = everyone(ranks, failed, make_job(tmp_path, **changes))
    assert len(found) > 1 and len(set(found)) == 1
    assert found[0][0] == name and words in found[0][1]


@pytest.mark.parametrize(("name", "words"), [
    ("number", "with 7; return a text"), ("raw_bytes", "with b'!!'; return a text"),
    ("tokens_beyond", "with the token id 40, but the model has ids from 0 to 39; return a text")])
def test_an_environment_that_answers_with_no_text_is_refused(name: str, words: str, tmp_path: Path
                                                             ) -> None:
    changes = {**ENDS["rollout"], "environment": f"{__name__}:{name}"}
    found = failed(dump(make_job(tmp_path, rollout=changes)))
    assert found[0] == "ValueError" and words in found[1]
    assert found[1].startswith(f"The environment {__name__}:{name} answered sample p")


class Broken(Letters):
    def __getitem__(self, index: int) -> TaskItem:
        if index == 1:
            return "no item"  # type: ignore[return-value]
        if index == 2:
            raise IndexError("none")
        return super().__getitem__(index)


def test_a_task_that_fails_is_named(tmp_path: Path) -> None:
    tokenizer = open_rl(make_job(tmp_path)).start.tokenizer
    prompts = Prompts(Broken("train"), tokenizer, samples=1, format="text", seed=None)
    assert prompts.at(0).item.reference == "!"
    with pytest.raises(ValueError, match="prompt 1 is 'no item', but must be a kilter"):
        prompts.at(1)
    with pytest.raises(ValueError, match="The task failed at prompt 2: IndexError: none"):
        prompts.at(2)
