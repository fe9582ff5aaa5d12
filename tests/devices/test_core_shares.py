"""How many threads the processes of a run have, and how these wait."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.devices import core_shares
from async_grpo.rollout.generation_worker import worker_environment

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


@pytest.mark.parametrize(
    ("text", "most"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1), ("?", 64)]
)
def test_a_containers_quota_bounds_its_cores(tmp_path, text, most):
    (tmp_path / "cpu.max").write_text(text)
    assert core_shares.num_cores(tmp_path / "cpu.max", cores=64) == most
    assert core_shares.num_cores(tmp_path / "absent", cores=64) == 64
    assert core_shares.num_cores(tmp_path / "absent") == len(os.sched_getaffinity(0))


@given(processes=st.integers(1, 300), num_cores=st.integers(1, 300))
def test_processes_leave_no_core_without_a_thread_and_have_no_more(processes, num_cores):
    found = core_shares.thread_variables({}, processes=processes, cores=num_cores)
    threads = int(found.pop("OMP_NUM_THREADS"))
    assert found == WAITING
    assert 1 <= threads <= core_shares.MOST_THREADS
    assert threads == 1 or threads * processes <= num_cores
    assert threads == core_shares.MOST_THREADS or (threads + 1) * processes > num_cores


def test_what_was_given_counts(monkeypatch):
    environ = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    found = core_shares.thread_variables(environ, processes=64, cores=2, recorded=5)
    assert (found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"]) == ("3", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert worker_environment()["OMP_NUM_THREADS"] == "3"
    assert worker_environment(on_cpu=False)["OMP_NUM_THREADS"] == "1"
    assert WAITING.items() <= worker_environment().items()


def test_a_run_that_goes_on_keeps_the_threads_that_it_began_with(tmp_path):
    (tmp_path / "training_params.json").write_text(json.dumps({"threads": 3}))
    assert core_shares.recorded_threads(tmp_path) == 0  # there is no checkpoint
    checkpoint = tmp_path / "checkpoints" / "batch_7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").touch()
    assert core_shares.recorded_threads(tmp_path) == 3
    found = core_shares.thread_variables({}, processes=64, cores=2, recorded=3)
    assert found["OMP_NUM_THREADS"] == "3"
    for text in ("{}", "not JSON"):
        (tmp_path / "training_params.json").write_text(text)
        assert core_shares.recorded_threads(tmp_path) == 0


@pytest.mark.parametrize(
    ("alone", "ranks", "threads"), [(True, 1, 7), (False, 1, 3), (False, 4, 1)]
)
def test_a_rank_that_was_started_by_hand_leaves_half_of_the_cores_to_workers(alone, ranks, threads):
    script = f"""if True:
        from async_grpo.cli import train
        train.num_cores = lambda: 7
        train._share_cores(alone={alone})
        import os, torch
        print(os.environ["OMP_NUM_THREADS"], torch.get_num_threads())
    """
    # Not those of other tests' libraries: MKL_NUM_THREADS would come first.
    kept = {name: os.environ.get(name, "") for name in ("HOME", "PATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=kept | {"LOCAL_WORLD_SIZE": str(ranks)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0))  # torch takes no more
    assert done.stdout.split() == [str(threads), str(min(threads, cores))], done.stderr
