import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from no_namespaces import REFUSAL, refusing_bwrap
from verifier_processes import REPOSITORY, all_below, are_gone

from async_grpo.config.roles import VERIFIER
from async_grpo.types import GradingRequest, Pulse, Question, Turn, VerificationRequest
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.pool import VerifierPool
from async_grpo.verification.tasks import adapter_sample


def request(output, *, ordinal=0, columns=None):
    columns = {"nums": [2, 9, 8], "target": 15, "output": "forged"} if columns is None else columns
    question = Question(np.arange(3, dtype=np.int32), "use 2 9 8\n", "15", columns)
    completion = Turn(np.array([7, 1], np.int32), np.zeros(2, np.float32), (), "stop", output)
    return VerificationRequest(ordinal, 0, question, completion)


def test_adapters_see_every_column_and_the_run_goes_before_columns_of_the_same_name():
    assert adapter_sample(request("8-2+9")) == {
        "nums": [2, 9, 8],
        "target": 15,
        "input": "use 2 9 8\n",
        "answer": "15",
        "output": "8-2+9",
        "sample_text": "use 2 9 8\n8-2+9",
        "output_token_ids": [7, 1],
        "finish_reason": "stop",
    }


@pytest.fixture(scope="module")
def ray():
    from local_ray import local_ray  # imports Ray

    with local_ray(num_cpus=2, namespace="verification") as ray:
        yield ray


def start_pool(ray, *names, **options):
    config = VerifierConfig(
        reward_names=names, search_paths=(REPOSITORY, os.getcwd()), timeout_s=5.0
    )
    actor = ray.remote(VerifierPool).options(num_cpus=0, max_concurrency=100)
    return actor.remote(config, worker_id="verifier-1", **options)


@pytest.mark.integration
def test_a_pool_grades_in_the_order_of_the_requests_with_its_share_of_processes(ray):
    pool = start_pool(ray, "countdown")
    info = ray.get(pool.info.remote(), timeout=60)
    num_cores = min(2, os.cpu_count())
    assert (info.role, info.capacity, info.rewards.num_cores) == (VERIFIER, num_cores, num_cores)
    outputs = ["8-2+9", "8+2+9", "nothing", ""] * 10
    requests = tuple(request(output, ordinal=n) for n, output in enumerate(outputs))
    for done, share in enumerate((1, 3, 2), start=1):  # the first before it was told any
        if done > 1:
            ray.get(pool.take_share.remote(share), timeout=60)
        verdicts = ray.get(pool.verify.remote(GradingRequest(requests, 7)), timeout=60)
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.1, 0.0, 0.0] * 10
        status = ray.get(pool.status.remote(), timeout=60)
        assert (status.verifying, status.num_processes) == (0, share)
        assert status.done == {"scored": 30 * done, "unscorable": 10 * done}
        assert set(status.events.values()) == {0}
    assert ray.get(pool.ping.remote(), timeout=60) == Pulse("none", 120, {})


@pytest.mark.integration
def test_an_unknown_reward_is_told_within_seconds(ray):
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="choose from code_execution"):
        ray.get(start_pool(ray, "nope").info.remote(), timeout=60)
    assert time.perf_counter() - started < 30


@pytest.mark.integration
def test_a_killed_pool_leaves_no_process(ray):
    pool = start_pool(ray, "countdown")
    info = ray.get(pool.info.remote(), timeout=60)
    ray.get(pool.take_share.remote(2), timeout=60)
    children = all_below(info.pid)
    assert len(children) >= 2
    os.kill(info.pid, signal.SIGKILL)
    assert are_gone(children)


@pytest.fixture
def unlucky(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def grade(sample):\n    raise ValueError('no luck')\n")
    return tmp_path


def graded(ray, pool):
    ray.get(pool.info.remote(), timeout=60)  # as its dispatcher does before it registers it
    (verdict,) = ray.get(pool.verify.remote(GradingRequest((request("any"),))), timeout=60)
    assert verdict.status == "error"
    return ray.get(pool.complaint.remote(), timeout=60)


@pytest.mark.integration
def test_samples_that_cannot_be_graded_are_kept(ray, unlucky):
    path = unlucky / "failed_samples.jsonl"
    assert graded(ray, start_pool(ray, "mine.py:grade", failed_samples=str(path))) == ""
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["output"], line["target"]) == ("any", 15)
    assert line["reason"] == "mine.py:grade: ValueError: no luck [mine.py:2]"


@pytest.mark.integration
def test_a_file_that_cannot_be_written_ends_nothing_and_is_complained_of_once(ray, unlucky):
    pool = start_pool(ray, "mine.py:grade", failed_samples="/dev/full")
    assert "not kept in /dev/full: [Errno 28] No space left" in graded(ray, pool)
    assert graded(ray, pool) == ""


@pytest.mark.integration
def test_a_pool_that_may_grade_unconfined_says_so_and_why(ray, unlucky):
    config = VerifierConfig(
        reward_names=("countdown", "mine.py:grade"),
        search_paths=(REPOSITORY, str(unlucky)),
        sources={"reward_registry": Path(REPOSITORY, "reward_registry.py").read_text()},
        unconfined_rewards=True,
    )
    path = f"{refusing_bwrap(unlucky)}:{os.environ['PATH']}"
    actor = ray.remote(VerifierPool).options(num_cpus=0, runtime_env={"env_vars": {"PATH": path}})
    pool = actor.remote(config, worker_id="verifier-1")
    info = ray.get(pool.info.remote(), timeout=60)
    status = ray.get(pool.status.remote(), timeout=60)
    assert info.confinement == {"shipped rewards": REFUSAL, "own rewards": REFUSAL}
    assert status.confinement == info.confinement


@pytest.mark.integration
def test_users_functions_do_not_see_the_folder_with_rays_sockets(ray, tmp_path):
    folder = ray._private.worker._global_node.get_temp_dir_path()
    path = tmp_path / "look.py"
    path.write_text(
        f"import os\ndef look(sample):\n    return float(len(os.listdir({folder!r})))\n"
    )
    pool = start_pool(ray, f"{path}:look")
    ray.get(pool.info.remote(), timeout=60)
    (verdict,) = ray.get(pool.verify.remote(GradingRequest((request("any"),))), timeout=60)
    assert os.listdir(folder)
    assert (verdict.status, verdict.reward) == ("scored", 0.0)
