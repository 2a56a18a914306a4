"""`Experience`: what a policy did. A flat run of T tokens of S sequences, as a `Batch` has them.

    tokens_T      [ p0 p1 a2 a3 o4 a5 | p0 a1 a2 ]     p: prompt, a: sampled, o: a tool's output
    is_action_T   [  0  0  1  1  0  1 |  0  1  1 ]
    logprobs_T    [  -  -  x  x  -  x |  -  x  x ]     "-": NaN, so that use without the mask shows
    version_T     [ -1 -1  7  7 -1  8 | -1  7  7 ]     weights that the token was sampled with

Token ids go in and token ids come out: nothing is tokenised again. There are two alignments. Here
everything stands at the token it is about; what a model computes stands at the row that predicts,
one to the left. `Experience.at_rows` and `Experience.at_actions` lead from one to the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kilter.models.batch import boundaries
from kilter.train.data.corpus import IGNORE

FinishReason = Literal["stop", "length", "abort"]

_FORMAT = "kilter-experience-1"


@dataclass(frozen=True)
class Rollout:
    """One sequence: a prompt, what was sampled, and what tools said in between.

    Attributes:
        tokens: ids of prompt and answer.
        is_action: per token, whether the policy sampled it. The first token has nothing before it
            and cannot be an action.
        logprobs: per token, the log-probability it was sampled with; NaN where it was not.
        versions: per token, the version of the weights it was sampled with; -1 where it was not.
        group: sequences of one prompt have the same number.
        finish: ``stop``, ``length`` (cut off at a limit: the text would have gone on) or ``abort``
            (not to be learned from).
        id: names the sequence, uniquely.
        rewards: part -> reward of the whole sequence; may be filled in later.
    """

    tokens: Sequence[int]
    is_action: Sequence[bool]
    logprobs: Sequence[float]
    versions: Sequence[int]
    group: int
    finish: FinishReason
    id: str
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Experience:
    """S sequences of T tokens in all. Checks itself when it is made: ValueError, with all problems.
    """

    tokens_T: Tensor  # int64
    cu_seqlens_S1: Tensor  # int32: sequence s owns tokens cu[s] … cu[s+1]
    is_action_T: Tensor  # bool: sampled by the policy; False: prompt, a tool's output
    logprobs_T: Tensor  # float32: behaviour log-probability of each action, NaN elsewhere
    version_T: Tensor  # int32: weights version of each action, -1 elsewhere
    group_S: Tensor  # int64: sequences of one prompt share it
    rewards: dict[str, Tensor]  # part -> float32 [S]
    finish: tuple[FinishReason, ...]
    ids: tuple[str, ...]  # unique

    def __post_init__(self) -> None:
        problems = self._shape_problems() or self._value_problems()
        if problems:
            raise ValueError(" ".join(problems))

    @staticmethod
    def of(sequences: Sequence[Rollout]) -> Experience:
        """The sequences, at least one, side by side.

        Raises:
            ValueError: if a record's lists differ in length, or the records in their reward parts,
                and for everything that makes an `Experience` invalid.
        """
        if not sequences:
            raise ValueError("An experience needs at least one sequence, but there is none.")
        for rollout in sequences:
            lengths = [len(rollout.tokens), len(rollout.is_action), len(rollout.logprobs),
                       len(rollout.versions)]
            if len(set(lengths)) != 1:
                raise ValueError(f"Sequence {rollout.id!r} has {lengths[0]} tokens, {lengths[1]} "
                                 f"is_action, {lengths[2]} logprobs and {lengths[3]} versions; "
                                 "give one of each per token.")
            if rollout.rewards.keys() != sequences[0].rewards.keys():
                raise ValueError(f"Sequence {rollout.id!r} has the reward parts "
                                 f"{sorted(rollout.rewards)}, but sequence {sequences[0].id!r} has "
                                 f"{sorted(sequences[0].rewards)}; give every sequence the same.")

        def flat(name: str, dtype: torch.dtype) -> Tensor:
            return torch.cat([torch.as_tensor(getattr(s, name), dtype=dtype) for s in sequences])

        return Experience(
            flat("tokens", torch.int64), boundaries([len(s.tokens) for s in sequences]),
            flat("is_action", torch.bool), flat("logprobs", torch.float32),
            flat("versions", torch.int32),
            torch.tensor([s.group for s in sequences], dtype=torch.int64),
            {part: torch.tensor([s.rewards[part] for s in sequences], dtype=torch.float32)
             for part in sequences[0].rewards},
            tuple(s.finish for s in sequences), tuple(s.id for s in sequences))

    @staticmethod
    def concat(experiences: Sequence[Experience]) -> Experience:
        """All sequences of all of them, in order.

        Raises:
            ValueError: if there is none, if reward parts differ, or if an id comes twice.
        """
        if not experiences:
            raise ValueError("There is no experience to concatenate; give at least one.")
        first = experiences[0]
        for other in experiences:
            if other.rewards.keys() != first.rewards.keys():
                raise ValueError(f"Experiences with the reward parts {sorted(first.rewards)} and "
                                 f"{sorted(other.rewards)} cannot be one; give all the same parts.")
        tensors = {name: torch.cat([getattr(e, name) for e in experiences]) for name in
                   ("tokens_T", "is_action_T", "logprobs_T", "version_T", "group_S")}
        return Experience(
            **tensors,
            cu_seqlens_S1=boundaries([n for e in experiences for n in e.lengths.tolist()]),
            rewards={part: torch.cat([e.rewards[part] for e in experiences])
                     for part in first.rewards},
            finish=tuple(f for e in experiences for f in e.finish),
            ids=tuple(i for e in experiences for i in e.ids))

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.ids)

    @property
    def num_actions(self) -> int:
        return int(self.is_action_T.sum())

    @property
    def lengths(self) -> Tensor:
        """int64 [S]: tokens of each sequence."""
        return self.cu_seqlens_S1.diff().long()

    @property
    def sequence_T(self) -> Tensor:
        """int64 [T]: the index of each token's sequence."""
        return torch.repeat_interleave(torch.arange(self.num_seqs), self.lengths)

    @property
    def complete_S(self) -> Tensor:
        """bool [S]: False for sequences that were aborted and are not to be learned from."""
        return torch.tensor([reason != "abort" for reason in self.finish])

    @property
    def truncated_S(self) -> Tensor:
        """bool [S]: True where a limit cut the sequence off."""
        return torch.tensor([reason == "length" for reason in self.finish])

    def select(self, indices: Sequence[int] | Tensor) -> Experience:
        """The sequences with these indices, in this order.

        Raises:
            ValueError: if there is none, one does not exist, or one comes twice.
        """
        chosen = [int(i) for i in indices]
        if not chosen or min(chosen) < 0 or max(chosen) >= self.num_seqs:
            raise ValueError(f"Sequences {chosen} were asked for, but there are {self.num_seqs}; "
                             f"give at least one index, from 0 to {self.num_seqs - 1}.")
        cu = self.cu_seqlens_S1.tolist()
        rows = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in chosen])
        picked = torch.tensor(chosen)
        return Experience(
            self.tokens_T[rows], boundaries([cu[i + 1] - cu[i] for i in chosen]),
            self.is_action_T[rows], self.logprobs_T[rows], self.version_T[rows],
            self.group_S[picked], {part: r_S[picked] for part, r_S in self.rewards.items()},
            tuple(self.finish[i] for i in chosen), tuple(self.ids[i] for i in chosen))

    def to_rollouts(self) -> list[Rollout]:
        """The sequences as records, in order; `of` leads back to the same bits."""
        cu = self.cu_seqlens_S1.tolist()
        tokens, actions, logprobs, versions = (
            x.tolist() for x in (self.tokens_T, self.is_action_T, self.logprobs_T, self.version_T))
        parts = {part: r_S.tolist() for part, r_S in self.rewards.items()}
        groups = self.group_S.tolist()
        return [Rollout(tokens[start:end], actions[start:end], logprobs[start:end],
                        versions[start:end], groups[s], self.finish[s], self.ids[s],
                        {part: values[s] for part, values in parts.items()})
                for s, (start, end) in enumerate(pairwise(cu))]

    def with_reward(self, part: str, values: Sequence[float] | Tensor) -> Experience:
        """The same with one more reward part, or another value for one that is there.

        Raises:
            ValueError: unless there is one finite value per sequence.
        """
        r_S = torch.as_tensor(values, dtype=torch.float32)
        if r_S.shape != (self.num_seqs,):
            raise ValueError(f"The reward {part!r} has the shape {list(r_S.shape)}, but there are "
                             f"{self.num_seqs} sequences; give one value for each.")
        return replace(self, rewards={**self.rewards, part: r_S})

    def reward_S(self, weights: Mapping[str, float] | None = None) -> Tensor:
        """float32 [S]: the weighted sum of the parts; without weights each counts once.

        Raises:
            ValueError: if there is no part, or the weights do not name exactly the parts there are.
        """
        weights = dict.fromkeys(self.rewards, 1.0) if weights is None else weights
        if not self.rewards or weights.keys() != self.rewards.keys():
            raise ValueError(f"There are weights for the reward parts {sorted(weights)}, but the "
                             f"experience has {sorted(self.rewards)}; name each of at least one "
                             "part, with 0 to leave it out.")
        total_S = torch.zeros(self.num_seqs, dtype=torch.float64)
        for part in sorted(self.rewards):
            total_S += weights[part] * self.rewards[part].double()
        return total_S.float()

    def targets(self) -> Tensor:
        """int64 [T]: what a trainer scores. At row t the next token of the same sequence if that
        token is an action, else `IGNORE`; a sequence's last row has none."""
        return torch.where(self.at_rows(self.is_action_T), self.tokens_T.roll(-1), IGNORE)

    def at_rows(self, token_values_T: Tensor) -> Tensor:
        """From the token a value is about to the row that predicts it: row t gets the value of
        token t + 1 of the same sequence. A sequence's last row predicts nothing and gets NaN (of
        floats), False, or -1 (of integers). Gradients pass.

        Raises:
            ValueError: if there are not T values.
        """
        return self._shifted(token_values_T, -1, self.cu_seqlens_S1[1:].long() - 1)

    def at_actions(self, row_values_T: Tensor) -> Tensor:
        """From the row that predicts to the token it is about: token t gets the value of row t - 1
        of the same sequence. Nothing predicts a sequence's first token; it gets NaN, False or -1.
        Gradients pass.

        Raises:
            ValueError: if there are not T values.
        """
        return self._shifted(row_values_T, 1, self.cu_seqlens_S1[:-1].long())

    def save(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all; what is no tensor is JSON in its
        header."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        tensors |= {f"rewards.{part}": r_S.contiguous() for part, r_S in self.rewards.items()}
        facts = json.dumps({"finish": self.finish, "ids": self.ids})
        partial = path.with_name(f"{path.name}.partial")
        save_file(tensors, partial, metadata={"format": _FORMAT, "experience": facts})
        os.replace(partial, path)

    @staticmethod
    def load(path: Path) -> Experience:
        """What `save` wrote, bit for bit.

        Raises:
            ValueError: if the file is none of ours, or damaged.
            FileNotFoundError: if there is none.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("format") != _FORMAT:
                    raise ValueError(f"{path} is not an experience of format {_FORMAT}; its "
                                     f"header says {header.get('format')!r}.")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(header["experience"])
            rewards = {name.removeprefix("rewards."): tensors.pop(name)
                       for name in list(tensors) if name.startswith("rewards.")}
            return Experience(**tensors, rewards=rewards, finish=tuple(facts["finish"]),
                              ids=tuple(facts["ids"]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read as an experience: {error}. Write it again "
                             "with Experience.save.") from error

    def _shifted(self, values_T: Tensor, by: int, edge: Tensor) -> Tensor:
        if values_T.shape != (self.num_tokens,):
            raise ValueError(f"The experience has {self.num_tokens} tokens, but the values have "
                             f"the shape {list(values_T.shape)}; give one per token.")
        is_edge = torch.zeros(self.num_tokens, dtype=torch.bool)
        is_edge[edge] = True
        fill = math.nan if values_T.is_floating_point() else -1
        if values_T.dtype == torch.bool:
            fill = False
        return values_T.roll(by).masked_fill(is_edge.to(values_T.device), fill)

    def _shape_problems(self) -> list[str]:
        tokens, seqs = self.tokens_T.numel(), len(self.ids)
        problems = []
        for name, dtype, count in (
                ("tokens_T", torch.int64, tokens), ("cu_seqlens_S1", torch.int32, seqs + 1),
                ("is_action_T", torch.bool, tokens), ("logprobs_T", torch.float32, tokens),
                ("version_T", torch.int32, tokens), ("group_S", torch.int64, seqs)):
            problems += _wrong_tensor(name, getattr(self, name), dtype, count)
        for part, r_S in self.rewards.items():
            problems += _wrong_tensor(f"rewards[{part!r}]", r_S, torch.float32, seqs)
        if len(self.finish) != seqs:
            problems.append(f"finish has {len(self.finish)} reasons for {seqs} sequences.")
        if seqs == 0:
            problems.append("An experience needs at least one sequence, but there is none.")
        return problems

    def _value_problems(self) -> list[str]:
        cu_S1, action_T = self.cu_seqlens_S1.long(), self.is_action_T
        lengths = cu_S1.diff()
        if int(cu_S1[0]) != 0 or int(cu_S1[-1]) != self.num_tokens or int(lengths.min()) < 1:
            return [f"cu_seqlens_S1 is {cu_S1.tolist()} but must lead from 0 to the "
                    f"{self.num_tokens} tokens in sequences of at least one token."]

        problems = []

        def at_fault(wrong_T: Tensor, what: str) -> None:
            """A sentence about the first token that is wrong."""
            for t in wrong_T.nonzero()[:1, 0].tolist():
                s = int(torch.searchsorted(cu_S1, t, right=True)) - 1
                problems.append(f"Sequence {self.ids[s]!r}: token {t - int(cu_S1[s])} {what}.")

        first_T = torch.zeros_like(action_T)
        first_T[cu_S1[:-1]] = True
        at_fault(first_T & action_T, "is marked as sampled, but nothing comes before it; a "
                                     "sequence begins with a prompt")
        at_fault(action_T & ~self.logprobs_T.isfinite(),
                 "was sampled, but its log-probability is not finite")
        at_fault(action_T & (self.logprobs_T > 0.0),
                 "was sampled, but its log-probability is above 0")
        at_fault(~action_T & ~self.logprobs_T.isnan(),
                 "was not sampled, but has a log-probability; it must be NaN there")
        at_fault(action_T & (self.version_T < 0),
                 "was sampled, but its weights version is negative")
        at_fault(~action_T & (self.version_T != -1),
                 "was not sampled, but has a weights version; it must be -1 there")
        at_fault(self.tokens_T < 0, "has a negative id")
        for part, r_S in self.rewards.items():
            if not bool(r_S.isfinite().all()):
                bad = int((~r_S.isfinite()).nonzero()[0, 0])
                problems.append(f"The reward {part!r} of sequence {self.ids[bad]!r} is "
                                f"{float(r_S[bad])} but must be finite.")
        if unknown := sorted(set(self.finish) - set(get_args(FinishReason))):
            problems.append(f"finish has {unknown} but may have {list(get_args(FinishReason))}.")
        if len(set(self.ids)) != len(self.ids):
            twice = next(i for n, i in enumerate(self.ids) if i in self.ids[:n])
            problems.append(f"The id {twice!r} comes twice; ids name sequences and are unique.")
        return problems


_TENSORS = ("tokens_T", "cu_seqlens_S1", "is_action_T", "logprobs_T", "version_T", "group_S")


def _wrong_tensor(name: str, x: Tensor, dtype: torch.dtype, count: int) -> list[str]:
    if x.dtype == dtype and x.shape == (count,) and x.device.type == "cpu":
        return []
    return [f"{name} is {x.dtype} {list(x.shape)} on {x.device} but must be {dtype} [{count}] on "
            "the CPU."]
