"""Asynchronous RL: what is begun when, how old tokens get, and that nothing is lost or doubled.

Replicas are threads here (`tests.rl.local_replica`); `test_ray` has the same on a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.job import build, dump
from kilter.mesh.layout import Layout
from kilter.mesh.mesh import Mesh
from kilter.models.decoder import Decoder
from kilter.parallel.apply import apply
from kilter.rl.config import RLJob
from kilter.rl.distributed import book as book_module
from kilter.rl.distributed import rollouts as rollouts_module
from kilter.rl.distributed.book import Book, Group
from kilter.rl.distributed.roles import TooStale, check_staleness
from kilter.rl.distributed.rollouts import Rollouts, RolloutsLost, covered
from kilter.rl.distributed.weights import pack, parcel_plan, trainer_sums, unpack
from kilter.rl.experience import Rollout
from kilter.rl.placement import PlacementConfig
from kilter.rl.prompts import Question
from kilter.rl.reshard import gather_holdings
from kilter.rl.reshard_layout import rollout_formats, rollout_parts
from kilter.rl.rewards import Sample
from kilter.rl.rollout import Prompt
from kilter.rl.tasks import TaskItem
from kilter.serve.params import SamplingParams
from tests.ranks import RankPool
from tests.rl.local_replica import Clock, Seen, run_local
from tests.rl.tiny_job import make_job
from tests.rl.tiny_policy import spec

PARAMS = SamplingParams(max_tokens=4)


def job_of(folder: Path, staleness: int, replicas: int = 1, **changes: Any) -> Any:
    placement = {"ray": True, "rollout": replicas, "max_staleness": staleness}
    placement |= changes.pop("placement", {})
    return make_job(folder, placement=placement, **changes)


def refuse(samples: Sequence[Sample]) -> list[float]:
    raise ValueError("This reward judges nothing.")


def same(a: Seen, b: Seen) -> None:
    """Rollouts, losses and weights, bit for bit."""
    assert len(a.experiences) == len(b.experiences)
    for x, y in zip(a.experiences, b.experiences, strict=True):
        assert x.ids == y.ids and x.finish == y.finish
        for name in ("tokens_T", "is_action_T", "version_T", "group_S", "cu_seqlens_S1"):
            assert torch.equal(getattr(x, name), getattr(y, name)), name
        assert torch.equal(x.logprobs_T.nan_to_num(7.0), y.logprobs_T.nan_to_num(7.0))
        assert {k: v.tolist() for k, v in x.rewards.items()} == {
            k: v.tolist() for k, v in y.rewards.items()}
    assert [t["loss"] for t in a.told] == [t["loss"] for t in b.told]
    assert [t["grad_norm"] for t in a.told] == [t["grad_norm"] for t in b.told]
    assert all(torch.equal(a.state[name], b.state[name]) for name in a.state | b.state)


# ---- runs ----

def test_no_staleness_is_the_synchronous_run(tmp_path: Path) -> None:
    want = run_local(make_job(tmp_path / "sync"), apart=False)
    for replicas in (1, 3):
        got = run_local(job_of(tmp_path / str(replicas), 0, replicas))
        same(got, want)
        assert all(told["rollouts"]["overlap"] == 0.0 for told in got.told)


def _apart(job: dict[str, Any], ray: bool) -> Seen:
    made = build(RLJob, job)
    return run_local(made, apart=ray, ahead=min(1, made.placement.max_staleness))


def test_a_trainer_of_several_ranks_and_roles(ranks: RankPool, tmp_path: Path) -> None:
    """The actor on two ranks, the critic on a third; the rollout in their world, or apart."""

    def ppo(name: str, world: int, ray: bool, staleness: int) -> list[Seen]:
        placement = {"ray": ray, "rollout": 1, "critic": 1, "max_staleness": staleness}
        job = make_job(tmp_path / name, algorithm="ppo", layout={"dp": 2, "zero": 3},
                       placement=placement, critic={"optimizer": {"lr": 1e-2}})
        return ranks.run(world, _apart, dump(job), ray)

    want, got = ppo("sync", 4, False, 0), ppo("apart", 3, True, 0)
    for rank in range(2):
        same(got[rank], want[rank])
    for seen in ppo("late", 3, True, 1):
        assert seen.groups == list(range(4 * 4))
        assert {age for ages in seen.ages for age in ages} == {0, 1}


@pytest.mark.parametrize(("staleness", "in_flight"), [(1, "continue"), (1, "restart"),
                                                      (4, "continue")])
def test_no_token_is_older_than_allowed(tmp_path: Path, staleness: int, in_flight: str) -> None:
    seen = run_local(job_of(tmp_path, staleness, 2, steps=8, placement={"in_flight": in_flight},
                            rollout={"max_tokens": 16}), ahead=1, hold=3)
    assert seen.groups == list(range(8 * 4))
    assert all(0 <= age <= staleness for ages in seen.ages for age in ages)
    assert max(age for ages in seen.ages for age in ages) >= 1  # or this would prove nothing
    for told, ages in zip(seen.told, seen.ages, strict=True):
        assert told["staleness"] == {"max": max(ages),
                                     "mean": pytest.approx(sum(ages) / len(ages))}
        assert told["gate"]["max"] == 0.0
        assert told["gate"]["skipped"] == sum(age > 0 for age in ages)
    assert max(told["rollouts"]["overlap"] for told in seen.told) > 0.0
    assert seen.told[-1]["rollouts"]["ahead"] == 0  # nothing is begun for steps that never come
    assert sum(told["rollouts"]["interrupted"] for told in seen.told) > 0
    kinds = {len({v for v in rollout.versions if v >= 0}) for experience in seen.experiences
             for rollout in experience.to_rollouts()}
    assert (kinds == {1}) if in_flight == "restart" else (max(kinds) > 1)


def test_a_hand_out_that_is_too_eager_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    real = book_module.staleness_capacity
    monkeypatch.setattr(book_module, "staleness_capacity",
                        lambda **kwargs: real(**kwargs) + 3 * kwargs["batch"])
    with pytest.raises(TooStale, match=r"'p\d+/\d' has tokens of the weights 0 to 0, but "
                                       "the trainer's are 2 and placement.max_staleness is 1"):
        run_local(job_of(tmp_path, 1, steps=6), ahead=8)


def test_a_replica_that_dies_loses_and_doubles_nothing(tmp_path: Path) -> None:
    deaths = [frozenset({1}), frozenset({2}), frozenset({1, 2})]
    want = run_local(make_job(tmp_path / "sync"), apart=False)
    for replicas in (1, 2):
        got = run_local(job_of(tmp_path / str(replicas), 0, replicas), deaths=deaths)
        same(got, want)
        assert sum(told["rollouts"]["replaced"] for told in got.told) == len(got.lost)
        assert len(got.lost) == 3 or replicas == 2  # of which one may do the other's work
    late = run_local(job_of(tmp_path / "late", 2, 2, steps=6), deaths=deaths, ahead=1)
    assert late.groups == list(range(6 * 4))
    assert all(len(set(e.ids)) == e.num_seqs == 16 for e in late.experiences)
    assert all(age <= 2 for ages in late.ages for age in ages)


def test_replicas_that_always_die_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RolloutsLost, match="replica 0 died 3 times without finishing a prompt"):
        run_local(job_of(tmp_path, 1, launch={"max_restarts": 2}), deaths=[frozenset({1})] * 9)


def test_a_replica_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears of it again, and it had work: that is given out again. One that works may be
    taken for one that hangs, when the clock leaps."""
    hangs, clock = [frozenset({1}), frozenset({2})], Clock()
    monkeypatch.setattr(rollouts_module, "time", clock)
    want = run_local(make_job(tmp_path / "sync"), apart=False)
    got = run_local(job_of(tmp_path / "hanging", 0, 2, launch={"max_restarts": 10000}),
                    hangs=hangs, clock=clock)
    same(got, want)
    assert "hang" in got.lost
    assert sum(told["rollouts"]["replaced"] for told in got.told) >= len(got.lost)


