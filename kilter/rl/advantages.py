"""Advantages: how much better an action was than expected, per token or per sequence.

Per token, for a policy with a critic: `token_rewards` → `gae` (arXiv 1506.02438) → `whiten`.
Per sequence, against the other answers to the same prompt: `grpo` (2402.03300), `dr_grpo`
(2503.20783), `rloo` (2402.14740); `to_tokens` of `kilter.rl.masks` spreads them. Against the whole
step: `reinforce_pp` and `reinforce_pp_baseline` (2501.03262).

Everything is given by what counts: ``mask_T`` is True for the action tokens that are learned from,
``valid_S`` for the sequences (aborted ones are out). A group must be there as a whole; what goes
over a whole step takes sums that can be added over ranks (`moments`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kilter.rl.masks import check_mask, only, to_tokens


@torch.no_grad()
def token_rewards(*, reward_S: Tensor, mask_T: Tensor, sequence_T: Tensor,
                  kl_T: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """float [T]: the sequence's reward on its last action token, and minus ``beta`` times the KL
    estimate on every action token; 0 elsewhere.

    Args:
        kl_T: an estimate of the KL divergence from the reference, per token (`kilter.rl.kl`).

    Raises:
        ValueError: for a KL estimate without ``beta`` or the other way around, or a wrong mask.
    """
    check_mask(mask_T, sequence_T=sequence_T)
    if (kl_T is None) != (beta == 0.0):
        raise ValueError(f"beta is {beta}, and a KL estimate is "
                         f"{'missing' if kl_T is None else 'given'}; give both or neither.")
    last_T = _last_of_each(mask_T, sequence_T)
    rewards_T = only(reward_S[sequence_T], last_T)
    if kl_T is None:
        return rewards_T
    check_mask(mask_T, kl_T=kl_T)
    return rewards_T - beta * only(kl_T, mask_T)


@torch.no_grad()
def gae(*, rewards_T: Tensor, values_T: Tensor, bootstrap_S: Tensor, mask_T: Tensor,
        sequence_T: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over each sequence's action tokens; what stands between
    them (a tool's output) is skipped as if it were not there.

        δ_t = r_t + γ V_{t+1} − V_t        A_t = δ_t + γλ A_{t+1}        returns_t = A_t + V_t

    Args:
        values_T: the critic's value of the state that each action was taken in, at the action
            (`Experience.at_actions` of what the critic computed).
        bootstrap_S: the value of the state after the last action: the critic's where a limit cut
            the sequence off, 0 where it ended by itself.

    Returns:
        (advantages, returns), float [T], 0 where the mask is False.
    """
    check_mask(mask_T, rewards_T=rewards_T, values_T=values_T, sequence_T=sequence_T)
    places = _Places.of(mask_T, sequence_T, bootstrap_S.shape[0])
    rewards_SN, values_SN = places.table(rewards_T), places.table(values_T)
    advantages_SN = torch.zeros_like(values_SN)
    next_value_S = bootstrap_S.to(values_SN)
    next_advantage_S = torch.zeros_like(next_value_S)
    for n in reversed(range(values_SN.shape[1])):
        here_S = places.counts_S > n
        delta_S = rewards_SN[:, n] + gamma * next_value_S - values_SN[:, n]
        advantage_S = delta_S + gamma * lam * next_advantage_S
        next_advantage_S = torch.where(here_S, advantage_S, next_advantage_S)
        next_value_S = torch.where(here_S, values_SN[:, n], next_value_S)
        advantages_SN[:, n] = next_advantage_S
    advantages_T = places.flat(advantages_SN)
    return advantages_T, only(advantages_T + values_T, mask_T)


@torch.no_grad()
def discounted_returns(*, rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_seqs: int,
                       gamma: float = 1.0) -> Tensor:
    """float [T]: Σ γ^k r over this and the sequence's later action tokens; 0 elsewhere."""
    check_mask(mask_T, rewards_T=rewards_T, sequence_T=sequence_T)
    places = _Places.of(mask_T, sequence_T, num_seqs)
    returns_SN = places.table(rewards_T)
    for n in reversed(range(returns_SN.shape[1] - 1)):
        returns_SN[:, n] += gamma * returns_SN[:, n + 1]
    return places.flat(returns_SN)


