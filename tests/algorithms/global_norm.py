"""GRPO with advantages normalised over the whole gradient step, as REINFORCE++ has them."""

import numpy as np

from async_grpo.algorithms.grpo import Grpo


class GlobalNorm(Grpo):
    def finish_step(self, groups):
        rewards = np.array([s.shaped_reward for group in groups for s in group.samples])
        mean, std = rewards.mean(), rewards.std() + 1e-4
        return [[float((s.shaped_reward - mean) / std) for s in g.samples] for g in groups]
