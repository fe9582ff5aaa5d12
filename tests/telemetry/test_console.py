import io
import logging
import os
import pty
import re
import subprocess
import sys

import pytest
import rich.console

from async_grpo.telemetry.progress import Console, Progress, panel
from async_grpo.types import PipelineStatus, Problem

STATUS = PipelineStatus(
    batch=1,
    generating=64,
    verifying=0,
    in_reference=0,
    ready=16,
    training=32,
    done=0,
    output_tokens=0,
    answers=7,
    reward_sum=1.0,
    reward_count=4,
    problem=Problem("reference", "waiting for a worker"),
)


def test_without_a_terminal_there_is_one_line_an_interval_and_one_a_step(caplog):
    now = 0.0
    with (
        caplog.at_level(logging.INFO),
        Console(num_batches=9, interval_s=10.0, stream=io.StringIO(), clock=lambda: now) as console,
    ):
        for _ in range(50):  # half a second each
            now += 0.5
            console.status(STATUS)
        console.step({"step": 2, "iteration": 1, "avg_reward": 0.25})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith("batch 2/9 · generating 64")
    assert lines[2] == "reward  0.25  batch 2/9  left     –"


def test_the_panel_names_its_rewards_what_the_trainer_does_and_alarms():
    progress = Progress(num_batches=9, start_s=0.0)
    progress.see_status(STATUS, now_s=1.0)
    progress.see_row({"avg_reward": 0.75}, now_s=1.0)
    progress.activity = "evaluating 64 held-out questions"
    progress.alarms = ["every output was cut"]
    screen = rich.console.Console(file=io.StringIO(), width=160)
    screen.print(panel(progress, now_s=65.0))
    text = screen.file.getvalue()
    assert "reward of this batch so far 0.25 · of the last trained step 0.75" in text
    assert "trainer: evaluating 64 held-out questions" in text
    assert "alarm: every output was cut" in text


def test_the_bottleneck_is_shown_and_logged_when_it_moves(caplog):
    row = {
        "seconds": 10.0, "seconds_waiting": 6.2, "generator_idle_fraction": 0.0,
        "avg_generating_samples": 48.0, "num_samples": 64,
    }  # fmt: skip
    console = Console(num_batches=9, stream=io.StringIO())
    with caplog.at_level(logging.INFO):
        for step in range(20):
            console.step(row | {"step": step})
    told = [record.getMessage() for record in caplog.records if "bottleneck" in record.msg]
    assert len(told) == 1
    screen = rich.console.Console(file=io.StringIO(), width=200)
    screen.print(panel(console._progress, now_s=65.0))
    assert told[0] in screen.file.getvalue()
    assert told[0].startswith("trainers waited 62% of the time for samples, 48 of which were in")


def test_the_panel_shows_stages_in_proportion():
    progress = Progress(num_batches=9, start_s=0.0)
    progress.see_status(STATUS, now_s=1.0)
    screen = rich.console.Console(file=io.StringIO(), width=100)
    screen.print(panel(progress, now_s=65.0))
    text = screen.file.getvalue()
    assert "batch 2/9 · 1m05s elapsed" in text
    assert "reference: waiting for a worker" in text
    bars = [line.count("━") for line in text.splitlines() if re.search(r"\d ", line)]
    assert bars[1:6] == [32, 0, 0, 8, 16]


LIVE = """
import logging, sys, time
from async_grpo.telemetry.progress import Console
logging.basicConfig(level="INFO", format="LOG %(message)s")
streams = sys.stdout, sys.stderr
try:
    with Console(num_batches=3) as console:
        assert console.is_live
        time.sleep(0.5)
        console.step({"step": 1, "avg_reward": 0.5})
        raise ValueError("boom")
finally:
    assert (sys.stdout, sys.stderr) == streams
    assert logging.getLogger().handlers[0].stream is sys.stderr
    logging.info("after")
"""


@pytest.mark.integration
def test_in_a_terminal_an_error_leaves_log_traceback_and_cursor_intact():
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, "-c", LIVE], stdin=child, stdout=child, stderr=child, env=environment
    ) as process:
        os.close(child)
        output = b""
        try:
            while data := os.read(parent, 4096):
                output += data
        except OSError:  # the end of a terminal
            pass
    os.close(parent)
    text = output.decode()
    assert process.returncode == 1
    assert "waiting for the pipeline" in text
    assert "╯\r\n" in re.sub(
        r"\x1b\[[0-9;]*m", "", text
    )  # the cursor waits below the border, where the terminal echoes ^C
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    assert "LOG reward   0.5  left     –" in map(str.rstrip, plain.splitlines())
    assert "\x1b[?25l" not in text  # the cursor was never hidden
    after = text[text.rindex("Traceback") :]
    assert "ValueError: boom" in after
    assert "\x1b[" not in after
