import runpy
from pathlib import Path

from async_grpo.telemetry.schema import METRIC_BY_NAME, axis_label

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "metrics_page.py"))


def test_the_page_is_what_the_schema_says():
    page = TOOL["PAGE"].read_text(encoding="utf-8")
    assert page == TOOL["rewritten"](page), "run python tools/metrics_page.py"


def test_every_metric_is_documented_with_a_distinct_axis():
    page = TOOL["PAGE"].read_text(encoding="utf-8")
    assert all(
        f"| `{metric.name}` | {metric.meaning}" in page for metric in METRIC_BY_NAME.values()
    )
    labels = [axis_label(metric.name) for metric in METRIC_BY_NAME.values()]
    assert len(set(labels)) == len(labels)
