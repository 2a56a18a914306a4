"""The algorithms: each is a choice of advantage, policy loss and aggregation, and a few numbers.

    name                   advantage              loss        aggregation
    ppo                    gae (a critic)         ppo         token_mean                1707.06347
    grpo                   grpo                   ppo         seq_mean_token_mean       2402.03300
    dr_grpo                dr_grpo                ppo         seq_mean_token_sum_norm   2503.20783
    rloo                   rloo                   reinforce   seq_mean_token_sum        2402.14740
    reinforce_pp           reinforce_pp           ppo         token_mean                2501.03262
    reinforce_pp_baseline  reinforce_pp_baseline  ppo         token_mean
    dapo                   grpo                   ppo         token_mean                2503.14476
    gspo                   grpo                   gspo        seq_mean_token_mean       2507.18071
    cispo                  grpo                   cispo       token_mean                2506.13585
    online_dpo             best and worst of a prompt's samples, dpo                    2402.04792

A run may change any of it (`RecipeConfig`). What each part computes is in `kilter.rl.advantages`,
`policy_loss`, `aggregation`, `kl` and `off_policy`; `kilter.rl.lesson` puts it together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from kilter.rl.aggregation import Aggregation
from kilter.rl.kl import AdaptiveKL, Estimator, FixedKL
from kilter.rl.policy_loss import check_bounds

Advantage = Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline",
                    "none"]
Loss = Literal["ppo", "gspo", "cispo", "reinforce", "dpo"]
KLPlace = Literal["none", "reward", "loss"]
Correction = Literal["none", "tis", "mis", "icepop", "geometric"]
PairLoss = Literal["sigmoid", "ipo"]


@dataclass(frozen=True)
class Recipe:
    """All that an algorithm is.

    Attributes:
        advantage, loss, aggregation: see the table above.
        norm_length: the constant of ``seq_mean_token_sum_norm``; 0: rollout.max_tokens.
        eps_low, eps_high: the clip of the ratio.
        dual_clip: the most a ratio counts for with a negative advantage; 0: no such bound.
        gamma, lam: of returns and of GAE.
        std_ddof: of grpo's standard deviation.
        bootstrap: whether GAE takes an answer that a limit cut off as one that goes on, and adds
            the critic's value of its last state to the reward it was given. Only for rewards that
            are given on the way: where the whole answer has been judged nothing is to come, and a
            value that is learned from itself runs away.
        whiten: whether GAE's advantages are whitened over the step.
        value_clip, value_weight: of the critic's loss; a clip of 0 is none.
        kl: where the divergence from the reference counts: in the ``reward`` of each token, in the
            ``loss``, or nowhere.
        kl_beta: its weight; kl_estimator: k1, k2 or k3, unless a run says so k1 in the reward and
            k2 in the loss, whose gradient is the divergence's (docs/rl-losses.md).
        kl_target, kl_horizon: a target above 0 makes the weight follow it (in nats per sequence).
        entropy: weight of the entropy bonus.
        dynamic: prompts whose samples all have the same reward are replaced, in at most
            ``dynamic_rounds`` rounds of sampling.
        overlong: tokens before max_tokens from which on answers are punished; 0: not at all.
        missing_eos: what an answer that was cut off loses.
        correction: of data that older weights sampled: its importance weights, bounded by
            ``correction_low`` and ``correction_high``.
        beta, dpo_loss: of DPO.
    """

    advantage: Advantage
    loss: Loss
    aggregation: Aggregation
    norm_length: int = 0
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    std_ddof: int = 1
    bootstrap: bool = False
    whiten: bool = True
    value_clip: float = 0.2
    value_weight: float = 1.0
    kl: KLPlace = "none"
    kl_beta: float = 0.0
    kl_estimator: Estimator = "k2"
    kl_target: float = 0.0
    kl_horizon: int = 10_000
    entropy: float = 0.0
    dynamic: bool = False
    dynamic_rounds: int = 4
    overlong: int = 0
    missing_eos: float = 0.0
    correction: Correction = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0
    beta: float = 0.1
    dpo_loss: PairLoss = "sigmoid"

    def __post_init__(self) -> None:
        problems = []
        for name, kind in (("advantage", Advantage), ("loss", Loss), ("aggregation", Aggregation),
                           ("kl", KLPlace), ("kl_estimator", Estimator),
                           ("correction", Correction), ("dpo_loss", PairLoss)):
            if getattr(self, name) not in get_args(kind):
                problems.append(f"{name} is {getattr(self, name)!r} but must be one of "
                                f"{', '.join(get_args(kind))}")
        if (self.kl == "none") != (self.kl_beta == 0.0):
            problems.append(f"kl is {self.kl!r} and kl_beta {self.kl_beta}; set both or neither")
        if self.kl == "loss" and self.kl_estimator == "k1":
            problems.append("k1 as a loss has the expected gradient 0 and does nothing; set "
                            "kl_estimator to k2 or k3, or kl to \"reward\"")
        if self.kl_target and self.kl != "reward":
            problems.append("kl_target leads the weight of the penalty in the reward; set kl to "
                            "\"reward\", or kl_target to 0")
        if (self.loss == "dpo") != (self.advantage == "none"):
            problems.append(f"loss {self.loss!r} does not go with advantage {self.advantage!r}: "
                            "dpo, and no other, has none")
        if self.loss == "dpo" and (self.kl != "none" or self.entropy or
                                   self.correction != "none"):
            problems.append("dpo has its reference in the loss: leave kl, entropy and correction "
                            "alone")
        if self.kl == "reward" and self.advantage not in ("gae", "reinforce_pp"):
            problems.append(f"kl is \"reward\", which is a reward of each token, but the advantage "
                            f"{self.advantage} is of whole sequences; set kl to \"loss\"")
        if self.dual_clip and self.dual_clip <= 1.0:
            problems.append(f"dual_clip is {self.dual_clip} but must be above 1 (3 is usual), or 0")
        if self.std_ddof not in (0, 1):
            problems.append(f"std_ddof is {self.std_ddof} but must be 0 or 1")
        if not 0.0 <= self.correction_low <= 1.0 <= self.correction_high:
            problems.append(f"correction_low is {self.correction_low} and correction_high "
                            f"{self.correction_high}, but 1, the ratio of equal policies, must lie "
                            "between them")
        for name in ("value_clip", "value_weight", "kl_beta", "kl_target", "overlong",
                     "missing_eos", "norm_length"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name)} but must not be negative")
        if self.dynamic_rounds < 1 or self.beta <= 0.0:
            problems.append(f"dynamic_rounds is {self.dynamic_rounds} and beta {self.beta}, but "
                            "both must be positive")
        if not 0.0 <= self.gamma <= 1.0 or not 0.0 <= self.lam <= 1.0:
            problems.append(f"gamma is {self.gamma} and lam {self.lam}, but both are from 0 to 1")
        try:
            check_bounds(self.eps_low, self.eps_high)
            self.kl_controller()
        except ValueError as error:
            problems.append(str(error).rstrip("."))
        if problems:
            raise ValueError("; ".join(problems) + ".")

    @property
    def critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def groups(self) -> bool:
        """Whether the samples of a prompt are compared."""
        return self.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "none")

    @property
    def reference(self) -> bool:
        return self.kl != "none" or self.loss == "dpo"

    def uses(self, name: str) -> bool:
        """Whether a field means anything beside the others."""
        ratio = self.loss in ("ppo", "gspo", "cispo")
        return {
            "aggregation": self.loss != "dpo",
            "norm_length": self.aggregation == "seq_mean_token_sum_norm",
            "eps_low": ratio, "eps_high": ratio, "dual_clip": self.loss == "ppo",
            "gamma": self.advantage in ("gae", "reinforce_pp"), "lam": self.critic,
            "std_ddof": self.advantage == "grpo", "bootstrap": self.critic, "whiten": self.critic,
            "value_clip": self.critic, "value_weight": self.critic,
            "kl_estimator": self.kl != "none", "kl_horizon": self.kl_target > 0.0,
            "dynamic_rounds": self.dynamic,
            "correction_low": self.correction in ("mis", "icepop", "geometric"),
            "correction_high": self.correction != "none",
            "beta": self.loss == "dpo", "dpo_loss": self.loss == "dpo"}.get(name, True)

    def kl_controller(self) -> FixedKL | AdaptiveKL:
        if self.kl_target:
            return AdaptiveKL(self.kl_beta, self.kl_target, self.kl_horizon)
        return FixedKL(self.kl_beta)


ALGORITHMS: dict[str, Recipe] = {
    "ppo": Recipe("gae", "ppo", "token_mean"),
    "grpo": Recipe("grpo", "ppo", "seq_mean_token_mean"),
    "dr_grpo": Recipe("dr_grpo", "ppo", "seq_mean_token_sum_norm"),
    "rloo": Recipe("rloo", "reinforce", "seq_mean_token_sum"),
    "reinforce_pp": Recipe("reinforce_pp", "ppo", "token_mean"),
    "reinforce_pp_baseline": Recipe("reinforce_pp_baseline", "ppo", "token_mean"),
    "dapo": Recipe("grpo", "ppo", "token_mean", eps_high=0.28, dynamic=True),
    "gspo": Recipe("grpo", "gspo", "seq_mean_token_mean", eps_low=3e-4, eps_high=4e-4),
    "cispo": Recipe("grpo", "cispo", "token_mean", eps_low=1.0, eps_high=4.0),
    "online_dpo": Recipe("none", "dpo", "seq_mean_token_sum"),
}


@dataclass(frozen=True)
class RecipeConfig:
    """What a run changes of its algorithm: the fields of `Recipe`, where they are given."""

    advantage: str | None = None
    loss: str | None = None
    aggregation: str | None = None
    norm_length: int | None = None
    eps_low: float | None = None
    eps_high: float | None = None
    dual_clip: float | None = None
    gamma: float | None = None
    lam: float | None = None
    std_ddof: int | None = None
    bootstrap: bool | None = None
    whiten: bool | None = None
    value_clip: float | None = None
    value_weight: float | None = None
    kl: str | None = None
    kl_beta: float | None = None
    kl_estimator: str | None = None
    kl_target: float | None = None
    kl_horizon: int | None = None
    entropy: float | None = None
    dynamic: bool | None = None
    dynamic_rounds: int | None = None
    overlong: int | None = None
    missing_eos: float | None = None
    correction: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    beta: float | None = None
    dpo_loss: str | None = None

    def over(self, algorithm: str, max_tokens: int) -> Recipe:
        """Raises ValueError for what does not go together."""
        given: dict[str, Any] = {f.name: value for f in fields(self)
                                 if (value := getattr(self, f.name)) is not None}
        if given.get("kl") == "reward":
            given.setdefault("kl_estimator", "k1")
        recipe = replace(ALGORITHMS[algorithm], **given)
        if idle := [name for name in given if not recipe.uses(name)]:
            raise ValueError(f"{', '.join(idle)} would change nothing in {algorithm} as it is set "
                             "here; leave out what is not used.")
        if recipe.overlong > max_tokens:
            raise ValueError(f"overlong is {recipe.overlong} tokens, more than the {max_tokens} of "
                             "rollout.max_tokens.")
        if recipe.aggregation == "seq_mean_token_sum_norm":
            return replace(recipe, norm_length=recipe.norm_length or max_tokens)
        return recipe
