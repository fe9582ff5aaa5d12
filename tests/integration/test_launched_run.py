"""A run of `launch`, on a cluster of its own beside another: what its user may do meanwhile."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from commands import Command, wait_until
from loops import read_lines
from private_cluster import environment, sessions_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]
MODEL = "sample-data/tiny-countdown"
BATCHES = 1000
WORKER = ["worker", "--config"]  # the only one, of the one table
READY_S, ANSWERED_S = 400, 120  # of a machine that is full
FILE = """
[launch]
num_cpus = 4

[[worker]]
model_path = "{model}"
max_model_len = 128
max_num_seqs = 16
reward_fns = "countdown"

[train]
model_name_or_path = "{model}"
data_path = "{folder}/questions.jsonl"
output_dir = "{folder}/run"
num_training_batches = {batches}
batch_size = 4
samples_per_question = 4
max_generation_tokens = 16
max_tokens_per_gpu = 1024
trackers = ""
"""


def command(*arguments):
    return Command("-m", "async_grpo.cli.main", *arguments, env=environment())


def done(*arguments):
    """Exit code, and all that was said."""
    with command(*arguments) as started:
        code = started.wait(timeout_s=ANSWERED_S)
        return code, started.out + started.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    rows = [{"input": f"use {a} 2 1 to make {a + 1}\n", "nums": [a, 2, 1], "target": a + 1}
            for a in range(3, 60)]  # fmt: skip
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = FILE.format(model=MODEL, folder=folder, batches=BATCHES)
    (folder / "run.toml").write_text(text)
    return folder


def batches_of(folder):
    file = folder / "run" / "training_metrics.jsonl"
    return len(read_lines(file)) if file.exists() else 0


def wait_for_batches(folder, run, number):
    def are_there():
        assert run._child.poll() is None, run.out + run.err
        return batches_of(folder) >= number

    wait_until(are_there, timeout_s=READY_S)


def test_a_launched_run_is_changed_mended_and_ended_by_its_folder(folder, ray_cluster):
    run, file = folder / "run", folder / "run.toml"
    with command("launch", file) as launched:
        wait_for_batches(folder, launched, 1)
        code, said = done("control", run, "show")
        assert code == 0 and f"of {BATCHES} is being trained" in said, said
        _is_refused_and_touches_nothing(file, run)
        code, said = done("control", run, "set", "learning_rate=2e-5")
        assert code == 0, said
        wait_for_batches(folder, launched, batches_of(folder) + 3)
        assert read_lines(run / "training_metrics.jsonl")[-1]["learning_rate"] == 2e-5
        assert (run.stat().st_mode & 0o777, mode_of(run / "connection.json")) == (0o700, 0o600)
        os.kill(_dispatcher(launched), signal.SIGKILL)
        launched.wait_for("worker was killed by SIGKILL", timeout_s=60)
        wait_for_batches(folder, launched, batches_of(folder) + 6)
        code, said = done("control", run, "stop")
        assert code == 0, said
        assert launched.wait(timeout_s=ANSWERED_S) == 0, launched.out + launched.err
    assert f"stopped after batch {batches_of(folder)} of {BATCHES}: `async-grpo launch {run}" in (
        launched.out
    )
    assert "start one with" not in launched.out + launched.err
    started = time.monotonic()
    code, said = done("control", run, "show")
    assert code == 1 and "it has ended" in said, said
    assert time.monotonic() - started < 60
    _is_not_removed_by_a_line(file, run)


def mode_of(file):
    return file.stat().st_mode & 0o777


def contents(folder):
    return {file.name: file.read_bytes()[:1000] for file in folder.iterdir() if file.is_file()}


def _is_refused_and_touches_nothing(file, run):
    before = contents(run / "logs")
    code, said = done("launch", file)
    assert code == 1 and "is in use by another trainer (process" in said, said
    assert "starting" not in said
    after = contents(run / "logs")
    assert {name: after[name][: len(text)] for name, text in before.items()} == before


def _dispatcher(launched):
    """The process of the generation worker's dispatcher."""
    [found] = (pid for pid in sessions_of({launched.pid}) if _words(pid)[3:5] == WORKER)
    return found


def _words(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


def _is_not_removed_by_a_line(file, run):
    checkpoints = sorted((run / "checkpoints").iterdir())
    file.write_text(file.read_text() + "overwrite = true\n")
    code, said = done("launch", file)
    assert code == 1 and "--overwrite must be typed to remove a run with a checkpoint" in said
    assert checkpoints == sorted((run / "checkpoints").iterdir())
