import os
import time
from pathlib import Path

import numpy as np
import pytest

from async_grpo.errors import ConfigError
from async_grpo.types import Question, Turn, VerificationRequest
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.dispatchers import Dispatcher
from async_grpo.verification.failed_samples import adapter_sample
from async_grpo.verification.pool import VerifierPool

REPOSITORY = str(Path(__file__).parents[2])


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
def ray(tmp_path_factory):
    import ray

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=str(tmp_path_factory.mktemp("r")),
        namespace="verification",
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()
    patch.undo()


def start_pool(ray, *names, **options):
    config = VerifierConfig(reward_names=names, search_paths=(REPOSITORY,), timeout_s=5.0)
    actor = ray.remote(VerifierPool).options(num_cpus=0, max_concurrency=100)
    return actor.remote(config, **options)


@pytest.mark.integration
def test_a_pool_grades_in_the_order_of_the_requests_and_counts(ray):
    pool = start_pool(ray, "countdown")
    info = ray.get(pool.ready.remote(), timeout=60)
    assert 1 <= info.num_processes <= 2
    outputs = ["8-2+9", "8+2+9", "nothing", ""] * 10
    requests = tuple(request(output, ordinal=n) for n, output in enumerate(outputs))
    verdicts = ray.get(pool.verify.remote(requests), timeout=60)
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.1, 0.0, 0.0] * 10
    status = ray.get(pool.status.remote(), timeout=60)
    assert status.verifying == 0
    assert status.done == {"scored": 30, "unscorable": 10}
    assert (status.num_up, set(status.events.values())) == (info.num_processes, {0})


@pytest.mark.integration
def test_an_unknown_reward_is_told_within_seconds(ray):
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="choose from code_execution"):
        ray.get(start_pool(ray, "nope").ready.remote(), timeout=60)
    assert time.perf_counter() - started < 30


@pytest.mark.integration
def test_a_pool_lives_as_long_as_a_dispatcher_says_that_it_does_and_ends_its_processes(ray):
    pool = start_pool(ray, "countdown", silence_s=1.0)
    info = ray.get(pool.ready.remote(), timeout=60)
    config = VerifierConfig(reward_names=("countdown",), search_paths=(REPOSITORY,), timeout_s=5.0)
    for _ in range(6):  # longer than the silence in all
        time.sleep(0.5)
        ray.get(pool.join.remote(Dispatcher("box", 7), config), timeout=60)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{info.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(pool.status.remote(), timeout=60)


@pytest.mark.integration
def test_users_functions_do_not_see_the_folder_with_rays_sockets(ray, tmp_path):
    folder = ray._private.worker._global_node.get_temp_dir_path()
    path = tmp_path / "look.py"
    path.write_text(
        f"import os\ndef look(sample):\n    return float(len(os.listdir({folder!r})))\n"
    )
    pool = start_pool(ray, f"{path}:look")
    if not ray.get(pool.ready.remote(), timeout=60).is_confined:
        pytest.skip("this system allows no namespaces")
    (verdict,) = ray.get(pool.verify.remote((request("any"),)), timeout=60)
    assert os.listdir(folder)
    assert (verdict.status, verdict.reward) == ("scored", 0.0)
