"""Dispatchers come, go and are killed, with rewards edited meanwhile: a real pool on Ray."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from test_verifier_pool import request

from async_grpo import cluster
from async_grpo.cli import launch
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import ConfigError
from async_grpo.verification.pool import VerifierPool

pytestmark = pytest.mark.integration
MINE = "mine.py:grade"


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory):
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            address="local",
            namespace="dispatchers",
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            logging_level="ERROR",
            _temp_dir=str(tmp_path_factory.mktemp("r")),
        )
        yield ray
        ray.shutdown()


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch, local_ray):
    """The user's folder, where dispatchers are started; no pool is there before or after."""
    monkeypatch.chdir(tmp_path)
    write_reward(tmp_path, 0.25)
    yield tmp_path
    if (pool := cluster.find_actor(cluster.VERIFIER_POOL)) is not None:
        local_ray.kill(pool)


def write_reward(folder, value):
    text = f"def grade(sample):\n    return {value}\n\n\ndef other(sample):\n    return 0.75\n"
    (folder / "mine.py").write_text(text)


def come(reward=MINE, *, pid, **options):
    """A dispatcher started in this folder: (its way to the pool, the pool, once it may be used)."""
    config = WorkerConfig(model_path="m", reward_fns=reward, **options)
    pools = launch.VerifierPools(config)
    pools._me = replace(pools._me, host="box", pid=pid)
    return pools, pools.make()


def answer(call):
    return cluster.wait(call, timeout_s=60, who="the pool")


def graded(pool):
    (verdict,) = answer(pool.verify.remote((request("any"),)))
    return verdict


@contextmanager
def alive(pool, *first):
    """Meanwhile dispatchers say that they live, as real ones do; more may be added."""
    stop, dispatchers = threading.Event(), [*first]

    def say():
        while not stop.wait(0.2):
            for pools in dispatchers:
                pools.join(pool)

    thread = threading.Thread(target=say)
    thread.start()
    try:
        yield dispatchers
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("reward", "expected"), [(MINE, 0.5), ("mine.py:other", 0.75)])
def test_once_its_dispatcher_has_left_an_edited_or_another_reward_grades(own, reward, expected):
    pools, pool = come(pid=1)
    assert graded(pool).reward == 0.25
    write_reward(own, 0.5)
    assert graded(pool).reward == 0.25
    answer(pools.leave(pool))
    _, second = come(reward, pid=2)
    assert graded(second).reward == expected


def test_a_dispatcher_that_was_killed_keeps_nobody_from_an_edited_reward(own):
    pools = launch.VerifierPools(WorkerConfig(model_path="m", reward_fns=MINE))
    shared = launch._shared_actor(VerifierPool, cluster.VERIFIER_POOL)
    shared.remote(pools._wanted, silence_s=1.0)
    _, pool = come(pid=1)  # and is never heard of again
    assert graded(pool).reward == 0.25
    write_reward(own, 0.5)
    _, second = come(pid=2)
    assert graded(second).reward == 0.5


def test_rewards_in_use_are_kept_and_the_refusal_names_who_uses_them(own):
    pools, pool = come(pid=1)
    with alive(pool, pools):
        second, same = come(pid=2)
        assert same == pool
        answer(second.leave(pool))
        told = (
            "got --reward-fns mathd of reward_registry while --reward-fns mine.py:grade of "
            "reward_registry is used by dispatcher process 1 on box: stop these first"
        )
        with pytest.raises(ConfigError, match=told):
            come("mathd", pid=3)
        write_reward(own, 0.5)
        with pytest.raises(
            ConfigError, match=r"mine.py was edited since dispatcher process 1 on b"
        ):
            come(pid=4)
        assert graded(pool).reward == 0.25


def test_a_run_keeps_its_rewards_while_dispatchers_are_started_again(own, local_ray):
    class Batcher:  # of a trainer, which this process plays
        async def here(self):
            return True

    batcher = local_ray.remote(Batcher).options(name=cluster.BATCHER, num_cpus=0).remote()
    answer(batcher.here.remote())
    pools, pool = come(pid=1)
    answer(pools.leave(pool))
    write_reward(own, 0.5)
    with pytest.raises(ConfigError, match=r"edited since trainer process \d+ on .* began to use"):
        come(pid=2)
    write_reward(own, 0.25)
    assert come(pid=3)[1] == pool
    local_ray.kill(batcher)


def test_samples_that_cannot_be_graded_are_kept_for_each_who_asks(own, monkeypatch):
    (own / "mine.py").write_text("def grade(sample):\n    raise ValueError('no luck')\n")
    pools, pool = come(pid=1)
    with alive(pool, pools) as dispatchers:
        dispatchers.append(come(pid=2, write_failed_generation_samples=True)[0])
        monkeypatch.setattr(launch, "FAILED_SAMPLES", "/dev/full")
        full, _ = come(pid=3, write_failed_generation_samples=True)
        assert graded(pool).status == "error"
        (line,) = map(json.loads, (own / "failed_samples.jsonl").read_text().splitlines())
        assert (line["output"], line["target"]) == ("any", 15)
        assert line["reason"] == f"{MINE}: ValueError: no luck [mine.py:2]"
        assert "not kept in /dev/full: [Errno 28] No space left" in answer(full.join(pool))
        assert graded(pool).status == "error"
        assert answer(full.join(pool)) == ""
