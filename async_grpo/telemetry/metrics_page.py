"""docs/metrics.md out of the schema: `python -m async_grpo.telemetry.metrics_page docs/metrics.md`.

A test compares the two, so that the page cannot fall behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from async_grpo.telemetry.schema import SECTIONS, Metric

INTRODUCTION = """\
# The metrics of a run

`training_metrics.jsonl` in the output folder has one JSON object a line, one line a gradient step.
The same numbers go to the trackers of `--trackers`, in groups: `reward/avg_reward`.

Each metric is a numerator by a denominator, and both are sums over everything in the window: over
all ranks, minibatches and samples, whatever their partition. A metric whose denominator is 0 or
unknown is `null`; `NaN` is never written. Window *step*: since the previous line; *run*: since the
start of the run, resumed parts included.

Samples that reached a fate in the step are counted as `fate_trained`, `fate_zero_contribution`,
`fate_replaced`, `fate_failed` and `fate_discarded`. The last two are told apart by their reason
where there are any: `failed_generation`, `failed_verification`, `failed_reference`,
`failed_quarantine`, `failed_generation_timeout`, `failed_teacher_<name>`,
`failed_environment_<part>` (`engine`, `environment`, `tool_infrastructure`, `judge`, `deadline`);
and of work that was lost and done again `discarded_worker_died`, `discarded_lease_revoked`,
`discarded_stalled` (its tokens stopped), `discarded_stale_answer`, `discarded_worker_error`,
`discarded_restart` (of the run, or of its controller). Of the samples that count in the step,
`lag_<n>_samples` are those whose oldest token came from weights n versions before the batch's own,
and `lag_<n>_tokens` are output tokens by their own lag; n goes from 0 to `--max-staleness`, and a
larger one ends the run as a bug. Drift between the gradient steps of one batch is no lag. What an
algorithm of your own declares as its metrics stands in the same lines.

This page is made by `python -m async_grpo.telemetry.metrics_page docs/metrics.md`.
"""
HEADER = (
    "| metric | meaning | numerator / denominator | window | unit |",
    "|---|---|---|---|---|",
)


def markdown() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_section(title, metrics) for title, metrics in SECTIONS)


def _section(title: str, metrics: Sequence[Metric]) -> str:
    rows = [_row(metric) for metric in metrics]
    return "\n".join([f"\n## {title}\n", *HEADER, *rows]) + "\n"


def _row(metric: Metric) -> str:
    quotient = " / ".join(f"`{key}`" for key in (metric.numerator, metric.denominator) if key)
    cells = (f"`{metric.name}`", metric.meaning, quotient, metric.window, metric.unit or "–")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