def moments(values_T: Tensor, *, mask_T: Tensor) -> Tensor:
    """float64 [3]: count, sum and sum of squares of the values that count. Those of parts of a
    step, over micro-batches and ranks, add up to those of the step."""
    check_mask(mask_T, values_T=values_T)
    kept = values_T[mask_T].double()
    count = torch.tensor(float(kept.numel()), dtype=torch.float64, device=kept.device)
    return torch.stack([count, kept.sum(), kept.square().sum()])


def whiten(values_T: Tensor, *, mask_T: Tensor, moments: Tensor, center: bool = True,
           ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """(value − mean) / √(variance + eps) where values count, 0 elsewhere. Fewer than two values
    tell nothing and become 0.

    Args:
        moments: of the whole step, see `moments`.
        center: whether the mean is taken out.
        ddof: the variance is divided by the count minus this.
    """
    check_mask(mask_T, values_T=values_T)
    count, total, squares = moments.tolist()
    if count < 2:
        return torch.zeros_like(values_T)
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0) * count / (count - ddof)
    shifted_T = only(values_T, mask_T).double() - (mean if center else 0.0)
    return only((shifted_T / (variance + eps) ** 0.5).to(values_T.dtype), mask_T)


def grpo(*, reward_S: Tensor, group_S: Tensor, valid_S: Tensor, ddof: int = 1,
         eps: float = 1e-6) -> Tensor:
    """float [S]: (r − mean of the group) / (standard deviation of the group + eps), 2402.03300.
    The paper does not say which deviation; the default is the sample's (ddof 1).

    0 for a sequence that is not valid, alone in its group, or in a group of equal rewards.
    """
    group = _Groups.of(reward_S, group_S, valid_S)
    return group.result(group.centred_S / (group.std_S(ddof) + eps))


