"""Prompts that are computed once for all their samples change no bit and no gradient."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kilter.mesh.layout import Layout
from kilter.rl.experience import Experience, Rollout
from kilter.rl.scoring import MicroBatch, deal, micro_batches
from kilter.rl.sharing import Shared, shared_lengths
from kilter.train.step import local_rows
from tests.ranks import RankPool
from tests.rl.tiny_policy import CONTEXT, PARAMS, compared, prompts, rollout_engine, trainer


def rollout(name: str, group: int, prompt: list[int], answer: list[int]) -> Rollout:
    flags = [False] * len(prompt) + [True] * len(answer)
    return Rollout([*prompt, *answer], flags, [-1.0 if a else math.nan for a in flags],
                   [0 if a else -1 for a in flags], group, "stop", name)


def test_what_is_shared() -> None:
    experience = Experience.of([
        rollout("a", 0, [1, 2, 3], [4, 5]), rollout("alone", 7, [1, 2, 3], [4]),
        rollout("b", 0, [1, 2, 3], [4, 6]), rollout("c", 0, [1, 2, 3], [9])])
    # The last token of the prompt predicts another one in each; so does what answers begin with.
    assert shared_lengths(experience) == [2, 0, 2, 2]
    shared = Shared.of(experience)
    assert shared is not None
    assert experience.tokens_T[shared.token_U].tolist() == [
        1, 2, 3, 4, 5, 1, 2, 3, 4, 3, 4, 6, 3, 9]
    assert shared.row_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 9, 10, 11, 0, 1, 12, 13]
    assert Shared.of(experience.select([0, 1])) is None


def test_groups_whose_prompts_differ_share_what_is_alike() -> None:
    experience = Experience.of([rollout("a", 0, [1, 2, 3, 3, 4], [4]),
                                rollout("b", 0, [1, 2, 9, 3], [4])])
    assert shared_lengths(experience) == [2, 2]
    other = Experience.of([rollout("a", 0, [5, 2], [4]), rollout("b", 0, [1, 2], [4])])
    assert shared_lengths(other) == [0, 0] and Shared.of(other) is None


def sizes() -> st.SearchStrategy[list[tuple[int, list[int]]]]:
    """Of each group: the length of its prompt, and of its answers."""
    return st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1,
                                                         max_size=4)), min_size=1, max_size=4)


@given(groups=sizes(), multiple=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_and_tokens_lead_to_each_other(groups: list[tuple[int, list[int]]], multiple: int,
                                            seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(50, (count,), generator=generator).tolist()

    made = []
    for group, (length, answers) in enumerate(groups):
        prompt = draw(length)
        made += [rollout(f"{group}/{i}", group, prompt, draw(n)) for i, n in enumerate(answers)]
    experience = Experience.of(made)
    shared = Shared.of(experience, multiple)
    spared = sum((length - 1) * (len(answers) - 1) for length, answers in groups)
    if shared is None:
        assert spared == 0
        return
    rows = experience.num_tokens - spared
    assert len(shared.token_U) == rows + -rows % multiple
    assert torch.equal(experience.tokens_T[shared.token_U][shared.row_T], experience.tokens_T)
    targets_T = experience.targets()
    assert torch.equal(targets_T[shared.token_U][shared.row_T], targets_T)
    # Rows are in the order of tokens, and each has some.
    assert shared.row_T.unique().tolist() == list(range(rows))
    batch = shared.batch(experience, "cpu")
    assert torch.equal(batch.positions_T[shared.row_T], torch.cat(
        [torch.arange(n, dtype=torch.int32) for n in experience.lengths.tolist()]))


@given(groups=sizes(), budget=st.integers(15, 60), at_least=st.integers(1, 12))
def test_no_micro_batch_has_more_rows_than_its_budget(
        groups: list[tuple[int, list[int]]], budget: int, at_least: int) -> None:
    made = [rollout(f"{group}/{i}", group, [group + 1] * length, [9] * n)
            for group, (length, answers) in enumerate(groups) for i, n in enumerate(answers)]
    experience = Experience.of(made)
    found = micro_batches(experience, budget, at_least=at_least, share=1)
    assert sorted(s for part in found for s in part.sequences) == list(range(len(made)))
    assert len(found) >= at_least
    assert all(part.batch().num_tokens == len(part.targets_T) <= budget for part in found)
    assert sum(part.valid for part in found) == experience.num_actions


def of_groups(temperature: float = 1.0) -> list[Rollout]:
    return rollout_engine().generate(
        prompts(9, 4), dataclasses.replace(PARAMS, temperature=temperature), seed=3, step=1)


@pytest.mark.parametrize("budget", [CONTEXT, 300, 4096])
def test_the_rollouts_bits(budget: int) -> None:
    rollouts, spread = of_groups(0.7), trainer()
    parts = deal(spread, Experience.of(rollouts), budget)
    assert sum(part.batch().num_tokens for part in parts) < 0.75 * sum(map(len, (
        r.tokens for r in rollouts)))
    compared(rollouts, spread, temperature=0.7, budget=budget).check()


def gradients(parts: list[MicroBatch]) -> dict[str, Tensor]:
    """Of a loss in which every action weighs differently."""
    spread = trainer()
    device = torch.device("cpu")
    given_ = [local_rows(spread, part, device) for part in parts]

    def loss(forward, k):  # type: ignore[no-untyped-def]
        values_T = parts[k].at_actions(forward(*given_[k]))
        weights_T = torch.cat([torch.linspace(0.5 + s, 1.0 + s, int(n)) for s, n in zip(
            parts[k].sequences, parts[k].experience.lengths, strict=True)])
        return (values_T * weights_T).nansum()

    spread.backward_all([batch for batch, _ in given_], loss, lambda _: nullcontext())
    spread.finish()
    return {held.name: held.tensor.grad.clone() for held in spread.held}


def test_the_gradient_is_that_of_the_sequences_apart() -> None:
    experience = Experience.of(of_groups())
    apart = gradients(micro_batches(experience, CONTEXT))
    together = gradients(micro_batches(experience, 4096, share=1))
    assert apart.keys() == together.keys()
    for name, grad in apart.items():
        assert float((together[name] - grad).norm()) <= 2e-6 * float(grad.norm()), name


def on_ranks(layout: Layout) -> bool:
    rollouts = of_groups()
    spread = trainer(layout=layout)
    assert any(part.shared for part in deal(spread, Experience.of(rollouts), 300, own=True))
    return compared(rollouts, spread, budget=300).exact


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=False),
                                    Layout(pp=2), Layout(dp=2, zero=3)], ids=str)
def test_any_layout(ranks: RankPool, layout: Layout) -> None:
    assert ranks.run(2, on_ranks, layout) == [True, True]
