import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.telemetry.progress import Progress, TerminalFormatter, step_line
from async_grpo.types import PipelineStatus, Problem

STATUS = PipelineStatus(
    batch=0,
    generating=5,
    verifying=4,
    in_reference=3,
    ready=2,
    training=1,
    done=10,
    output_tokens=0,
    answers=7,
    reward_sum=1.5,
    reward_count=6,
    workers={"generation": 2},
)


def status(**changes):
    return dataclasses.replace(STATUS, **changes)


def test_the_token_rate_is_of_the_last_seconds_only():
    progress = Progress(num_batches=10, start_s=0.0)
    for second in range(100):
        slow = min(second, 50)
        progress.see_status(status(output_tokens=slow), now_s=float(second))
    assert progress.tokens_per_second == 0.0
    progress.see_status(status(output_tokens=250), now_s=100.0)
    assert progress.tokens_per_second == pytest.approx(10.0)


def test_the_token_rate_spans_the_batch_before_in_which_generators_also_stood_still():
    progress = Progress(num_batches=10, start_s=0.0)
    for second in range(301):  # a batch takes 100 s, and is generated in the first 10 of them
        batch, within = divmod(second, 100)
        tokens = 500 * batch + 50 * min(within, 10)
        progress.see_status(status(batch=batch, output_tokens=tokens), now_s=float(second))
        if second in (199, 250, 299):
            assert progress.tokens_per_second == pytest.approx(5.0, rel=0.6)
    assert progress.tokens_per_second == pytest.approx(5.0, rel=0.01)


def test_the_time_left_follows_the_pace_of_batches():
    progress = Progress(num_batches=10, start_s=0.0)
    progress.see_status(status(batch=0), now_s=0.0)
    assert progress.remaining_s(0.0) is None
    progress.see_status(status(batch=1), now_s=30.0)
    progress.see_status(status(batch=2), now_s=40.0)
    assert progress.remaining_s(40.0) == pytest.approx(8 * 20.0)
    assert progress.remaining_s(45.0) == pytest.approx(8 * 20.0 - 5.0)
    assert progress.remaining_s(1e6) == 0.0


def test_a_batcher_that_starts_again_gives_no_negative_rate():
    progress = Progress(num_batches=10, start_s=0.0)
    progress.see_status(status(batch=3, output_tokens=500), now_s=0.0)
    progress.see_status(status(batch=2, output_tokens=0), now_s=1.0)
    assert progress.tokens_per_second == 0.0
    assert progress.remaining_s(1.0) is None


def test_the_status_line_shows_every_stage_and_what_is_waited_for():
    progress = Progress(num_batches=10, start_s=0.0)
    progress.see_status(status(batch=1, problem=Problem("generation", "no worker")), now_s=1.0)
    progress.activity = "training step 4: minibatch 3"
    assert progress.status_line(2.0) == (
        "batch 2/10 · generating 5 · verifying 4 · in reference 3 · ready 2 · training 1 · "
        "reward so far 0.25 · generated – tok/s · trainer: training step 4: minibatch 3 · "
        "2 generation workers · left – · generation: no worker"
    )


def test_without_a_pipeline_the_rows_tell_the_batch():
    progress = Progress(num_batches=10, start_s=0.0)
    progress.see_row({"iteration": 0}, now_s=0.0)
    progress.see_row({"iteration": 4}, now_s=8.0)
    assert progress.batch_text == "5/10"
    assert progress.remaining_s(8.0) == pytest.approx(12.0)


def test_a_step_tells_its_failed_share_when_there_is_one():
    row = {"step": 1, "avg_reward": 0.5, "perc_failed_samples": 0.25}
    assert step_line(row, num_batches=9) == "reward   0.5  failed 25 %"
    assert step_line(row | {"perc_failed_samples": 0.0}, num_batches=9) == "reward   0.5"


NUMBERS = st.none() | st.floats(-1e9, 1e9) | st.integers(0, 10**12)
FULL = {
    "avg_reward": 0.5, "iteration": 4, "seconds": 1.25, "tokens_per_second": 1234.5, "kl": 1e-5,
    "avg_output_tokens": 512.0, "grad_norm": 0.25, "loss": 1.5, "entropy": 0.5, "max_lag": 1,
    "avg_max_reward_in_group": 1.0, "mfu": 0.3, "peak_process_bytes": 2**30,
}  # fmt: skip


@given(st.fixed_dictionaries(dict.fromkeys(FULL, NUMBERS) | {"iteration": st.integers(0, 99)}))
def test_a_step_is_one_line_of_columns_that_fit(row):
    line = step_line(row, num_batches=100, left="1h02m")
    assert len(line) <= 100 and "\n" not in line


def test_columns_stand_where_they_stood_and_the_reward_is_first():
    other = FULL | {"avg_reward": 0.125, "iteration": 99, "kl": 0.5, "tokens_per_second": 9.0}
    lines = [step_line(row, num_batches=100, left="9s") for row in (FULL, other)]
    assert lines[0].startswith("reward   0.5  batch   5/100  left    9s   1.25 s  1.23k tok/s")
    starts = [[line.index(label) for label in ("batch", "left", "grad", "KL")] for line in lines]
    assert starts[0] == starts[1]


def test_without_rewards_the_loss_is_first():
    assert step_line({"loss": 1.5, "iteration": 0}, num_batches=9).startswith(
        "loss      1.5  batch"
    )


def test_a_terminal_shows_rewards_warnings_and_held_out_lines_in_colour():
    assert step_line(FULL, num_batches=9, coloured=True).startswith("\x1b[32m\x1b[1mreward   0.5")
    form = TerminalFormatter("%(message)s").format
    made = [logging.makeLogRecord({"levelno": level, "msg": words}) for level, words in (
        (logging.INFO, "a line"), (logging.WARNING, "take care"), (logging.INFO, "== held-out 1"),
    )]  # fmt: skip
    plain, warning, held_out = map(form, made)
    assert (plain, warning) == ("a line", "\x1b[33mtake care\x1b[0m")
    assert held_out == "\x1b[36m\x1b[1m== held-out 1\x1b[0m"
