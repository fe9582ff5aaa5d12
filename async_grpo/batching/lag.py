"""How far behind its batch the weights were that sampled a token. Pure.

Lag counts versions between the weights that sampled a token and those that its batch starts from.
Drift between the gradient steps of one batch is another thing, and not counted here.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from async_grpo.types import Episode, Row, Turn


class StalenessError(RuntimeError):
    """A token is older than --max-staleness allows, or from the future: a bug, never trained on."""


def covers_output(turn: Turn) -> bool:
    """Every output token has exactly one version."""
    position = 0
    for span in turn.weights_versions:
        if span.start != position or span.stop < span.start:
            return False
        position = span.stop
    return position == len(turn.token_ids)


def covers_trained(row: Row) -> bool:
    """Every trained token that was sampled has exactly one version."""
    num_versions = np.zeros(len(row.token_ids), np.int64)
    for span in row.weights_versions:
        if not 0 <= span.start <= span.stop <= len(num_versions):
            return False
        num_versions[span.start : span.stop] += 1
    is_needed = row.loss_mask if row.logprobs is not None else np.False_
    return bool((num_versions <= 1).all() and (num_versions[is_needed] == 1).all())


def tokens_by_lag(episode: Episode, *, batch: int, max_staleness: int) -> Counter[int]:
    """Sampled tokens by their lag in versions; raises `StalenessError` outside 0..max_staleness.

    >>> import numpy as np
    >>> from async_grpo.types import Turn, VersionSpan, WeightsVersion
    >>> spans = tuple(VersionSpan(WeightsVersion(0, b), 5 * b, 5 * b + 5) for b in (0, 1))
    >>> turn = Turn(np.arange(10, dtype=np.int32), np.zeros(10, np.float32), spans, "stop", "")
    >>> tokens_by_lag(Episode.of_turn(turn.token_ids[:1], turn), batch=1, max_staleness=1)
    Counter({1: 5, 0: 5})
    """
    counts: Counter[int] = Counter()
    for row in episode.rows:
        if not covers_trained(row):
            raise StalenessError(
                f"every sampled token must have one version, got {row.weights_versions} for "
                f"{len(row.token_ids)} tokens: a bug in the worker's answer or its check"
            )
        for span in row.weights_versions:
            if span.stop > span.start:
                counts[batch - span.version.batches] += span.stop - span.start
    for lag in counts:
        if not 0 <= lag <= max_staleness:
            raise StalenessError(
                f"lag must be in 0..{max_staleness} (--max-staleness), got {lag}: tokens of "
                f"version {batch - lag} reached batch {batch}, which is a bug in admission"
            )
    return counts
