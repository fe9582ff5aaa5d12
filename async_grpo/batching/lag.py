"""How far behind its batch the weights were that sampled a token. Pure.

Lag counts versions between the weights that sampled a token and those that its batch starts from.
Drift between the gradient steps of one batch is another thing, and not counted here.
"""

from __future__ import annotations

from collections import Counter

from async_grpo.types import Completion


class StalenessError(RuntimeError):
    """A token is older than --max-staleness allows, or from the future: a bug, never trained on."""


def covers_output(completion: Completion) -> bool:
    """Every output token has exactly one version."""
    position = 0
    for span in completion.weights_versions:
        if span.start != position or span.stop < span.start:
            return False
        position = span.stop
    return position == len(completion.token_ids)


def tokens_by_lag(completion: Completion, *, batch: int, max_staleness: int) -> Counter[int]:
    """Output tokens by their lag in versions; raises `StalenessError` outside 0..max_staleness.

    >>> import numpy as np
    >>> from async_grpo.types import VersionSpan, WeightsVersion
    >>> spans = tuple(VersionSpan(WeightsVersion(0, b), 5 * b, 5 * b + 5) for b in (0, 1))
    >>> ids, mask = np.arange(10, dtype=np.int32), np.ones(10, dtype=np.bool_)
    >>> completion = Completion(ids, np.zeros(10, np.float32), spans, mask, "stop", "")
    >>> tokens_by_lag(completion, batch=1, max_staleness=1)
    Counter({1: 5, 0: 5})
    """
    if not covers_output(completion):
        raise StalenessError(
            f"every output token must have one version, got {completion.weights_versions} for "
            f"{len(completion.token_ids)} tokens: a bug in the worker's answer or its check"
        )
    counts: Counter[int] = Counter()
    for span in completion.weights_versions:
        if span.stop > span.start:
            counts[batch - span.version.batches] += span.stop - span.start
    for lag in counts:
        if not 0 <= lag <= max_staleness:
            raise StalenessError(
                f"lag must be in 0..{max_staleness} (--max-staleness), got {lag}: tokens of "
                f"version {batch - lag} reached batch {batch}, which is a bug in admission"
            )
    return counts
