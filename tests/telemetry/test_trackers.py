import logging
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
from accelerate import PartialState, tracking
from accelerate.tracking import GeneralTracker
from full_disk import no_file_beyond
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_grpo.config.train_config import TrainConfig
from async_grpo.telemetry.trackers import (
    MAX_BEHIND,
    RUNS_FILE,
    TRACKERS,
    Trackers,
    arguments,
    check_trackers,
    tracked_run,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError

ROW = {"step": 3, "avg_reward": 0.5, "kl": None}


def options(folder, names):
    return TrainConfig(
        model_name_or_path="m",
        data_path="x",
        output_dir=str(folder),
        trackers=",".join(names),
        run_name="run",
    )


def make(folder, names, **settings):
    return started(options(folder, names), **settings)


def started(config, **settings):
    return Trackers(config.recording, config.options(), **settings)


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class FakeTracker(GeneralTracker):
    """A tracker that a user registered; fails on request."""

    name = "fake"
    requires_logging_directory = main_process_only = False  # as W&B's and Trackio's
    made: ClassVar[list] = []
    fail_at = hang_at = ""
    let_go = threading.Event()

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
        if FakeTracker.hang_at == name:
            FakeTracker.let_go.wait(60)

    def start(self):
        tracking.logger.debug("which raises unless accelerate's state is made")
        self.call("start")

    def store_init_configuration(self, values):
        self.call("config", values)

    def log(self, values, step=None, **kwargs):
        self.call("log", values, step)

    def finish(self):
        self.call("finish")


@pytest.fixture
def fake(monkeypatch):
    PartialState._reset_state()
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "fake", FakeTracker)
    monkeypatch.setattr(FakeTracker, "made", [])
    monkeypatch.setattr(FakeTracker, "fail_at", "")
    monkeypatch.setattr(FakeTracker, "hang_at", "")
    monkeypatch.setattr(FakeTracker, "let_go", threading.Event())
    yield FakeTracker
    FakeTracker.let_go.set()


def scalars(folder, tag):
    """[(step, value)] of the one run that TensorBoard finds in a folder."""
    events = EventAccumulator(str(folder)).Reload()
    return [(each.step, each.value) for each in events.Scalars(tag)]


def test_tensorboard_files_lie_in_the_output_folder_and_hold_the_numbers(tmp_path):
    trackers = make(tmp_path, ["tensorboard"])
    trackers.log(ROW, step=3)
    trackers.finish()
    (event_file,) = (tmp_path / "tensorboard" / "run").glob("events.*")
    assert scalars(event_file, "avg_reward") == [(3, 0.5)]
    assert "kl" not in EventAccumulator(str(event_file)).Reload().Tags()["scalars"]


def test_a_run_that_goes_on_is_one_run_in_tensorboard_without_what_was_lost(tmp_path):
    first = make(tmp_path, ["tensorboard"])
    for step in (1, 2, 3):
        first.log({"avg_reward": 0.1 * step}, step=step)
    first.finish()
    config = options(tmp_path, ["tensorboard"]).but(run_name="renamed")
    second = started(config, first_step=3)  # from a checkpoint after step 2
    second.log({"avg_reward": 0.75}, step=3)
    second.finish()
    assert [folder.name for folder in (tmp_path / "tensorboard").iterdir()] == ["run"]
    found = scalars(tmp_path / "tensorboard" / "run", "avg_reward")
    assert found == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, 0.75)]


def test_a_run_is_called_as_its_output_folder(tmp_path):
    config = options(tmp_path / "ours", ["tensorboard"]).but(run_name="")
    started(config).finish()
    assert (tmp_path / "ours" / "tensorboard" / "ours").is_dir()


