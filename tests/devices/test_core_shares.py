"""How many threads the processes of a run have, how these wait, and who comes first."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.cli.train import recorded_threads
from async_grpo.config.train_config import TrainConfig
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
def test_equal_processes_have_all_cores_and_no_more_between_them(processes, num_cores):
    found = core_shares.thread_variables({}, processes=processes, cores=num_cores)
    threads = int(found.pop("OMP_NUM_THREADS"))
    assert found == WAITING
    assert 1 <= threads <= core_shares.MOST_THREADS
    assert threads == 1 or threads * processes <= num_cores
    assert threads == core_shares.MOST_THREADS or (threads + 1) * processes > num_cores


def test_what_was_given_counts_for_ranks_and_workers(monkeypatch):
    environ = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE", "LOCAL_WORLD_SIZE": "64"}
    core_shares.share_cores(environ, recorded=5)
    assert (environ["OMP_NUM_THREADS"], environ["OMP_WAIT_POLICY"]) == ("3", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert worker_environment(num_workers=64)["OMP_NUM_THREADS"] == "3"
    assert worker_environment(on_cpu=False)["OMP_NUM_THREADS"] == "1"
    monkeypatch.delenv("OMP_NUM_THREADS")
    found = worker_environment()
    threads = min(core_shares.num_cores(), core_shares.MOST_THREADS)
    assert (found["OMP_NUM_THREADS"], WAITING.items() <= found.items()) == (str(threads), True)


def test_a_run_that_goes_on_keeps_the_threads_that_it_began_with(tmp_path):
    config = TrainConfig(model_name_or_path="m", data_path="d", output_dir=str(tmp_path))
    (tmp_path / "training_params.json").write_text(json.dumps({"threads": 3}))
    assert recorded_threads(config) == 0  # there is no checkpoint
    checkpoint = tmp_path / "checkpoints" / "batch_7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").touch()
    assert recorded_threads(config) == 3
    assert recorded_threads(config.but(overwrite=True)) == 0
    (tmp_path / "training_params.json").write_text("{}")
    assert recorded_threads(config) == 0
    environ = {"LOCAL_WORLD_SIZE": "64"}
    core_shares.share_cores(environ, recorded=3)
    assert environ["OMP_NUM_THREADS"] == "3"


def test_torch_has_the_threads_and_the_process_gives_way_once():
    script = """if True:
        import os
        from async_grpo.devices import core_shares
        core_shares.num_cores = lambda: 7
        core_shares.share_cores(os.environ)
        core_shares.give_way()
        core_shares.give_way()
        import torch
        torch.ones(512, 512) @ torch.ones(512, 512)
        print(torch.get_num_threads(), os.nice(0))
    """
    left_out = ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", *WAITING)
    environ = {"LOCAL_WORLD_SIZE": "4"} | {k: v for k, v in os.environ.items() if k not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120
    )
    niceness = max(core_shares.RANK_NICENESS, os.nice(0))
    assert done.stdout.split() == ["1", str(niceness)], done.stderr