def dr_grpo(*, reward_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """float [S]: r − mean of the group, undivided (2503.20783). 0 as for `grpo`."""
    group = _Groups.of(reward_S, group_S, valid_S)
    return group.result(group.centred_S)


def rloo(*, reward_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """float [S]: r − mean of the group's others (2402.14740), which is n/(n − 1) times what
    `dr_grpo` has. 0 as for `grpo`."""
    group = _Groups.of(reward_S, group_S, valid_S)
    return group.result(group.centred_S * group.count_S / (group.count_S - 1.0).clamp_min(1.0))


def reinforce_pp(*, rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_seqs: int,
                 gamma: float = 1.0, total: Callable[[Tensor], Tensor] = lambda sums: sums
                 ) -> Tensor:
    """float [T]: the return of each action (`token_rewards` with its KL penalty in), whitened over
    all actions of the step (2501.03262).

    Args:
        total: adds `moments` over the ranks of the step; by default this part is all of it.
    """
    returns_T = discounted_returns(rewards_T=rewards_T, mask_T=mask_T, sequence_T=sequence_T,
                                   num_seqs=num_seqs, gamma=gamma)
    return whiten(returns_T, mask_T=mask_T, moments=total(moments(returns_T, mask_T=mask_T)))


def reinforce_pp_baseline(*, reward_S: Tensor, group_S: Tensor, valid_S: Tensor, mask_T: Tensor,
                          sequence_T: Tensor,
                          total: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
    """float [T]: r − mean of the group, then whitened over all actions of the step (2501.03262).

    The whitening takes out the mean over tokens, which is not 0 where longer answers have other
    rewards; a group of equal rewards, 0 before it, then is not 0 after it.

    Args:
        total: as for `reinforce_pp`.
    """
    mask_T = mask_T & valid_S[sequence_T]
    centred_S = dr_grpo(reward_S=reward_S, group_S=group_S, valid_S=valid_S)
    centred_T = to_tokens(centred_S, mask_T=mask_T, sequence_T=sequence_T)
    return whiten(centred_T, mask_T=mask_T, moments=total(moments(centred_T, mask_T=mask_T)))


def informative(*, reward_S: Tensor, group_S: Tensor, valid_S: Tensor) -> Tensor:
    """bool [S]: which sequences dynamic sampling keeps (DAPO, 2503.14476 eq. 11): the valid ones
    of groups in which not all valid rewards are equal."""
    group = _Groups.of(reward_S, group_S, valid_S)
    return valid_S & group.differs_S


@dataclass(frozen=True)
class _Groups:
    """What each sequence's group is like, [S], in float64; only valid sequences count."""

    centred_S: Tensor  # reward minus the group's mean
    count_S: Tensor
    differs_S: Tensor  # bool: not all rewards of the group are equal
    valid_S: Tensor
    index_S: Tensor
    num_groups: int
    dtype: torch.dtype

    @staticmethod
    def of(reward_S: Tensor, group_S: Tensor, valid_S: Tensor) -> _Groups:
        check_mask(valid_S, reward_S=reward_S, group_S=group_S)
        if group_S.is_floating_point() or not reward_S.is_floating_point():
            raise ValueError(f"Rewards are {reward_S.dtype} and groups {group_S.dtype}, but "
                             "rewards must be floats and groups integers; were they swapped?")
        if not bool(reward_S[valid_S].isfinite().all()):
            raise ValueError("A reward of a valid sequence is not finite; mark the sequence as not "
                             "valid, or mend the reward.")
        names, index_S = group_S.unique(return_inverse=True)
        rewards_S = only(reward_S.double(), valid_S)
        zeros_G = rewards_S.new_zeros(len(names))
        count_G = zeros_G.index_add(0, index_S, valid_S.double())
        mean_G = zeros_G.index_add(0, index_S, rewards_S) / count_G.clamp_min(1.0)
        low_G, high_G = (
            zeros_G.scatter_reduce(0, index_S[valid_S], rewards_S[valid_S], how,
                                   include_self=False) for how in ("amin", "amax"))
        return _Groups(rewards_S - mean_G[index_S], count_G[index_S], (low_G < high_G)[index_S],
                       valid_S, index_S, len(names), reward_S.dtype)

    def std_S(self, ddof: int) -> Tensor:
        squares_G = self.centred_S.new_zeros(self.num_groups).index_add(
            0, self.index_S, only(self.centred_S.square(), self.valid_S))
        return (squares_G[self.index_S] / (self.count_S - ddof).clamp_min(1.0)).sqrt()

    def result(self, advantage_S: Tensor) -> Tensor:
        """Exactly 0 where a reward says nothing: the mean of equal rewards may be off by rounding,
        and division by a small deviation would make that large."""
        return only(advantage_S, self.valid_S & self.differs_S).to(self.dtype)


@dataclass(frozen=True)
class _Places:
    """Where flat action tokens stand in a table of one row per sequence, N the most actions."""

    mask_T: Tensor
    row_A: Tensor  # of each action
    column_A: Tensor
    counts_S: Tensor

    @staticmethod
    def of(mask_T: Tensor, sequence_T: Tensor, num_seqs: int) -> _Places:
        row_A = sequence_T[mask_T]
        counts_S = torch.bincount(row_A, minlength=num_seqs)
        starts_S = counts_S.cumsum(0) - counts_S
        column_A = torch.arange(len(row_A), device=row_A.device) - starts_S[row_A]
        return _Places(mask_T, row_A, column_A, counts_S)

    def table(self, values_T: Tensor) -> Tensor:
        """[S, N], 0 where a sequence has fewer actions."""
        width = int(self.counts_S.max()) if len(self.counts_S) else 0
        table_SN = values_T.new_zeros(len(self.counts_S), width)
        table_SN[self.row_A, self.column_A] = values_T[self.mask_T]
        return table_SN

    def flat(self, table_SN: Tensor) -> Tensor:
        values_T = table_SN.new_zeros(self.mask_T.shape)
        values_T[self.mask_T] = table_SN[self.row_A, self.column_A]
        return values_T


def _last_of_each(mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """bool [T]: True at the last token of each sequence that counts."""
    at_A = mask_T.nonzero()[:, 0]
    rows_A = sequence_T[at_A]
    is_last_A = torch.ones_like(rows_A, dtype=torch.bool)
    is_last_A[:-1] = rows_A[1:] != rows_A[:-1]
    last_T = torch.zeros_like(mask_T)
    last_T[at_A[is_last_A]] = True
    return last_T
