"""The example of a service, as its file has it: checked, launched, and a worker of it killed."""

import hashlib
import json
import os
import signal

import psutil
import pytest
from commands import REPOSITORY, Command, wait_until
from loops import read_lines

# An engine, a trainer, an environment worker and two of the service: a minute on an idle machine.
pytestmark = [pytest.mark.integration, pytest.mark.slow]
FILE, FOLDER = "examples/calculator_service.toml", "runs/calculator"
BATCHES, EPISODES = 6, 32 * 8
READY_S = 400.0  # on a busy machine


def command(folder, *words):
    return Command("-m", "async_grpo.cli.main", *words, cwd=folder)


def services_of(run):
    """Process ids of the service's workers."""
    family = psutil.Process(run.pid).children(recursive=True)
    return [each.pid for each in family if "ray::ServiceWorker" in " ".join(each.cmdline())]


def test_the_example_trains_on_though_a_worker_of_its_service_is_killed(tmp_path):
    with command(tmp_path, "check", FILE) as check:
        assert check.wait(timeout_s=READY_S) == 0, check.out
        assert "service:calculator" in check.out
    with command(tmp_path, "launch", FILE, "--num-training-batches", BATCHES) as run:
        metrics = tmp_path / FOLDER / "training_metrics.jsonl"
        wait_until(lambda: metrics.exists() and read_lines(metrics), timeout_s=READY_S)
        killed, other = services_of(run)
        os.kill(killed, signal.SIGKILL)
        log = tmp_path / FOLDER / "logs/service.log"
        wait_until(lambda: "another is started in 1 s" in log.read_text(), timeout_s=60)
        assert other in services_of(run)
        assert run.wait(timeout_s=READY_S) == 0, run.out + run.err
    rows = read_lines(metrics)
    assert len(rows) == BATCHES
    assert sum(row["service_answers"] or 0 for row in rows) >= BATCHES * EPISODES
    failed = [name for row in rows for name in row if name.startswith("fate_failed") and row[name]]
    assert not failed  # what was asked of it was asked of the other
    file = REPOSITORY / "examples/calculator_service.py"
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    [part] = json.loads((tmp_path / FOLDER / "training_params.json").read_text())["parts"]
    assert part["code"]["environment"] == part["code"]["service calculator"] == sha256
    assert log.read_text().count("registered") == 3
