"""A limit on generation drops long outputs: the run says so once, and every line the share."""

import json
import logging

from oracle import make_config

from async_grpo.run.report import Report
from async_grpo.training.schedule import Clocks
from async_grpo.training.step import StepResult
from async_grpo.types import EndOfStep
from async_grpo.util.run_folder import METRICS_FILE


def test_the_first_outputs_that_take_too_long_are_warned_of(tmp_path, caplog):
    config = make_config(
        output_dir=str(tmp_path), trackers="", num_training_batches=3, generation_timeout_s=60.0
    )
    fates = {"trained": 6, "failed": 2}
    with caplog.at_level(logging.WARNING), Report(config) as report:
        for batch, num_dropped in enumerate((0, 2, 2)):
            reasons = {"failed: generation timeout": num_dropped} if num_dropped else {}
            end = EndOfStep(
                batch, 0, True, num_samples=6, num_tokens=6, fates=fates, reasons=reasons
            )
            report.step(end, StepResult("", 1.0, 1e-6, 1, Clocks()), denominator=6)
    assert [record.getMessage() for record in caplog.records] == [
        "25.0 % of the samples of gradient step 2 took longer than --generation-timeout-s 60 and "
        "were dropped: training favours short outputs; without a limit none is dropped"
    ]
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [each["perc_timed_out_samples"] for each in rows] == [None, 0.25, 0.25]
