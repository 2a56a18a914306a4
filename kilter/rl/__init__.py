"""Reinforcement learning: experience, rewards, advantages and losses, rollout and its gate."""
