"""Symptoms that users of such software reported, where no other file of this folder has them:
several end tokens, memory over many rollouts, borders of epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kilter.job import dump
from kilter.rl.lesson import make_lesson
from tests.rl.tiny_job import make_job, new_run, told


def test_every_end_token_is_learned_from(tmp_path: Path) -> None:
    """Also where it is the padding's token, as in a model that pads with its end token: each ends
    the answer, is an action with an advantage, and nothing is called cut off."""
    ends = [0, 2, 7, *range(20, 36)]  # <pad>, <eos> and others
    job = make_job(tmp_path, algorithm="reinforce_pp", seed=1, recipe={"missing_eos": 1.0},
                   rollout={"prompts": 8, "max_tokens": 20, "engine": {
                       "kv_tokens": 1024, "page_size": 4, "max_context": 48,
                       "eos_token_ids": ends}}, update={"token_budget": 100})
    with new_run(dump(job)) as run:
        run.roles.send_weights(0)
        experience, _ = run.sample(0)
        reward_S = run._rewards(experience)
        lesson = make_lesson(run.recipe, experience, reward_S, kl_beta=0.0)
        found, _ = run.learn(experience, 0, None)
    seen = set()
    last_S = experience.cu_seqlens_S1[1:].long() - 1
    for s, finish in enumerate(experience.finish):
        token = int(experience.tokens_T[last_S[s]])
        assert (finish == "stop") == (token in ends)
        assert bool(lesson.mask_T[last_S[s]])
        lost = float(experience.rewards["total"][s] - reward_S[s])
        assert abs(lost - (0.0 if finish == "stop" else 1.0)) < 1e-6
        if finish == "stop":
            seen.add(token)
    assert 0 in seen or 2 in seen
    assert len(seen) > 4 and found["truncated"] == sum(
        f == "length" for f in experience.finish) / experience.num_seqs < 0.5
    assert found["gate"]["max"] == 0.0


def test_memory_stays_over_many_rollouts(tmp_path: Path) -> None:
    """Case 23: 200 rollouts with new weights each; the cache takes no byte in between."""
    changes: dict[str, Any] = {"rollout": {"prompts": 1, "samples": 2, "max_tokens": 2}}
    with new_run(dump(make_job(tmp_path, **changes))) as run:
        engine, policy = run.roles.engine, run.roles.policy
        assert engine is not None and policy is not None
        weights = [parameter for parameter, _ in policy.spread.local.values()]
        resident = []
        for number in range(200):
            weights[number % len(weights)].data.mul_(1.001)
            policy.spread.updated()
            sent = run.roles.send_weights(number)
            assert sent is not None and sent.changed == (len(weights) if number == 0 else 1)
            run.sample(number)
            assert engine.kv_bytes == 0
            resident.append(_resident())
        assert resident[-1] - resident[49] < 4 << 20  # bytes, over 150 of them


def _resident() -> int:
    """Bytes of this process that are in no file: in memory, or moved out of it on a full machine.
    """
    found = [int(line.split()[1]) * 1024 for line in
             Path("/proc/self/status").read_text().splitlines()
             if line.startswith(("RssAnon:", "VmSwap:"))]
    assert len(found) == 2
    return sum(found)


def test_prompts_come_once_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    """Case 20: over the border of an epoch nothing is left out or comes twice."""
    job = make_job(tmp_path, task={"options": {"size": 6}}, steps=3, log={"samples": 99},
                   rollout={"prompts": 4, "samples": 2})
    with new_run(dump(job)) as run:
        items = [run.prompts.at(i).item.id for i in range(12)]
        groups = []
        for step in range(3):
            run.roles.send_weights(step)
            experience, _ = run.sample(step)
            groups += experience.group_S.unique().tolist()
    assert groups == list(range(12))
    assert sorted(items[:6]) == sorted(items[6:]) and len(set(items)) == 6
    assert items[:6] != items[6:]
    assert not (Path(job.output) / "metrics.jsonl").read_text() and told(job) == []
