"""What the metrics are called in trackers: `reward/avg_reward`, so that charts come in groups."""

from __future__ import annotations

import re
from collections.abc import Mapping

NO_CHARTS = ("step", "iteration")  # the axis itself, and its like
GROUPS = (  # the first pattern that a name begins with
    ("run", r"alarms|total_|optimizer_|skipped_|failed_(checkpoints|trackers)"),
    ("reward", r"avg_(max_|format_|replaced_)?reward|avg_\w+_penalty|perc_with|perc_unscorable"),
    ("length", r"avg_(output|prompt)_tokens|perc_truncated|perc_masked"),
    (
        "ledger",
        r"\w*fate_|perc_resampled|lost_|failed_|discarded_|num_replacements|replaced_|\w+_(retries|restarts)",
    ),
    ("lag", r"lag_|avg_lag|avg_token_lag|max_lag"),
    ("engine", r"mismatch_|effective_|corrected_|canary_"),
    ("sync", r"sync_|recomputed_"),
    ("hardware", r"mfu|tflops_|peak_|seconds_(gathering|agreeing)"),
    (
        "speed",
        r"seconds|\w+_per_second|\w+_idle_fraction|packing_|avg_(generating|verifying|scoring)",
    ),
    ("update", r""),
)


def as_charts(row: Mapping[str, float | int | None]) -> dict[str, float]:
    """The numbers of a row of metrics under the names that trackers show.

    >>> as_charts({"step": 3, "avg_reward": 0.5, "fate_trained": 8, "loss": 1.5, "kl": None})
    {'reward/avg_reward': 0.5, 'ledger/fate_trained': 8, 'update/loss': 1.5}
    """
    return {
        f"{_group(name)}/{name}": value
        for name, value in row.items()
        if value is not None and name not in NO_CHARTS
    }


def _group(name: str) -> str:
    return next(group for group, pattern in GROUPS if re.match(pattern, name))
