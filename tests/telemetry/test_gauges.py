"""What Prometheus reads of a run: the names of docs/metrics.md, with Ray's prefix and ours."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from local_ray import local_ray

from async_grpo.cluster.cluster import Cluster
from async_grpo.telemetry import gauges as module
from async_grpo.telemetry.gauges import RayGauges, points
from async_grpo.telemetry.schema import METRIC_BY_NAME, METRICS

ROOT = Path(__file__).parents[2]
PAGE = str(ROOT / "docs" / "metrics.md")
ROW = {metric.name: 1.5 for metric in METRICS} | {
    "kl": None, "avg_reward/sums": 0.75, "fate_trained": 8, "lag_0_samples": 8,
    "discarded_environment_tool_infrastructure": 1, "peak_process_bytes/rank_1": 2**31,
}  # fmt: skip


def served(*names):
    return "".join(f'ray_async_grpo_{name}{{run="a"}} 1.0\n' for name in names)


def compared(text, *runs):
    """(exit code, lines) of the tool."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "compare_metrics.py"), PAGE, *map(str, runs)],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def write_run(folder):
    rows = [ROW | {"entropy": None}, ROW]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "training_metrics.jsonl").write_text(text)
    return folder


def test_each_metric_has_the_name_of_the_page_and_none_without_a_value_is_served(tmp_path):
    found = {name for name, _, _ in points(ROW, run="a")}
    assert {metric.name for metric in METRICS} - found == {"kl"}
    code, lines = compared(served(*found), write_run(tmp_path))
    assert (code, lines[-1][-7:]) == (0, "0 wrong")
    assert "without a value: kl" in lines


def test_the_tool_names_what_is_served_without_a_word_and_what_is_missing(tmp_path):
    names = {*METRIC_BY_NAME, "fate_trained", "my_metric"} - {"entropy", "kl"}
    text = "# HELP x\nray_node_cpu 1\n" + served(*names)
    code, lines = compared(text, write_run(tmp_path))
    assert code == 1
    assert lines[:3] == [
        "served, but not in the page: my_metric",
        "measured, but not served: entropy",
        "without a value: kl",
    ]
    assert "without a value: entropy" in compared(text)[1]


def test_ray_that_refuses_costs_the_gauges_and_is_told_once(monkeypatch, caplog):
    gauges = RayGauges("a")
    monkeypatch.setattr(gauges, "_gauge", lambda name: 1 / 0)
    for _ in range(3):
        gauges.see_step(ROW)
    assert caplog.messages == ["Prometheus gets no metrics of this run any more: division by zero"]


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def lines_of(name, port):
    """{labels: value} of one of our gauges."""
    start = f"ray_async_grpo_{name}{{"
    lines = [line for line in scraped(port).splitlines() if line.startswith(start)]
    return {labels: float(value) for labels, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.integration
@pytest.mark.slow
def test_ray_serves_what_is_repeated_under_the_names_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")  # of the agent, too
    monkeypatch.setattr(module, "REPEATED_S", 0.5)

    def until(holds):
        due_at = time.monotonic() + 40
        while not holds():
            assert time.monotonic() < due_at, scraped(port)[:2000]
            time.sleep(0.3)
            gauges.repeat()

    with local_ray(num_cpus=1) as ray:
        port = ray.nodes()[0]["MetricsExportPort"]
        assert Cluster().metrics_url().endswith(f":{port}/metrics")
        gauges = RayGauges("first")
        gauges.see_evaluation({"eval_accuracy": 0.25, "num_correct": 3})
        gauges.see_step(ROW)
        until(lambda: lines_of("avg_reward", port))
        found = lines_of("avg_reward", port)
        by_type = {'type="sums"' in labels: value for labels, value in found.items()}
        assert by_type == {False: 1.5, True: 0.75}
        assert all('run="first"' in labels for labels in found)
        code, lines = compared(scraped(port), write_run(tmp_path))
        assert code == 0, lines
        gauges.see_step({"step": 2, "avg_reward": 0.75})  # nothing of a type, nor a fate
        until(lambda: not lines_of("fate_trained", port))  # which the agent has forgotten
        still = time.monotonic() + 4  # twice as long as it remembers
        until(lambda: time.monotonic() >= still)
        assert list(lines_of("avg_reward", port).values()) == [0.75]
        assert list(lines_of("eval_accuracy", port).values()) == [0.25]
