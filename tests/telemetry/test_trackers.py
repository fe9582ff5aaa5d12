import dataclasses
import logging
import subprocess
import sys
import threading
from typing import ClassVar

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from full_disk import no_file_beyond
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError
from async_grpo.telemetry.trackers import TRACKERS, Trackers, check_trackers

ROW = {"step": 3, "avg_reward": 0.5, "kl": None}


def options(folder, names):
    return TrainConfig(
        model_name_or_path="m",
        data_path="x",
        output_dir=str(folder),
        trackers=",".join(names),
        run_name="run",
    )


def make(folder, names):
    return Trackers(options(folder, names))


class FakeTracker(GeneralTracker):
    """A tracker that a user registered; fails on request."""

    name = "fake"
    requires_logging_directory = False
    made: ClassVar[list] = []
    fail_at = ""

    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.calls = []
        FakeTracker.made.append(self)

    @property
    def tracker(self):
        return self

    def call(self, name, value=None, step=None):
        self.calls.append((name, value, step))
        if FakeTracker.fail_at == name:
            raise ConnectionError("server gone")

    def start(self):
        self.call("start")

    def store_init_configuration(self, values):
        self.call("config", values)

    def log(self, values, step=None, **kwargs):
        self.call("log", values, step)

    def finish(self):
        self.call("finish")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "fake", FakeTracker)
    monkeypatch.setattr(FakeTracker, "made", [])
    monkeypatch.setattr(FakeTracker, "fail_at", "")
    return FakeTracker


def test_tensorboard_files_lie_in_the_output_folder_and_hold_the_numbers(tmp_path):
    trackers = make(tmp_path, ["tensorboard"])
    trackers.log(ROW, step=3)
    trackers.finish()
    (event_file,) = (tmp_path / "tensorboard" / "run").glob("events.*")
    events = EventAccumulator(str(event_file)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("avg_reward")] == [(3, 0.5)]
    assert "kl" not in events.Tags()["scalars"]


def test_a_registered_tracker_gets_config_rows_and_the_end(tmp_path, fake):
    trackers = make(tmp_path, ["fake", "fake"])
    trackers.log(ROW, step=3)
    trackers.finish()
    (tracker,) = fake.made
    assert tracker.calls == [
        ("start", None, None),
        ("config", dataclasses.asdict(options(tmp_path, ["fake", "fake"])), None),
        ("log", {"step": 3, "avg_reward": 0.5}, 3),
        ("finish", None, None),
    ]


def test_a_tracker_that_fails_is_given_up_and_training_goes_on(tmp_path, fake, caplog):
    trackers = make(tmp_path, ["fake"])
    fake.fail_at = "log"
    with caplog.at_level(logging.WARNING):
        trackers.log(ROW, step=3)
        trackers.log(ROW, step=4)
    assert [name for name, _, _ in fake.made[0].calls].count("log") == 1
    assert "Tracker fake failed at step 3" in caplog.text


def test_a_tracker_that_cannot_start_is_one_sentence(tmp_path, fake):
    fake.fail_at = "start"
    with pytest.raises(ConfigError, match=r"--trackers fake could not start .*server gone"):
        make(tmp_path, ["fake"])


def test_an_unknown_tracker_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"among aim, .*wandb, got 'tensorbord'"):
        check_trackers(["tensorbord"])


def test_the_known_trackers_are_those_of_accelerate():
    assert sorted(TRACKERS) == sorted(tracking.LOGGER_TYPE_TO_CLASS)
    check_trackers([str(name) for name in tracking.get_available_trackers()])


def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy():
    for name, package in (("wandb", "wandb"), ("comet_ml", "comet-ml")):
        with pytest.raises(ConfigError, match=f"pip install {package}$"):
            check_trackers([name])


DISTRIBUTED = """
import sys, torch.distributed as dist
from async_grpo.config.train import TrainConfig
from async_grpo.telemetry.trackers import Trackers
dist.init_process_group("gloo")
group = dist.group.WORLD
if dist.get_rank() == 0:
    trackers = Trackers(
        TrainConfig(model_name_or_path="m", data_path="d", output_dir=sys.argv[1], run_name="run")
    )
    trackers.log({"avg_reward": 0.5}, step=1)
    trackers.finish()
assert dist.group.WORLD is group and len(dist.distributed_c10d._world.pg_map) == 1
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.integration
def test_under_torchrun_rank_0_tracks_and_no_group_is_made(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DISTRIBUTED)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(script), str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out" / "tensorboard" / "run").glob("events.*"))) == 1


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_full_disk_costs_tensorboard_one_sentence_and_no_traceback(
    when, tmp_path, monkeypatch, caplog
):
    tracebacks = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    if when == "at the start":
        with no_file_beyond(20):
            trackers = make(tmp_path, ["tensorboard"])
    else:
        trackers = make(tmp_path, ["tensorboard"])
        with no_file_beyond(300):
            for step in range(100):
                trackers.log(ROW, step=step)
            trackers.finish()
    trackers.log(ROW, step=100)
    trackers.finish()
    (told,) = caplog.messages
    assert "the run goes on without" in told
    assert "File too large" in told
    assert tracebacks == []


def test_other_threads_keep_their_tracebacks(tmp_path, monkeypatch):
    tracebacks = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    make(tmp_path, ["tensorboard"]).finish()
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join(20)
    assert [each.exc_type for each in tracebacks] == [ZeroDivisionError]
