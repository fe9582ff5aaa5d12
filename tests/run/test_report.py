"""What a run's files keep over its parts, and what rank 0 says while it works."""

import dataclasses
import json
import logging
import sys
from pathlib import Path

import pytest

from async_grpo.checkpoint.reader import Manifest
from async_grpo.checkpoint.resume import Start
from async_grpo.config.train_config import TrainConfig
from async_grpo.run.data import warn_of_few
from async_grpo.run.report import Report
from async_grpo.telemetry.alarms import ALARMS_FILE
from async_grpo.telemetry.trackers import Trackers
from async_grpo.training.learner import HeldOutLoss
from async_grpo.training.schedule import Clocks
from async_grpo.training.step import NON_FINITE, StepResult
from async_grpo.types import (
    EndOfStep,
    EvaluationResult,
    PipelineStatus,
    QuestionOutcome,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.types.worker_info import confinement_in_words
from async_grpo.util.add_ons import add_on
from async_grpo.util.run_folder import EVALUATIONS_FILE, METRICS_FILE, PARAMETERS_FILE

RESULT = StepResult("", 1.0, 1e-3, 2, Clocks(1, 4), {"loss_sum": 6.0, "trained_tokens": 8.0})

STATUS = PipelineStatus(
    batch=0, generating=1, verifying=0, in_reference=0, ready=0, training=0, done=0,
    output_tokens=0, answers=0, reward_sum=0.0, reward_count=0,
)  # fmt: skip


def make_config(folder, **options):
    paths = {"model_name_or_path": "m", "data_path": "d", "output_dir": str(folder)}
    return TrainConfig(**paths | {"algorithm": "sft", "trackers": ""} | options)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test moves on itself."""
    now = [1000.0]
    monkeypatch.setattr("async_grpo.run.report.time.monotonic", lambda: now[0])
    return now


def train(report, clock, *, seconds, denominator=8):
    clock[0] += seconds
    end = EndOfStep(0, 0, True, num_samples=4, num_tokens=8)
    report.step(end, RESULT, denominator=denominator)


def resumed(config, report, *, batches, state=None):
    """The start after a checkpoint that `report`'s run of `config` left."""
    state = json.loads(json.dumps({"report": state or report.state(), "clocks": {}}))
    manifest = Manifest(
        batches=batches, world_size=1, config=config.options(), hashes={}, state=state
    )
    folder = f"{config.recording.output_dir}/checkpoints/batch_{batches}"
    return Start(Path(folder), manifest)


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_the_run_s_time_goes_on_over_its_parts_and_stands_in_both_files(tmp_path, clock):
    config = make_config(tmp_path)
    with Report(config) as report:
        train(report, clock, seconds=10)
        train(report, clock, seconds=20)
        start = resumed(config, report, batches=2)
        train(report, clock, seconds=99)  # lost: it is after the checkpoint
    clock[0] += 5000
    with Report(config, start=start) as report:
        train(report, clock, seconds=7)
        clock[0] += 3
        report.held_out_loss(HeldOutLoss(30.0, 20, 5, 1.0))
    assert [row["total_seconds"] for row in rows_of(tmp_path, METRICS_FILE)] == [10, 30, 37]
    (evaluation,) = rows_of(tmp_path, EVALUATIONS_FILE)
    assert evaluation["total_seconds"] == 40
    assert (evaluation["eval_loss"], evaluation["num_tokens"]) == (1.5, 20)
    assert (evaluation["step"], evaluation["total_tokens"]) == (3, 24)


def test_alarms_are_counted_over_the_parts_of_a_run_and_shown(tmp_path, clock):
    config, last_words = make_config(tmp_path), []
    skipped = dataclasses.replace(RESULT, skipped=NON_FINITE, grad_norm=float("nan"))
    with Report(config) as report:
        for each in (RESULT, skipped, RESULT):
            report.step(EndOfStep(0, 0, True, num_samples=4, num_tokens=8), each, denominator=8)
        start = resumed(config, report, batches=1)
        for workers in ({"generation": 2}, {}, {}):
            report.status(dataclasses.replace(STATUS, workers=workers))
            clock[0] += 61
        last_words += report.console._progress.alarms
    assert ["skipped" in last_words[0], "of 2 generation workers" in last_words[1]] == [True, True]
    assert [line["alarm"] for line in rows_of(tmp_path, ALARMS_FILE)] == [
        "not_finite", "fleet_shrank_generation",
    ]  # fmt: skip
    with Report(config, start=start) as report:
        report.step(EndOfStep(0, 0, True, num_samples=4, num_tokens=8), RESULT, denominator=8)
    rows = rows_of(tmp_path, METRICS_FILE)
    assert [(row["alarms"], row["alarms_raised"]) for row in rows] == [
        (0, 0),
        (1, 1),
        (1, 1),
        (1, 1),
    ]
    assert [line["alarm"] for line in rows_of(tmp_path, ALARMS_FILE)] == ["not_finite"]


def test_the_first_lines_and_the_parameters_say_of_each_pool_whether_it_confines(tmp_path, caplog):
    caplog.set_level("INFO", "async_grpo")
    first, second, engine = (
        WorkerInfo(name, role, "node", 7, "", 0, 1.0, 0.0, 0, confinement=how)
        for name, role, how in (
            ("v1", "verifier", {"shipped rewards": "", "own rewards": ""}),
            ("v2", "verifier", {"own rewards": "bwrap: no"}),
            ("g", "generation", {}),
        )
    )
    config = make_config(tmp_path)
    with Report(config) as report:
        report.workers([first, engine])
        report.workers([first, second])
        report.workers([second])
    told = json.loads((tmp_path / PARAMETERS_FILE).read_text())
    assert told.pop("confinement") == {
        "v1": "shipped rewards run confined; own rewards run confined",
        "v2": confinement_in_words(second.confinement),
    }
    assert told["output_dir"] == config.recording.output_dir
    said = [(r.levelname, r.message) for r in caplog.records if r.message.startswith("v")]
    assert [level for level, _ in said] == ["INFO", "WARNING"]
    assert "v2: own rewards run UNCONFINED" in said[1][1] and "bwrap: no" in said[1][1]


def test_why_groups_fail_is_told_once_and_kept_with_the_alarms(tmp_path, caplog):
    why = "environment mine.py:Mine of question 3 raised KeyError('x') at mine.py:27"
    failing = dataclasses.replace(STATUS, failures={"environment mine.py:27": why})
    with Report(make_config(tmp_path)) as report:
        report.status(failing)
        report.status(failing)
        assert why in report.console._progress.alarms
    told = [(record.levelname, record.message) for record in caplog.records]
    assert told.count(("WARNING", why)) == 1
    (line,) = rows_of(tmp_path, ALARMS_FILE)
    assert (line["alarm"], line["event"], line["sentence"]) == ("groups_fail", "raised", why)


def test_the_parameters_keep_what_earlier_parts_were_trained_with(tmp_path, clock):
    first = make_config(tmp_path, learning_rate=1e-3)
    with Report(first) as report:
        train(report, clock, seconds=1)
        start = resumed(first, report, batches=1)
    assert json.loads((tmp_path / PARAMETERS_FILE).read_text())["parts"] == []

    second = make_config(tmp_path, learning_rate=1e-4, clip_low=0.1)
    for _ in range(2):  # again, as after a crash that left no checkpoint of its own
        with Report(second, start=start) as report:
            train(report, clock, seconds=1)
            later = resumed(second, report, batches=40)
    with Report(second, start=later):
        pass
    third = make_config(tmp_path, learning_rate=1e-5, clip_low=0.1)
    with Report(third, start=later):
        pass
    saved = json.loads((tmp_path / PARAMETERS_FILE).read_text())
    assert saved["learning_rate"] == 1e-5
    assert saved["parts"] == [
        {
            "from_batch": 1,
            "changed": {
                "learning_rate": {"was": 1e-3, "is": 1e-4},
                "clip_low": {"was": 0.2, "is": 0.1},
            },
        },
        {"from_batch": 40, "changed": {"learning_rate": {"was": 1e-4, "is": 1e-5}}},
    ]


def test_utilisation_is_told_by_wall_clock_and_by_the_time_that_was_not_stood_still(
    tmp_path, clock, caplog
):
    meters = {
        "model_tflop": 6.0, "num_ranks": 2.0, "peak_tflops": 3.0, "gathering_seconds": 1.0,
        "all_gather_seconds": 0.75, "reduce_scatter_seconds": 0.25, "updating_seconds": 0.5,
        "agreeing_seconds": 0.5, "peak_process_bytes": 3.0 * 2**30,
        "peak_process_bytes/rank_0": 2.0 * 2**30, "peak_process_bytes/rank_1": 3.0 * 2**30,
    }  # fmt: skip
    end = EndOfStep(0, 0, True, num_samples=4, num_tokens=8)
    with caplog.at_level(logging.INFO), Report(make_config(tmp_path)) as report:
        clock[0] += 4
        report.stood_still("seconds_waiting", 1.5)
        report.stood_still("seconds_publishing", 0.5)
        report.step(end, dataclasses.replace(RESULT, meters=meters), denominator=8)
        train(report, clock, seconds=1)  # without a peak
    first, second = rows_of(tmp_path, METRICS_FILE)
    assert (first["mfu"], first["mfu_computing"]) == (6 / (3 * 4), 6 / (3 * 2))
    assert first["tflops_per_second"] == 6 / (4 * 2)
    assert (first["seconds_gathering"], first["seconds_agreeing"]) == (0.5, 0.25)
    assert (first["seconds_all_gather"], first["seconds_reduce_scatter"]) == (0.375, 0.125)
    assert (first["seconds_updating"], first["seconds_copying"]) == (0.25, None)  # of a CPU
    assert first["peak_allocated_bytes"] is None
    of_ranks = [first[f"peak_process_bytes/rank_{rank}"] for rank in range(2)]
    assert (first["peak_process_bytes"], of_ranks) == (3 << 30, [2 << 30, 3 << 30])
    assert second["mfu"] is second["mfu_computing"] is None
    assert any("MFU   0.5  memory     3 GiB" in message for message in caplog.messages)


def test_a_supervised_run_is_summed_up_over_its_parts(tmp_path, clock, caplog):
    config = make_config(tmp_path)
    with Report(config) as report:
        report.held_out_loss(HeldOutLoss(40.0, 20, 5, 1.0))
        train(report, clock, seconds=10, denominator=2)
        state = report.state()  # written by a thread, while training goes on
        train(report, clock, seconds=9, denominator=1)
        start = resumed(config, report, batches=1, state=state)
    assert state["ends"]["loss"] == [3.0, 3.0]
    with caplog.at_level(logging.INFO), Report(config, start=start) as report:
        train(report, clock, seconds=6, denominator=8)
        report.held_out_loss(HeldOutLoss(30.0, 20, 5, 1.0))
        report.conclude()
    assert caplog.messages[-1] == (
        "trained 2 steps in 16 seconds: 16 tokens, throughput 1 tok/s; "
        "held-out loss 2 first, 1.5 last; loss 3 first, 0.75 last"
    )


def test_the_trainer_s_minibatches_are_counted_against_those_of_the_step_before(tmp_path, clock):
    said = []
    with Report(make_config(tmp_path)) as report:
        report.console.doing = said.append
        for _ in range(2):
            report.minibatch()
        train(report, clock, seconds=1)
        for _ in range(3):
            report.minibatch()
    assert said == [
        "training step 1: minibatch 1",
        "training step 1: minibatch 2",
        "training step 2: minibatch 1 of about 2",
        "training step 2: minibatch 2 of about 2",
        "training step 2: minibatch 3 of about 3",
    ]


def test_a_run_whose_rewards_are_all_equal_is_told_of_it_once(tmp_path, caplog):
    sums = {"num_samples": 4, "num_groups": 1, "reward_sum": 4.0, "zero_advantage_samples": 4}
    sums["max_reward_in_group_sum"] = 1.0
    with Report(make_config(tmp_path, algorithm="grpo", num_training_batches=9)) as report:
        for batch in range(9):
            end = EndOfStep(batch, 0, True, num_samples=4, num_tokens=8, sums=sums)
            report.step(end, StepResult("", 0.0, 1e-6, 1, Clocks()), denominator=4)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "had the same reward (mean 1): little is learnt from rewards" in told[0]


def test_a_run_without_trackers_does_without_their_add_on(tmp_path, clock, monkeypatch):
    monkeypatch.setitem(sys.modules, "async_grpo.telemetry.trackers", None)  # not to be imported
    add_on.cache_clear()
    with Report(make_config(tmp_path, trackers="")) as report:
        train(report, clock, seconds=2)
    assert rows_of(tmp_path, METRICS_FILE)[0]["failed_trackers"] == 0


def test_charts_come_in_groups_and_evaluations_apart_from_training(tmp_path, clock):
    logged = []
    config = make_config(tmp_path)
    with Report(config) as report:
        trackers = Trackers(config.recording, {})
        trackers.log = lambda row, *, step: logged.append((step, row))
        report._trackers = (trackers,)
        train(report, clock, seconds=2)
        report.held_out_loss(HeldOutLoss(30.0, 20, 5, 1.0))
    (first, row), (second, evaluation) = logged
    assert (first, row["update/loss"], row["speed/seconds"]) == (1, 0.75, 2)
    assert second == 1
    assert evaluation == {
        "evaluation/eval_loss": 1.5, "evaluation/loss_sum": 30.0, "evaluation/num_tokens": 20,
        "evaluation/num_pairs": 5, "evaluation/seconds": 1.0,
    }  # fmt: skip


def result_of(batches, *outcomes, name="", newest=None, skipped=""):
    newest = batches if newest is None else newest
    asked = WeightsVersion(7, batches)
    versions = asked, asked, WeightsVersion(7, newest)
    return EvaluationResult(name, *versions, 4, outcomes, 1.0, skipped)


def test_an_evaluation_says_of_each_type_what_it_says_of_all(tmp_path, caplog):
    caplog.set_level("INFO", "async_grpo")
    outcomes = (
        QuestionOutcome("sums", 4, 2, 2.0),
        QuestionOutcome("sums", 4, 2, 2.0),
        QuestionOutcome("odes", 4, 0, 1.0),
        QuestionOutcome("odes", 4, failure="generation"),
    )
    files = "sums=s.jsonl,eval_path=h.jsonl;odes=o.jsonl"
    config = make_config(tmp_path, algorithm="grpo", data=files, data_path="")
    with Report(config) as report:
        report.published(0)
        report.evaluation(result_of(0, *outcomes, newest=1))
    (row,) = rows_of(tmp_path, EVALUATIONS_FILE)
    assert row["eval_accuracy"] == pytest.approx(1 / 3) and row["num_samples"] == 12
    assert (row["eval_accuracy/sums"], row["eval_accuracy/odes"]) == (0.5, 0.0)
    assert (row["eval_solved/sums"], row["eval_reward/odes"]) == (1.0, 0.25)
    assert row["eval_pass_at_4"] == pytest.approx(2 / 3) and row["eval_pass_at_1/sums"] == 0.5
    assert (row["eval_failed"], row["failures"]) == (0.25, {"generation": 4})
    assert (row["batch"], row["weights"], row["samples_per_question"]) == (0, "7.0..7.1", 4)
    assert row["eval_accuracy_low"] == 0.0 and row["eval_accuracy_high"] == 0.5
    assert "held-out accuracy 0.333 (sums 0.5, odes 0) after batch 0 (0 to 0.5)" in caplog.text
    assert "pass@1 0.333, pass@4 0.667, graded 12 of 16" in caplog.text


def held_out_config(folder, **options):
    return make_config(folder, algorithm="grpo", eval_data_path="h.jsonl", **options)


def test_a_line_tells_of_the_step_whose_weights_it_is_of_whenever_it_comes(tmp_path, clock):
    config = held_out_config(tmp_path, eval="math=m.jsonl", eval_every_batches=1)
    good, bad = QuestionOutcome("", 4, 4, 4.0), QuestionOutcome("", 4)
    with Report(config) as report:
        report.published(0)
        train(report, clock, seconds=10)
        report.published(1)
        clock[0] += 100
        end = EndOfStep(1, 0, True, 4, 8, evaluations=(result_of(1, good), result_of(0, bad)))
        report.step(end, RESULT, denominator=8)
        report.evaluation(result_of(0, good, bad, name="math"))
        report.evaluation(result_of(0, good))  # of a controller that took another's place
    rows = rows_of(tmp_path, EVALUATIONS_FILE)
    assert [(row["set"], row["batch"], row["step"], row["total_seconds"]) for row in rows] == [
        ("", 1, 1, 10), ("", 0, 0, 0), ("math", 0, 0, 0),
    ]  # fmt: skip
    assert rows[2]["eval_accuracy/math"] == 0.5 and "eval_accuracy" not in rows[2]


def test_an_evaluation_that_was_due_and_is_lost_has_a_line_that_says_why(tmp_path, clock):
    config = held_out_config(tmp_path, eval_every_batches=1)
    with Report(config) as report:
        report.published(0)
        train(report, clock, seconds=1)
        report.published(1)
        start = resumed(config, report, batches=1)
    with Report(config, start=start) as report:
        report.published(1)  # again, and it is evaluated again
        report.evaluation(result_of(1, QuestionOutcome("", 4, 4, 4.0)))
        report.published(2)
        report.published(3)
        report.recovered()
        report.evaluation(result_of(3, skipped="it was late"))
        report.published(4)
        report.unevaluated("the run was stopped before its end")
    rows = rows_of(tmp_path, EVALUATIONS_FILE)
    assert [(row["batch"], row.get("skipped", "")) for row in rows] == [
        (0, "the run was resumed after it"),
        (1, ""),
        (2, "the controller was lost"),
        (3, "it was late"),
        (4, "the run was stopped before its end"),
    ]


def test_the_best_checkpoint_and_those_that_may_become_it_are_spared(tmp_path):
    figure = {"eval": "math=m.jsonl,samples=4", "keep_best_checkpoint": "eval_pass_at_4/math"}
    config = held_out_config(tmp_path, eval_every_batches=1, **figure)
    solved, failed = QuestionOutcome("", 4, 1, 1.0), QuestionOutcome("", 4)
    with Report(config) as report:
        for batches in range(3):
            report.published(batches)
        assert report.spared_checkpoints() == {0, 1, 2}
        report.evaluation(result_of(1, solved, failed, name="math"))
        report.evaluation(result_of(0, failed, failed, name="math"))
        assert report.spared_checkpoints() == {1, 2}
        report.evaluation(result_of(2, solved))  # of another set
        start = resumed(config, report, batches=2)
    with Report(config, start=start) as report:
        report.published(2)
        report.evaluation(result_of(2, failed, solved, name="math"))  # as good, and later
        assert report.spared_checkpoints() == {1}
        report.published(3)
        report.evaluation(result_of(3, solved, solved, name="math"))
        assert report.spared_checkpoints() == {3}
    best = json.loads((tmp_path / "best_checkpoint.json").read_text())
    assert best == {"metric": "eval_pass_at_4/math", "value": 1.0, "batch": 3}


@pytest.mark.parametrize(("num_records", "times"), [(3, "10.7"), (31, "1.03"), (32, "")])
def test_data_of_less_than_a_batch_is_warned_of_once(tmp_path, caplog, num_records, times):
    warn_of_few(make_config(tmp_path), num_records)
    warned = [message for message in caplog.messages if "fewer than --batch-size 32" in message]
    assert len(warned) == bool(times)
    assert all(f"about {times} times in every batch" in message for message in warned)


def test_files_of_the_user_s_that_have_changed_are_told_and_written(tmp_path, clock, caplog):
    config = make_config(tmp_path)
    code = {"reward mine.py": "a" * 64, "helper.py of mine.py": "b" * 64}
    with Report(config, code=code) as report:
        train(report, clock, seconds=1)
        start = resumed(config, report, batches=1)
    with Report(config, start=start, code=code) as report:
        train(report, clock, seconds=1)
        start = resumed(config, report, batches=2)
    assert "code that differs" not in caplog.text
    edited = {**code, "helper.py of mine.py": "c" * 64}
    with Report(config, start=start, code=edited) as report:
        train(report, clock, seconds=1)
    told = f"checkpoint's: helper.py of mine.py {'b' * 12} -> {'c' * 12}"
    assert told in caplog.text
    assert json.loads((tmp_path / PARAMETERS_FILE).read_text())["parts"] == [
        {"from_batch": 0, "changed": {}, "code": code},
        {
            "from_batch": 2,
            "changed": {"helper.py of mine.py": {"was": "b" * 64, "is": "c" * 64}},
            "code": edited,
        },
    ]
    assert [row["parts"] for row in rows_of(tmp_path, METRICS_FILE)] == [1, 1, 2]


def test_a_checkpoint_that_knows_no_files_accuses_none(tmp_path, clock, caplog):
    config = make_config(tmp_path)
    with Report(config) as report:
        train(report, clock, seconds=1)
        start = resumed(config, report, batches=1)
    with Report(config, start=start, code={"reward mine.py": "a" * 64}):
        pass
    assert "code that differs" not in caplog.text
    [part] = json.loads((tmp_path / PARAMETERS_FILE).read_text())["parts"]
    assert part["from_batch"] == 1 and part["code"] == {"reward mine.py": "a" * 64}
