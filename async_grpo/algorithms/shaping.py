"""What is taken from a verifier's reward before the baseline: length, and drift from the reference.

Legend: L output tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import Sample


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, buffer_tokens: int, largest: float
) -> float:
    """DAPO's soft punishment of an output of `num_tokens` (arXiv 2503.14476, eq. 13), not negative.

    Nothing up to `max_tokens - buffer_tokens`, then linearly more, `largest` at `max_tokens`. The
    paper's `largest` is 1; without a buffer there is no punishment.

    >>> [overlong_penalty(n, max_tokens=20, buffer_tokens=4, largest=1.0) for n in (16, 17, 20)]
    [0.0, 0.25, 1.0]
    """
    if not buffer_tokens:
        return 0.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return largest * min(max(excess / buffer_tokens, 0.0), 1.0)


def kl_penalty(
    behaviour_L: NDArray[np.float32],
    reference_L: NDArray[np.float32],
    *,
    loss_mask_L: NDArray[np.bool_],
    coefficient: float,
) -> float:
    """`coefficient` times k1, the sum of behaviour - reference over unmasked tokens, in nats.

    Either sign: only its mean over samples estimates a divergence.

    >>> import numpy as np
    >>> mask = np.array([True, True, False])
    >>> behaviour, reference = np.array([-1.0, -2.0, 0.0]), np.array([-2.0, -2.5, -9.0])
    >>> kl_penalty(behaviour, reference, loss_mask_L=mask, coefficient=0.1).__round__(6)
    0.15
    """
    differences = behaviour_L.astype(np.float64) - reference_L.astype(np.float64)
    return coefficient * float(differences[loss_mask_L].sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardShaping:
    """The penalties of a run; a coefficient of 0 switches one off."""

    max_tokens: int  # longest output
    overlong_buffer_tokens: int
    overlong_penalty: float
    kl_coefficient: float  # of k1 in the reward: 0 where the KL is in the loss

    def apply(self, sample: Sample) -> Sample:
        """The sample with its penalties; needs reference log-probabilities when k1 is on."""
        overlong = overlong_penalty(
            sample.episode.longest_turn,
            max_tokens=self.max_tokens,
            buffer_tokens=self.overlong_buffer_tokens,
            largest=self.overlong_penalty,
        )
        return dataclasses.replace(
            sample, overlong_penalty=overlong, kl_penalty=self._kl_penalty(sample)
        )

    def _kl_penalty(self, sample: Sample) -> float:
        if not self.kl_coefficient or not sample.num_trained_tokens:
            return 0.0
        if "reference" not in sample.scores:
            raise ValueError(
                "k1 in the reward needs reference log-probabilities, sample "
                f"{(sample.ordinal, sample.index)} has none: score it before its advantage"
            )
        return sum(
            kl_penalty(
                row.logprobs,
                part.scores["reference"],
                loss_mask_L=row.loss_mask,
                coefficient=self.kl_coefficient,
            )
            for part in sample.parts()
            for row in part.episode.rows
            if row.logprobs is not None
        )
