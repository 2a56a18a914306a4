"""Verifiable rewards: what is given (`Sample`), who judges (`Reward`), who calls them (`score`)."""

from kilter.rl.rewards.config import (
    REWARDS,
    FunctionReward,
    RewardConfig,
    build_reward,
    build_rewards,
)
from kilter.rl.rewards.sample import Sample, action_turns
from kilter.rl.rewards.score import Reward, RewardError, WeightedReward, score

__all__ = ["REWARDS", "FunctionReward", "Reward", "RewardConfig", "RewardError", "Sample",
           "WeightedReward", "action_turns", "build_reward", "build_rewards", "score"]
