from pathlib import Path

from async_grpo.telemetry.metrics_page import markdown
from async_grpo.telemetry.schema import METRIC_BY_NAME, axis_label

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_what_the_schema_says():
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run python -m async_grpo.telemetry.metrics_page docs/metrics.md"
    )


def test_every_metric_is_documented_with_a_distinct_axis():
    assert all(
        f"| `{metric.name}` | {metric.meaning}" in markdown() for metric in METRIC_BY_NAME.values()
    )
    labels = [axis_label(metric.name) for metric in METRIC_BY_NAME.values()]
    assert len(set(labels)) == len(labels)
