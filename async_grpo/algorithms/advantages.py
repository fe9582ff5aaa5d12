"""The baseline of a group: how much better each output was than its siblings. Pure.

Legend: _G members of the group, _V its valid members (verification did not fail).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from async_grpo.types import VerdictStatus

AdvantageMethod = Literal["grpo", "dr", "rloo"]


def group_advantages(
    rewards_G: ArrayLike,
    *,
    statuses: Sequence[VerdictStatus] | None = None,
    method: str = "grpo",
    eps: float = 1e-4,
) -> NDArray[np.float64]:
    """Advantages [G] of one group; without `statuses` every member is valid.

    - `grpo`: (x - mean) / (std + eps). The std is the sample one (ddof 1), and eps 1e-4: the
      formula of DeepSeekMath leaves it open, TRL and verl both take torch's default, so learning
      rates carry over from them; it is also the unbiased estimate for the few members of a group.
    - `dr`: x - mean (Dr. GRPO).
    - `rloo`: x - mean of the other members.

    Scored and unscorable members make the statistics. A member whose verification failed is never
    part of them; its place holds 0.0, and it must be neither trained nor counted. A group without
    variance is found by exact equality and is exactly 0.0.

    >>> group_advantages([1, 0, 0, 1], method="rloo").round(3).tolist()
    [0.667, -0.667, -0.667, 0.667]
    >>> group_advantages([3, 1, 9], statuses=["scored", "unscorable", "error"], method="dr")
    array([ 1., -1.,  0.])
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    valid_G = np.ones_like(rewards, dtype=bool)
    if statuses is not None:
        valid_G = np.array([status != "error" for status in statuses], dtype=bool)
    if rewards.shape != valid_G.shape or rewards.ndim != 1:
        raise ValueError(
            f"a group needs one status a reward, got {rewards.shape} and {valid_G.shape}"
        )
    if not np.isfinite(rewards[valid_G]).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}: fix the reward adapter")
    advantages_G = np.zeros_like(rewards)
    advantages_G[valid_G] = _advantages(rewards[valid_G], method, eps)
    return advantages_G


def has_variance(rewards_G: ArrayLike) -> bool:
    """Whether any two rewards differ, by exact equality."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return bool((rewards != rewards[:1]).any())


def _advantages(rewards_V: NDArray[np.float64], method: str, eps: float) -> NDArray[np.float64]:
    if method not in get_args(AdvantageMethod):
        raise ValueError(f"advantage must be one of {get_args(AdvantageMethod)}, got {method!r}")
    if not has_variance(rewards_V):
        return np.zeros_like(rewards_V)
    centred_V = rewards_V - rewards_V.mean()
    if method == "grpo":
        return centred_V / (rewards_V.std(ddof=1) + eps)
    if method == "rloo":  # x - (sum - x) / (n - 1) = (x - mean) * n / (n - 1)
        return centred_V * (len(rewards_V) / (len(rewards_V) - 1))
    return centred_V
