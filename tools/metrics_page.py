"""Writes the tables of docs/metrics.md out of the schema: `python tools/metrics_page.py`.

What stands above the first of them is written by hand. A test compares the page with the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from async_grpo.telemetry.schema import (
    EVALUATION_METRICS,
    PIPELINE_METRICS,
    REPLACEMENT_METRICS,
    STEP_METRICS,
    TRAINER_METRICS,
)
from async_grpo.types.metrics import Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
SECTIONS = (
    ("Facts of the gradient step, as trainer rank 0 knows them", STEP_METRICS),
    ("Over all samples of the step: trained and of zero contribution", PIPELINE_METRICS),
    (
        "Over the groups that dynamic sampling replaced: no other metric holds them",
        REPLACEMENT_METRICS,
    ),
    ("Over the tokens trained: samples of zero contribution are never sent", TRAINER_METRICS),
    ("Held-out data, in evaluation_metrics.jsonl", EVALUATION_METRICS),
)
HEADER = (
    "| metric | meaning | numerator / denominator | window | unit |",
    "|---|---|---|---|---|",
)


def rewritten(page: str) -> str:
    """The page with tables of what is measured now."""
    introduction = page.partition("\n## ")[0]
    return introduction + "".join(_section(title, metrics) for title, metrics in SECTIONS)


def _section(title: str, metrics: Sequence[Metric]) -> str:
    rows = [_row(metric) for metric in metrics]
    return "\n".join([f"\n## {title}\n", *HEADER, *rows]) + "\n"


def _row(metric: Metric) -> str:
    quotient = " / ".join(f"`{key}`" for key in (metric.numerator, metric.denominator) if key)
    cells = (f"`{metric.name}`", metric.meaning, quotient, metric.window, metric.unit or "–")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
