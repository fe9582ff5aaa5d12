"""W&B and MLflow themselves, offline: the rows of a run that learnt are there when read back."""

import json
import struct
import time
from pathlib import Path

import pytest
from accelerate import PartialState

from async_grpo.config.train_config import TrainConfig
from async_grpo.telemetry.trackers import Trackers

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "healthy" / "quickstart_seed_0.jsonl").open()
][:12]
RESUMED_AT = 9  # the first step of the part that goes on, of which the part before had logged two
BLOCK, FULL, LAST = 1 << 15, 1, 4
READ = ("avg_reward", "grad_norm", "entropy")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    PartialState._reset_state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


def log(folder, name):
    """As a run that is resumed after step 8: both its parts; the folder is the run's."""
    config = TrainConfig(
        model_name_or_path="m",
        data_path="x",
        output_dir=str(folder),
        trackers=name,
        run_name="first",
        tracker_project="countdown",
    )
    for first_step, rows in ((1, ROWS[: RESUMED_AT + 1]), (RESUMED_AT, ROWS[RESUMED_AT - 1 :])):
        trackers = Trackers(config.recording, config.options(), first_step=first_step)
        for row in rows:
            trackers.log(row, step=row["step"])
        trackers.finish()
        assert trackers.num_failed == 0
        time.sleep(1)  # W&B names a part's folder by the second in which it begins


def expected(name):
    return [(row["step"], pytest.approx(row[name])) for row in ROWS]


def records_of(file):
    """Of W&B's file, which is LevelDB's log: blocks of pieces (checksum, length, kind)."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def test_wandb_keeps_the_rows_of_a_run_and_of_what_goes_on_with_it(tmp_path):
    wandb = pytest.importorskip("wandb", reason="make test-others")
    from wandb.proto.wandb_internal_pb2 import Record

    log(tmp_path / "run", "wandb")
    found, ids = {}, set()
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in records_of(file):
            record = Record()
            record.ParseFromString(data)
            ids |= {record.run.run_id} - {""}
            items = {item.nested_key[0] if item.nested_key else item.key: item.value_json
                     for item in record.history.item}  # fmt: skip
            if "avg_reward" in items:
                found[record.history.step.num] = {n: json.loads(items[n]) for n in READ}
    assert len(ids) == 1, "one run, in two parts"
    for name in READ:
        assert sorted((step, row[name]) for step, row in found.items()) == expected(name)
    assert wandb.run is None


def test_mlflow_keeps_the_rows_of_a_run_and_of_what_goes_on_with_it(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="make test-others")
    log(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("countdown")
    (run,) = client.search_runs([experiment.experiment_id])
    for name in READ:
        found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        assert sorted(found.items()) == expected(name)
    assert run.info.run_name == "first"
