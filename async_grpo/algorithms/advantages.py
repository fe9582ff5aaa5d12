"""The baseline of a group: how much better each output was than its siblings. Pure.

Legend: _G members of the group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def group_advantages(
    rewards_G: ArrayLike, *, method: str = "grpo", eps: float = 1e-4
) -> NDArray[np.float64]:
    """Advantages [G] of one group, scored and unscorable members alike.

    - `grpo`: (x - mean) / (std + eps). The std is the sample one (ddof 1), and eps 1e-4: the
      formula of DeepSeekMath leaves it open, TRL and verl both take torch's default, so learning
      rates carry over from them; it is also the unbiased estimate for the few members of a group.
    - `dr`: x - mean (Dr. GRPO).
    - `rloo`: x - mean of the other members.

    A group without variance is found by exact equality and is exactly 0.0.

    >>> group_advantages([1, 0, 0, 1], method="rloo").round(3).tolist()
    [0.667, -0.667, -0.667, 0.667]
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(
            f"rewards must be finite, got {rewards_G.tolist()}: fix the reward adapter"
        )
    if not has_variance(rewards_G):
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if method == "grpo":
        return centred_G / (rewards_G.std(ddof=1) + eps)
    if method == "rloo":  # x - (sum - x) / (n - 1) = (x - mean) * n / (n - 1)
        return centred_G * (len(rewards_G) / (len(rewards_G) - 1))
    return centred_G


def has_variance(rewards_G: ArrayLike) -> bool:
    """Whether any two rewards differ, by exact equality."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return bool((rewards != rewards[:1]).any())
