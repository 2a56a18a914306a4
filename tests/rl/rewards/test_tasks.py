"""Tasks: the same item by the same index, splits that share no question; and reasoning-gym's
reward, for which its own answers are the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.job import build
from kilter.rl.rewards import Sample, WeightedReward, score
from kilter.rl.rewards.gym import ReasoningGym
from kilter.rl.rewards.score import RewardError
from kilter.rl.tasks import (
    FileConfig,
    FileTask,
    GymConfig,
    GymTask,
    TaskConfig,
    TaskError,
    TaskItem,
    build_task,
)

reasoning_gym = pytest.importorskip("reasoning_gym")

# one that evaluates answers, ones with a scorer of their own, tuples in their entries, one whose
# items all come from a single generator, plain ones
DATASETS = ("chain_sum", "countdown", "knights_knaves", "list_functions", "acre", "leg_counting",
            "n_queens", "basic_arithmetic")


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningGym]:
    made = ReasoningGym(workers=1, seconds=600.0)  # enough on a busy machine, too
    yield made
    made.close()


def answered(item: TaskItem, answer: str) -> Sample:
    return Sample(prompt=item.messages, answer_text=f"<think>…</think>\n<answer>{answer}</answer>",
                  reference=item.reference)


def test_its_own_answers_score_one(reward: ReasoningGym) -> None:
    items = [GymTask(GymConfig(dataset=name, size=4), split)[i]
             for name in DATASETS for split in ("train", "held_out") for i in (0, 3)]
    items = [json.loads(json.dumps(item.__dict__)) and item for item in items]
    right = [answered(item, item.reference["answer"]) for item in items]
    assert score([WeightedReward(reward)], right)["reasoning_gym"] == [1.0] * len(items)
    assert max(reward([answered(item, "no idea") for item in items])) < 0.1
    assert reward([Sample(prompt="", answer_text=item.reference["answer"],
                          reference=item.reference) for item in items]) == [0.0] * len(items)


def test_scores_are_the_datasets_own(reward: ReasoningGym) -> None:
    dataset = reasoning_gym.create_dataset("countdown", seed=3, size=2)
    entry = dataset[1]
    numbers = " + ".join(map(str, entry["metadata"]["numbers"]))
    answers = [entry["answer"], numbers, "1 + 1", "", "x"]
    reference = {"dataset": "countdown", "entry": entry}
    assert reward([Sample(prompt="", answer_text=f"<answer>{a}</answer>", reference=reference)
                   for a in answers]) == [dataset.score_answer(a, entry) for a in answers]


def test_an_answer_that_is_evaluated_is_locked_up(reward: ReasoningGym, tmp_path: Path) -> None:
    item = GymTask(GymConfig(dataset="countdown", size=1))[0]
    trace = tmp_path / "trace"
    evil = f"__import__('os').system('touch {trace}') or open({str(trace)!r}, 'w')"
    hasty = ReasoningGym(workers=1, seconds=2.0)
    assert max(hasty([answered(item, "9**9**9**9**9")])) < 0.1
    hasty.close()
    values = reward([answered(item, evil), answered(item, item.reference["answer"])])
    assert values[0] < 0.1 and values[1] == 1.0 and not trace.exists()


def test_references_that_cannot_be_used(reward: ReasoningGym) -> None:
    item = GymTask(GymConfig(dataset="chain_sum", size=1))[0]
    for reference, said in (
            (None, "needs a record"), ({"dataset": "chain_sum"}, "needs a record"),
            ({"dataset": "no such", "index": 0}, "not registered"),
            (item.reference | {"answer": "another"}, "not deterministic")):
        with pytest.raises(RewardError, match=f"reasoning_gym failed on sample 0 .*{said}"):
            score([WeightedReward(reward)], [Sample(
                prompt="", answer_text="<answer>1</answer>", reference=reference)])


def test_an_item_is_the_same_in_any_order_object_and_process() -> None:
    config = GymConfig(dataset="knights_knaves", size=6, held_out_size=3, seed=5)
    code = ("import json; from kilter.rl.tasks import *; t = GymTask(GymConfig("
            "dataset='knights_knaves', size=6, held_out_size=3, seed=5), {!r})\n"
            "print(json.dumps([(t[i].messages, t[i].reference, t[i].id) for i in range(len(t))]))")
    for split in ("train", "held_out"):
        task = GymTask(config, split)
        order = list(range(len(task)))
        Random(0).shuffle(order)
        first = {i: task[i] for i in order}
        assert [GymTask(config, split)[i] for i in range(len(task))] == [
            first[i] for i in range(len(task))]
        if split == "held_out":
            other = subprocess.run([sys.executable, "-c", code.format(split)], check=True,
                                   text=True, capture_output=True, env={"PYTHONHASHSEED": "7"})
            assert json.loads(other.stdout) == [
                [list(map(dict, first[i].messages)), first[i].reference, first[i].id]
                for i in range(len(task))]


def test_splits_share_no_question_where_seeds_alone_would() -> None:
    """Sums of two digits: seeds that never meet still ask the same."""
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = GymConfig(dataset="chain_sum", size=300, held_out_size=30, config=small,
                       template="{question}")

    def questions(of: Any) -> set[str]:
        return {of[i].messages[0]["content"] for i in range(len(of))}

    train, held = questions(GymTask(config)), questions(GymTask(config, "held_out"))
    assert len(train) > 50 and len(held) > 5 and not train & held
    by_seeds = [reasoning_gym.create_dataset("chain_sum", seed=s, size=300, **small)
                for s in (0, 300)]
    assert set.intersection(*({entry["question"] for entry in d} for d in by_seeds))


@given(size=st.integers(1, 50), held=st.integers(1, 50), seed=st.integers(0, 10 ** 6))
def test_blocks_of_seeds_never_meet(size: int, held: int, seed: int) -> None:
    config = GymConfig(dataset="chain_sum", size=size, held_out_size=held, seed=seed)
    seen: set[int] = set()
    for split in ("train", "held_out"):
        task = GymTask(config, split)
        for block in range(4):
            settings = task.settings(block)
            seeds = set(range(settings["seed"], settings["seed"] + settings["size"]))
            assert len(seeds) == len(task) and not seeds & seen
            seen |= seeds


def test_without_a_held_out_share_items_are_the_datasets_own() -> None:
    config = GymConfig(dataset="leg_counting", size=5, seed=9, held_out_share=0.0,
                       system="Be brief.", template="Q: {question}")
    own = reasoning_gym.create_dataset("leg_counting", size=5, seed=9)
    for i in range(5):
        assert GymTask(config)[i].messages == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Q: {own[i]['question']}"})
    with pytest.raises(TaskError, match="held_out_share is 0"):
        GymTask(config, "held_out")


def test_a_dataset_with_too_few_questions() -> None:
    class Constant:
        def __getitem__(self, index: int) -> dict[str, str]:
            return {"question": "1 + 1?", "answer": "2"}

    task = GymTask(GymConfig(dataset="chain_sum", size=1), "held_out")
    task._make = lambda block: Constant()
    with pytest.raises(TaskError, match="too few different questions"):
        task[0]


def test_bad_settings_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"size is 0.*seed is -1.*held_out_share is 0.9.*"
                                         "config sets size.*template has no"):
        GymConfig(dataset="chain_sum", size=0, seed=-1, held_out_share=0.9, template="",
                  config={"size": 3})
    for name, settings in (("no such", {}), ("chain_sum", {"nonsense": 1}),
                           ("chain_sum", {"min_terms": -1})):
        with pytest.raises(TaskError, match=f"cannot make the dataset {name}"):
            GymTask(GymConfig(dataset=name, config=settings))
    with pytest.raises(IndexError, match="no item 5; the task has 5"):
        GymTask(GymConfig(dataset="chain_sum", size=5))[5]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1?", "reference": "2"}\n\n'
                    '{"messages": [{"role": "system", "content": "x"}, {"role": "user", '
                    '"content": "y"}], "id": "mine"}\n')
    task = build_task(TaskConfig(file=FileConfig(str(path), system="s")))
    assert [task[i] for i in range(len(task))] == [
        TaskItem(({"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}), "2",
                 "train.jsonl/1"),
        TaskItem(({"role": "system", "content": "x"}, {"role": "user", "content": "y"}), None,
                 "mine")]
    with pytest.raises(TaskError, match="no held-out file"):
        build_task(TaskConfig(file=FileConfig(str(path))), "held_out")
    assert len(build_task(TaskConfig(file=FileConfig("", held_out=str(path))), "held_out")) == 2


@pytest.mark.parametrize(("text", "said"), [
    ("", "has no prompts"), ("{", "line 1 is not valid JSON"), ("[]", "line 1 must be an object"),
    ('{"prompt": ""}', "not empty"), ('{"messages": []}', "list of at least one"),
    ('{"prompt": "a", "messages": []}', "either messages or prompt"),
    ('{"prompt": "a", "answer": 1}', "unknown fields answer"),
    ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "line 2 has the id '1' again")])
def test_files_that_are_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=said):
        FileTask(FileConfig(str(path)))
    with pytest.raises(TaskError, match="cannot be read: No such file"):
        FileTask(FileConfig(str(tmp_path / "none")))


def squares(split: str, n: int = 3) -> list[TaskItem]:
    return [TaskItem(({"role": "user", "content": f"{i}²?"},), i * i, f"{split}/{i}")
            for i in range(n)]


def test_a_task_of_ones_own_and_jobs() -> None:
    table = {"python": f"{__name__}:squares", "options": {"n": 5}}
    task = build_task(build(TaskConfig, table), "held_out")
    assert len(task) == 5 and task[4].reference == 16 and task[4].id == "held_out/4"
    gym = build(TaskConfig, {"gym": {"dataset": "chain_sum", "config": {"min_terms": 3}}})
    assert build_task(gym)[0].id == "chain_sum/train/0"
    for table, said in (({}, "no source"),
                        ({"python": "a:b", "file": {"path": "x"}}, "exactly one"),
                        ({"file": {"path": "x"}, "options": {"a": 1}}, "options are for")):
        with pytest.raises(ValueError, match=said):
            build(TaskConfig, table)
    for path, said in (("nothing_there:x", "no module nothing_there"), ("json:nope", "json has no"),
                       ("json", "form package.module:name"), ("json:loads", "cannot be called")):
        with pytest.raises(ValueError, match=said):
            build_task(TaskConfig(python=path, options={"q": 1} if "loads" in path else {}))