def test_trackers_are_told_which_run_goes_on(tmp_path):
    config = options(tmp_path, ["wandb"]).but(tracker_project="countdown")
    (tmp_path / RUNS_FILE).write_text('{"wandb": "3f", "mlflow": "a0", "trackio": "run"}')
    new, goes_on = (tracked_run(config.recording, first_step=step) for step in (1, 9))
    place = {"dir": str(tmp_path), "name": "run"}
    assert arguments("wandb", new) == ("countdown", place)
    assert arguments("wandb", goes_on) == ("countdown", place | {"id": "3f", "resume": "allow"})
    assert arguments("mlflow", new) == ("countdown", {"run_name": "run"})
    assert arguments("mlflow", goes_on) == ("countdown", {"run_name": "run", "run_id": "a0"})
    resumes = [arguments("trackio", run)[1]["resume"] for run in (new, goes_on)]
    assert resumes == ["never", "allow"]


def test_a_registered_tracker_gets_config_rows_and_the_end(tmp_path, fake):
    trackers = make(tmp_path, ["fake", "fake"])
    trackers.log(ROW, step=3)
    trackers.finish()
    (tracker,) = fake.made
    assert tracker.calls == [
        ("start", None, None),
        ("config", options(tmp_path, ["fake", "fake"]).options(), None),
        ("log", {"step": 3, "avg_reward": 0.5}, 3),
        ("finish", None, None),
    ]
    assert trackers.num_failed == 0


def test_a_tracker_that_fails_is_given_up_and_training_goes_on(tmp_path, fake, caplog):
    trackers = make(tmp_path, ["fake"])
    fake.fail_at = "log"
    with caplog.at_level(logging.WARNING):
        for step in range(3, 50):
            trackers.log(ROW, step=step)
        wait_until(lambda: trackers.num_failed == 1)
        trackers.finish()
    assert [name for name, _, _ in fake.made[0].calls].count("log") == 1
    (told,) = caplog.messages
    assert told.startswith("Tracker fake failed at step 3 and gets no more metrics (Connection")


def test_a_tracker_that_hangs_holds_up_no_step_and_no_end(tmp_path, fake, caplog, monkeypatch):
    monkeypatch.setattr(deadlines, "TRACKERS_ENDED_S", 0.2)
    fake.hang_at = "log"
    trackers = make(tmp_path, ["fake"])
    for step in range(1, MAX_BEHIND + 20):
        trackers.log(ROW, step=step)
    assert trackers.num_failed == 1
    trackers.finish()
    (told,) = caplog.messages
    assert told.startswith("Tracker fake is 1000 rows behind at step 100")


def test_a_tracker_that_does_not_close_is_left_behind(tmp_path, fake, caplog, monkeypatch):
    monkeypatch.setattr(deadlines, "TRACKERS_ENDED_S", 0.2)
    fake.hang_at = "finish"
    make(tmp_path, ["fake"]).finish()
    assert caplog.messages == ["Tracker fake still has 0 rows to take"]


def test_a_tracker_that_does_not_start_is_one_sentence(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(deadlines, "TRACKERS_START_S", 0.2)
    fake.hang_at = "start"
    with pytest.raises(ConfigError, match=r"--trackers fake did not start within 0.2 s"):
        make(tmp_path, ["fake"])


def test_a_run_that_goes_on_does_so_without_a_tracker_that_cannot_start(tmp_path, fake, caplog):
    fake.fail_at = "start"
    trackers = make(tmp_path, ["fake"], first_step=9)
    trackers.log(ROW, step=9)
    assert trackers.num_failed == 1
    assert "the run goes on without the tracker fake: --trackers fake could not" in caplog.text
    trackers.finish()


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
from async_grpo.config.train_config import TrainConfig
from async_grpo.telemetry.trackers import Trackers
dist.init_process_group("gloo")
group = dist.group.WORLD
if dist.get_rank() == 0:
    config = TrainConfig(
        model_name_or_path="m", data_path="d", output_dir=sys.argv[1], run_name="run"
    )
    trackers = Trackers(config.recording, config.options())
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