class Still:
    """A replica whose start does not end."""

    said: int | None = None

    def start(self, done: Any) -> None:
        self.done = done

    def progress(self) -> int | None:
        return self.said

    def kill(self) -> None:
        pass

    close = kill


def test_who_gets_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is of a standstill, not of the work; and who was given up is not heard."""
    clock, made = [0.0], list[Still]()

    def make(index: int) -> Still:
        made.append(Still())
        return made[-1]

    monkeypatch.setattr(rollouts_module, "time", SimpleNamespace(
        monotonic=lambda: clock[0], time=lambda: clock[0]))
    job = job_of(tmp_path, 1, placement={"deadline": 10.0}, launch={"max_restarts": 1})
    rollouts = Rollouts(job, make, 1)  # type: ignore[arg-type]

    def look(now: float, said: int | None = None) -> int:
        with rollouts._changed:
            clock[0] = now
            made[-1].said = said
            rollouts._watch()
            return len(made)

    assert look(9.0) == 1
    for number in range(5):  # it gets on, slowly
        assert look(18.0 + 9.0 * number, number) == 1
    assert look(63.9, 4) == 1 and look(64.1, 4) == 2
    made[0].done(None, None)  # of the one that was given up
    rollouts._events.put(rollouts._nothing)
    while not rollouts._events.empty():
        time.sleep(0.01)
    assert rollouts._slots[0].state == "busy"
    with pytest.raises(RolloutsLost, match=r"replica 0 died 2 times .* did not get on for 10 s, "
                                           r"see placement\.deadline"):
        look(75.0)
    rollouts.close()


def test_what_a_replica_raises_is_the_runs_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="This reward judges nothing"):
        run_local(job_of(tmp_path, 1, rewards=[{"kind": f"{__name__}:refuse"}]))


def test_a_resumed_run_skips_and_doubles_no_prompt(tmp_path: Path) -> None:
    job = job_of(tmp_path, 2, 2, steps=6)
    first = run_local(job, ahead=1, stop_after=3)
    assert first.ending is not None and first.ending.stopped
    second = run_local(job, ahead=1)
    assert first.groups + second.groups == list(range(6 * 4))
    assert first.versions + second.versions == list(range(6))
    # What was in flight at the checkpoint has been begun again, with its weights.
    assert all(int(v) >= 3 for e in second.experiences for v in e.version_T[e.is_action_T])
    assert all(age <= 2 for ages in second.ages for age in ages)


@pytest.mark.parametrize("changes", [
    {"algorithm": "dapo", "recipe": {"correction": "tis"}},
    {"algorithm": "online_dpo"},
    {"eval": {"every": 2, "prompts": 4}},
    {"lora": {"rank": 2}, "recipe": {"kl": "loss", "kl_beta": 0.1}}], ids=lambda c: next(iter(c)))
def test_kinds_of_runs(tmp_path: Path, changes: dict[str, Any]) -> None:
    seen = run_local(job_of(tmp_path, 1, 2, steps=5, **changes), ahead=1,
                     deaths=[frozenset({3})])
    assert seen.ending is not None and seen.ending.step == 5
    assert seen.groups == sorted(set(seen.groups))  # in order; dapo drops some
    assert all(0 <= age <= 1 for ages in seen.ages for age in ages)
    assert all(told["gate"]["max"] == 0.0 for told in seen.told if "gate" in told)
    if "lora" in changes:
        sent = [told["sent"]["tensors"] for told in seen.told]
        assert sent[0] > sent[1] == sent[-1]
    elif "eval" not in changes:
        assert any(told["gate"]["skipped"] for told in seen.told if "gate" in told)


# ---- the book ----

def question(place: int, n: int = 2) -> Question:
    return Question(Prompt([1, 2], place, f"p{place}", n), TaskItem((), None, f"t{place}"))


def finished(group: Group) -> Group:
    return replace(group, rollouts=tuple(replace(r, finish="stop") for r in group.rollouts))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 999))
def test_the_book_keeps_order_and_age(batch: int, staleness: int, replicas: int, seed: int
                                      ) -> None:
    """Whatever comes back when: all prompts are taken once and in order, none later than
    ``staleness`` versions after it was begun, and none is begun for steps that never come."""
    steps, random = 5, Random(seed)
    book, version, place = Book(batch, staleness, steps), 0, 0
    begun: dict[str, int] = {}
    out: list[list[Group]] = [[] for _ in range(replicas)]
    taken: list[str] = []
    for version in range(steps):
        questions = [question(place + i) for i in range(batch)]
        place += batch
        book.ask(questions, version, PARAMS, lambda i, place=place: question(place + i))
        while (found := book.take()) is None:
            assert all(min(g.question.prompt.group for g in part) < place + staleness * batch
                       for part in out if part)
            replica = random.randrange(replicas)
            if out[replica]:
                done = random.randint(0, len(out[replica]))
                book.back([finished(g) if i < done else g for i, g in enumerate(out[replica])])
                out[replica] = []
            else:
                out[replica] = book.give(random.randint(1, 3))
                for group in out[replica]:
                    begun.setdefault(group.id, version)
                    assert group.step == group.question.prompt.group // batch
        names = list(dict.fromkeys(r.id.partition("/")[0] for r in found))
        assert all(version - begun[name] <= staleness for name in names)
        taken += names
    assert taken == [f"p{i}" for i in range(steps * batch)]
    assert book.ahead == 0 and not any(out) and book.give(9) == []


def test_the_book_begins_as_many_ahead_as_allowed() -> None:
    book = Book(2, 2, 10)
    book.ask([question(0), question(1)], 0, PARAMS, lambda i: question(2 + i))
    given_out = [book.give(1) for _ in range(9)]
    assert [g.id for part in given_out for g in part] == [f"p{i}" for i in range(2 + 2 * 2)]
    with pytest.raises(ValueError, match="p7 came back, but nobody had it"):
        book.back([Group.begun(question(7), 0, PARAMS, False)])


def test_what_is_aside_goes_first() -> None:
    book = Book(2, 1, 10)
    book.ask([question(0), question(1)], 0, PARAMS, lambda i: question(2 + i))
    book.back([finished(g) for g in book.give(2)])
    assert len(book.take() or []) == 4
    book.ask([replace(question(0), prompt=Prompt([1], 9, "held-out-9", 1))], 0, PARAMS, None)
    assert [g.id for g in book.give(3)] == ["held-out-9"]
    assert [g.id for g in book.give(3)] == ["p2", "p3"]


def test_covered_is_the_length_of_a_union() -> None:
    assert covered([(0, 1), (0.5, 2), (3, 9), (4, 5)], 0.25, 4.5) == pytest.approx(1.75 + 1.5)
    assert covered([], 0, 1) == covered([(2, 3)], 0, 1) == 0.0


def test_staleness_is_checked_both_ways() -> None:
    rollout = Rollout([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 3, 4], 0, "stop",
                      "p0/0")
    check_staleness([rollout], 4, 1)
    for version, most in ((5, 1), (3, 1), (4, 0)):
        with pytest.raises(TooStale):
            check_staleness([rollout], version, most)


# ---- the weights ----

def _parcels(degree: int, layout: Layout) -> list[tuple[int, bool]]:
    """(bytes that came, whether they are the whole model's) of a part on this rank."""
    with torch.device("meta"):
        models = [Decoder(spec(num_kv_heads=2)) for _ in range(3)]
    spread = apply(models[0], Mesh(layout))
    spread.initialise(5, 0.02)
    alone = apply(models[1], Mesh.single())
    alone.initialise(5, 0.02)
    world = spread.mesh.axis("world")
    parts = rollout_parts(models[2], degree)
    formats = rollout_formats(models[2], torch.bfloat16)
    local = {name: (p.detach(), shard) for name, (p, shard) in spread.local.items()}
    plan = parcel_plan(gather_holdings(local, world), parts, formats)
    packed = list(pack(local, plan, world.index, degree))
    sums = trainer_sums(local, plan, world.index, world)
    every: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(every, packed)
    replica = Mesh(Layout(dp=world.size // degree, tp=degree)).axis("tp")
    mine = [[rank[g][replica.index] for rank in every] for g in range(len(plan.groups))]
    found, bytes_ = [], sum(len(p.data) for group in mine for rank in group for p in rank)
    assert bytes_ == plan.received_bytes(world.size + replica.index)
    for tensors in unpack(mine, parts[replica.index], sums, replica):
        for name, tensor in tensors.items():
            whole = alone.local[name][0].detach().to(formats[name])
            shard = parts[replica.index][name]
            found.append(all(torch.equal(part, whole[box.slices])
                             for box, _, part in shard.parts(tensor)))
    assert len(found) == len(parts[replica.index])
    return [(bytes_, all(found))]


@pytest.mark.parametrize(("degree", "layout"), [
    (1, Layout(dp=2, tp=2, zero=3)), (2, Layout(dp=4, zero=3)), (4, Layout(dp=2, tp=2)),
    (2, Layout(tp=4))], ids=str)
def test_parcels_are_the_trainers_weights(ranks: RankPool, degree: int, layout: Layout) -> None:
    found = ranks.run(4, _parcels, degree, layout)
    assert all(right for [(_, right)] in found)


# ---- what a job may say ----

@pytest.mark.parametrize(("table", "problem"), [
    ({"max_staleness": 1}, "set ray = true and rollout"),
    ({"max_staleness": 1, "ray": True}, "set ray = true and rollout"),
    ({"in_flight": "restart", "ray": True, "rollout": 1}, "in_flight is set, but max_staleness"),
    ({"in_flight": "drop", "ray": True}, "in_flight is 'drop' but must be continue or restart"),
    ({"deadline": 5.0, "ray": True}, "deadline is 5.0, but only rollouts that are actors of Ray"),
    ({"deadline": 0.0, "ray": True, "rollout": 1}, "deadline is 0.0 but must be positive"),
    ({"cpus": 0.5}, "only Ray reserves CPUs"), ({"cpus": 0.0, "ray": True}, "must be positive")])
def test_placements_that_cannot_be(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PlacementConfig(**table)


def test_rollouts_apart_are_counted_after_the_others() -> None:
    here = PlacementConfig(rollout=2, critic=1)
    apart = PlacementConfig(rollout=2, critic=1, ray=True)
    assert (here.ranks_of("rollout", 4), here.ranks_of("critic", 4), here.inside(4)) == (
        range(4, 6), range(6, 7), 7)
    assert (apart.ranks_of("rollout", 4), apart.ranks_of("critic", 4), apart.inside(4)) == (
        range(5, 7), range(4, 5), 5)


