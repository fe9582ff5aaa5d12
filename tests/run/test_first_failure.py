import json

import pytest
from fake_cluster import FakeActor, FakeCluster

from async_grpo.cluster.handles import CONTROLLER
from async_grpo.run.watch import RunRecord, first_failure_recorded
from async_grpo.types import WorkerInfo
from async_grpo.util.errors import DeadlineError, RankLostError, WorkerError

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer "
    "[127.0.0.1]:2341"
)


class Main:
    is_main = True


class Other:
    is_main = False


@pytest.fixture
def one_worker_lost(tmp_path):
    """A cluster whose controller tells of it only when it is asked for the last time."""
    lost = WorkerInfo("generation-a", "generation", "here", 7, "model", 100, 1.0, 0.0, 64)
    (tmp_path / "worker-aa-01000000-7.err").write_text("MemoryError: no room\n")
    members, fenced = [[lost], []], [{}, {"generation-a": "worker a died"}]
    controller = FakeActor(
        roles=("generation", "generation"),
        members=lambda role: members.pop(0),
        fenced=lambda role: fenced.pop(0),
    )
    return FakeCluster(logs=tmp_path, named={CONTROLLER: controller})


def die(folder, error, ranks=Main, *, cluster=None):
    """(what was raised, the record)"""
    record = RunRecord(folder, rank=0 if ranks.is_main else 1)
    record.cluster = cluster
    record.trained(3)
    with pytest.raises(BaseException) as raised, first_failure_recorded(record, ranks):
        raise error
    path = folder / "first_failure.json"
    return raised.value, json.loads(path.read_text()) if path.exists() else None


def test_a_stall_is_told_with_the_death_that_caused_it(one_worker_lost, tmp_path):
    raised, record = die(tmp_path, DeadlineError("nothing has moved"), cluster=one_worker_lost)
    assert (type(raised), str(raised)) == (DeadlineError, "worker a died; then nothing has moved")
    assert record["sentence"] == str(raised)
    assert record["first_error"]["worker"] == "generation-a"
    assert record["first_error"]["pid"] == 7
    assert record["first_error"]["log_tail"] == ["MemoryError: no room"]
    assert record["last_progress"]["batches_completed"] == 3
    assert (record["role"], record["rank"], record["exception"]) == ("trainer", 0, "DeadlineError")
    assert list(tmp_path.glob(".*")) == []


def test_an_error_that_is_a_cause_stays_as_it_is(one_worker_lost, tmp_path):
    error = WorkerError("question 7 is malformed")
    raised, record = die(tmp_path, error, cluster=one_worker_lost)
    assert raised is error
    assert (record["sentence"], record["first_error"]) == ("question 7 is malformed", None)


def test_a_bug_keeps_its_type_and_leaves_its_traceback(tmp_path):
    error = KeyError("x")
    raised, record = die(tmp_path, error, Other)
    assert raised is error
    assert record["sentence"] == "KeyError: 'x'"
    assert any("test_first_failure.py" in line for line in record["traceback"])


def test_a_collective_that_breaks_means_that_a_rank_has_died(tmp_path):
    raised, record = die(tmp_path, RuntimeError(GLOO), Other)
    assert isinstance(raised, RankLostError)
    assert (record["exception"], record["rank"]) == ("RankLostError", 1)


def test_the_first_of_several_ranks_is_on_record_until_a_later_start(tmp_path):
    die(tmp_path, WorkerError("first"), Other)
    assert die(tmp_path, RuntimeError(GLOO))[1]["sentence"] == "first"
    RunRecord(tmp_path, rank=0).forget()
    assert die(tmp_path, WorkerError("later"))[1]["sentence"] == "later"


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(1)])
def test_being_asked_to_end_is_no_failure(end, tmp_path):
    assert die(tmp_path, end) == (end, None)


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    record, error = RunRecord(tmp_path / "file" / "run", rank=0), WorkerError("x")
    with pytest.raises(WorkerError) as raised, first_failure_recorded(record, Main):
        raise error
    assert raised.value is error
    assert "cannot be kept: cannot write" in caplog.text
