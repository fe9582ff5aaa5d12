"""Writes the tables of docs/metrics.md out of the schema: `python tools/metrics_page.py`.

What stands above the first of them is written by hand. A test compares the page with the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from async_grpo.telemetry.schema import SECTIONS
from async_grpo.types.metrics import Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEADER = (
    "| metric | meaning | numerator / denominator | window | unit |",
    "|---|---|---|---|---|",
)


def rewritten(page: str) -> str:
    """The page with tables of what is measured now."""
    introduction = page.partition("\n## ")[0]
    tables = [_table(str(section.__doc__), metrics) for section, metrics in SECTIONS.items()]
    return introduction + "".join(tables)


def _table(title: str, metrics: Sequence[Metric]) -> str:
    rows = [_row(metric) for metric in metrics]
    return "\n".join([f"\n## {title.rstrip('.')}\n", *HEADER, *rows]) + "\n"


def _row(metric: Metric) -> str:
    quotient = " / ".join(f"`{key}`" for key in (metric.numerator, metric.denominator) if key)
    cells = (f"`{metric.name}`", metric.meaning, quotient, metric.window, metric.unit or "–")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
