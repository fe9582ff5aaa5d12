"""What is taken from a verifier's reward before the baseline: length, and drift from the reference.

Legend: L output tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.train import TrainConfig
from async_grpo.types import Sample
from async_grpo.types.roles import REFERENCE


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


def shaped(sample: Sample, config: TrainConfig) -> Sample:
    """The sample with the penalties of the run's options; k1 in the reward needs its scores."""
    overlong = overlong_penalty(
        sample.episode.longest_turn,
        max_tokens=config.max_generation_tokens,
        buffer_tokens=config.overlong_buffer_tokens,
        largest=config.overlong_penalty,
    )
    kl = 0.0
    if config.kl_coefficient and not config.kl_in_loss and sample.num_trained_tokens:
        kl = sum(
            kl_penalty(
                row.logprobs,
                part.scores[REFERENCE],
                loss_mask_L=row.loss_mask,
                coefficient=config.kl_coefficient,
            )
            for part in sample.parts()
            for row in part.episode.rows
            if row.logprobs is not None
        )
    if not overlong and not kl:
        return sample  # as most runs' are
    return replace(sample, overlong_penalty=overlong, kl_penalty=kl)
