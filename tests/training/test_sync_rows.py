"""Every line of metrics tells of the latest sync that has finished."""

import dataclasses
import json

from oracle import make_config

from async_grpo.run.report import Report
from async_grpo.telemetry.schema import SECTIONS, StepFacts
from async_grpo.training.schedule import Clocks
from async_grpo.training.step import StepResult
from async_grpo.types import EndOfStep
from async_grpo.util.run_folder import METRICS_FILE
from async_grpo.weight_sync.sync_report import SyncReport

FIRST = SyncReport(0, 1.5, 0.25, 4096, 0, 128, 1e-6, 5e-7)
SECOND = SyncReport(1, 2.5, 0.5, 4096, 640, 0, None, None)
NAMES = [field.name for field in dataclasses.fields(SyncReport)]


def rows_of(folder, *, synced):
    """One step for each entry of `synced`, whose report arrives before it; None: none does."""
    config = make_config(output_dir=str(folder), trackers="", num_training_batches=len(synced))
    with Report(config) as report:
        for batch, sync in enumerate(synced):
            if sync is not None:
                report.synced(sync)
            result = StepResult("", 1.0, 1e-6, 1, Clocks())
            end = EndOfStep(batch, 0, True, num_samples=1, num_tokens=1)
            report.step(end, result, denominator=1)
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_a_line_has_the_facts_of_the_latest_finished_sync(tmp_path):
    rows = rows_of(tmp_path, synced=[None, FIRST, None, SECOND, None])
    told = [tuple(row[name] for name in NAMES) for row in rows]
    nothing = (None,) * len(NAMES)
    first, second = dataclasses.astuple(FIRST), dataclasses.astuple(SECOND)
    assert told == [nothing, first, first, second, second]


def test_every_fact_of_a_sync_is_a_metric_with_a_meaning():
    declared = {metric.name: metric for metric in SECTIONS[StepFacts]}
    for name in NAMES:
        assert declared[name].numerator == name and declared[name].meaning


def test_every_fact_of_the_schema_is_measured(tmp_path):
    (row,) = rows_of(tmp_path, synced=[FIRST])
    missing = [metric.name for metric in SECTIONS[StepFacts] if row[metric.name] is None]
    # A learner counts the first, and there is none here; a dense model has no second, and one
    # without an adapter no third.
    assert missing == ["unrecorded_minibatches", "canary_routing_mismatch", "merge_loss"]
