"""What samples of held-out questions tell of a model, and how sure that is. Pure.

Legend: Q questions, M statistics.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 1000
CONFIDENCE = 0.95


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that one at least of `k` samples is correct, unbiased (Chen et al. 2021, eq. 1).

    1 - C(n - c, k) / C(n, k), as a product of c factors: no binomial is ever computed.
    Raises `ValueError` unless 1 <= k <= n and 0 <= c <= n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= samples and 0 <= correct <= samples, got k {k} of "
            f"{num_samples} samples, {num_correct} correct: sample more, or lower k"
        )
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    after_wrong = np.arange(num_wrong + 1, num_samples + 1)  # n - c + 1 ... n
    return float(1.0 - np.prod(1.0 - k / after_wrong))


def bootstrap_intervals(values: Floats, *, seed: int) -> tuple[Floats, Floats]:
    """Where the means of `values` [Q, M] may lie, as (low [M], high [M]) of 95 %.

    Percentiles of the means of resampled questions (Efron 1979): samples of one question depend on
    each other, questions do not. All statistics see the same resamples. NaN without questions.
    """
    num_questions, num_statistics = values.shape
    if not num_questions:
        return np.full(num_statistics, np.nan), np.full(num_statistics, np.nan)
    # Raw words, because only bit generators promise the same numbers for ever.
    words = np.random.Philox(key=seed)
    means = np.empty((NUM_RESAMPLES, num_statistics))
    for resample in means:
        drawn = (words.random_raw(num_questions) % num_questions).astype(np.int64)
        counts = np.bincount(drawn, minlength=num_questions)
        resample[:] = counts @ values / num_questions
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    return low, high
