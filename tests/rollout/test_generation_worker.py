"""Generation workers as Ray actors: weights through the object store, and deaths that are seen."""

import asyncio
import dataclasses
import os
import time

import numpy as np
import psutil
import pytest
import ray
import registry_actor
import torch
from local_ray import local_ray
from ray.exceptions import RayActorError, RayTaskError
from tiny_models import canary_of, load_model

from async_grpo.cluster import handles
from async_grpo.cluster.cluster import Cluster
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout.early_process import program
from async_grpo.rollout.generation_worker import GenerationWorker, worker_environment
from async_grpo.types import GenerationRequest, SamplingContract, WeightsVersion
from async_grpo.util.errors import DeadlineError, WeightSyncError, WorkerError
from async_grpo.weight_sync.publisher import Publisher
from async_grpo.weight_sync.sync_report import canary_differences

pytestmark = pytest.mark.integration

TIMEOUT_S = 240  # an engine starts in 20 s on an idle machine, in minutes on a busy one
PROMPT = np.array([3, 13, 4, 19], dtype=np.int32)
REQUEST = GenerationRequest(0, 0, PROMPT, 8, SamplingContract(1.0, (1,), 32))
FIRST, SECOND = WeightsVersion(0, 0), WeightsVersion(0, 1)


def get(reference):
    return ray.get(reference, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def cluster():
    with local_ray(num_cpus=8, object_store_mib=200):
        yield


def start_worker(model_folder, name):
    actor = ray.remote(GenerationWorker).options(
        num_cpus=1,
        max_concurrency=1000,
        runtime_env={"env_vars": worker_environment(), "py_executable": program()},
    )
    config = WorkerConfig(model_path=model_folder, max_num_seqs=16, overhead_seqs=2)
    return actor.remote(config, worker_id=name)


@pytest.fixture(scope="module")
def worker(cluster, model_folder):
    return start_worker(model_folder, "early")


@pytest.fixture(scope="module")
def late(cluster, model_folder):
    """Another engine, which takes as long to start as all fast tests of this file."""
    return start_worker(model_folder, "late")


@pytest.fixture(scope="module")
def registry(cluster):
    return registry_actor.registry_client()


def publish(model, registry, version):
    publisher = Publisher(Cluster(), bucket_bytes=40_000)
    snapshot = publisher.pack(model.named_parameters(), version=version)
    return snapshot, registry_actor.publish(registry, snapshot, timeout_s=TIMEOUT_S)


def assert_served_by(model, worker, version):
    for completion in get(worker.generate.remote(REQUEST)):
        ids = torch.from_numpy(np.concatenate([PROMPT, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()
        assert np.abs(expected - completion.logprobs).max() <= 5e-6
        assert [span.version for span in completion.weights_versions] == [version]


def engine_core_of(worker):
    (core,) = [
        process
        for process in psutil.Process(get(worker.info.remote()).pid).children(recursive=True)
        if "EngineCore" in process.name()
    ]
    return core


def test_a_worker_tells_what_it_can_do_and_generates_only_published_weights(worker, model_folder):
    info = get(worker.info.remote())
    assert (info.worker_id, info.role, info.capacity, info.overhead) == (
        "early",
        "generation",
        16,
        2,
    )
    assert (info.model_path, info.vocab_size, info.max_model_len) == (model_folder, 128, 512)
    assert get(worker.ping.remote()).serves == "none"
    with pytest.raises(WorkerError, match="a worker must not generate before"):
        get(worker.generate.remote(REQUEST))


def test_published_weights_reach_members(worker, registry, model_folder):
    model = load_model(model_folder, noise_seed=1)
    get(registry.controller.register.remote(get(worker.info.remote()), worker))
    first, report = publish(model, registry, FIRST)
    assert [ack.worker_id for ack in report.acks] == ["early"] and not report.failures
    assert 0 < report.acks[0].pause_seconds <= report.acks[0].seconds
    assert get(worker.ping.remote()).serves == str(first.version)
    assert_served_by(model, worker, FIRST)

    other = load_model(model_folder, noise_seed=2)
    publish(other, registry, SECOND)
    assert_served_by(other, worker, SECOND)


@pytest.mark.slow  # test_worker_faults.py has it of workers that are played
def test_published_weights_reach_whoever_joins_later(worker, late, registry, model_folder):
    get(registry.controller.register.remote(get(late.info.remote()), late))
    assert_served_by(load_model(model_folder, noise_seed=2), late, SECOND)
    third = WeightsVersion(0, 2)
    model = load_model(model_folder, noise_seed=4)
    _, report = publish(model, registry, third)
    assert sorted(ack.worker_id for ack in report.acks) == ["early", "late"]
    for each in (worker, late):
        assert_served_by(model, each, third)


def test_a_snapshot_that_is_not_newer_changes_nothing(worker, model_folder):
    serves = get(worker.ping.remote()).serves
    old = Publisher(Cluster()).pack(load_model(model_folder).named_parameters(), version=FIRST)
    ack = get(worker.load_weights.remote(old))
    assert (str(ack.version), ack.pause_seconds) == (serves, 0)


def with_canary(snapshot, model):
    return dataclasses.replace(snapshot, canary=canary_of(model, [PROMPT, PROMPT[:2]]))


def test_an_acknowledgement_has_the_canary_of_the_weights_just_loaded(worker, model_folder):
    model = load_model(model_folder, noise_seed=3)
    collected = Publisher(Cluster()).pack(model.named_parameters(), version=WeightsVersion(0, 3))
    snapshot = with_canary(collected, model)
    ack = get(worker.load_weights.remote(snapshot))
    assert (ack.worker_id, ack.version, ack.dtype) == ("early", snapshot.version, "float32")
    assert (ack.canary_problem, ack.recomputed_tokens) == ("", 0)
    assert ack.pause_seconds > 0
    assert canary_differences(snapshot.canary, ack.canary).max() <= 5e-6


def test_an_alias_is_renamed_by_who_has_the_weights_and_loaded_by_who_has_not(worker, model_folder):
    model = load_model(model_folder, noise_seed=3)
    held = Publisher(Cluster()).pack(model.named_parameters(), version=WeightsVersion(0, 3))
    alias = with_canary(held, model).renamed(WeightsVersion(0, 4))
    renamed = get(worker.load_weights.remote(alias))
    assert (renamed.version, renamed.pause_seconds, renamed.canary) == (alias.version, 0, ())
    assert get(worker.ping.remote()).serves == "0.4"
    assert_served_by(model, worker, alias.version)

    model = load_model(model_folder, noise_seed=1)
    missed = Publisher(Cluster()).pack(model.named_parameters(), version=WeightsVersion(0, 5))
    alias = with_canary(missed, model).renamed(WeightsVersion(0, 6))
    loaded = get(worker.load_weights.remote(alias))
    assert loaded.version == alias.version and loaded.pause_seconds > 0
    assert canary_differences(alias.canary, loaded.canary).max() <= 5e-6
    assert get(worker.ping.remote()).serves == "0.6"
    assert_served_by(model, worker, alias.version)


def test_a_lost_bucket_is_an_error_of_weight_sync_and_the_old_weights_serve(worker, model_folder):
    newer = Publisher(Cluster(), bucket_bytes=40_000).pack(
        load_model(model_folder).named_parameters(), version=WeightsVersion(0, 7)
    )

    @ray.remote(num_cpus=0)
    def small_array():  # too small for the shared store: it lives, and dies, with its owner
        return np.zeros(10, dtype=np.uint8)

    @ray.remote(num_cpus=0)
    class Sender:
        def put(self):
            return [small_array.remote()]

    sender = Sender.remote()
    (lost,) = get(sender.put.remote())
    ray.kill(sender)
    first, second, *others = newer.buckets
    buckets = (first, dataclasses.replace(second, data=lost), *others)
    with pytest.raises(WeightSyncError, match="sender has probably died"):
        get(worker.load_weights.remote(dataclasses.replace(newer, buckets=buckets)))
    assert get(worker.ping.remote()).serves == "0.6"
    assert_served_by(load_model(model_folder, noise_seed=1), worker, WeightsVersion(0, 6))


def test_text_is_decoded_without_special_tokens(worker):
    for completion in get(worker.generate.remote(REQUEST)):
        shown = [chr(45 + i) for i in completion.token_ids.tolist() if 3 <= i < 78]
        assert completion.text == "".join(shown)


def test_work_that_its_caller_gives_up_is_ended_in_the_engine(worker):
    """Through Ray: because its caller was cancelled, and because it took too long."""
    sampling = SamplingContract(1.0, (), 500)
    request = dataclasses.replace(REQUEST, num_samples=64, sampling=sampling, lease_id=9)

    async def give_up():
        answer = asyncio.ensure_future(
            handles.work(worker.generate.remote(request), timeout_s=None, who="the worker")
        )
        await asyncio.sleep(0)  # a task that is cancelled before it begins runs no `except`
        while 9 not in get(worker.ping.remote()).requests:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        answer.cancel()
        await asyncio.wait({answer})
        with pytest.raises(DeadlineError):
            await handles.work(worker.generate.remote(request), timeout_s=0.1, who="the worker")

    begun = get(worker.ping.remote()).num_tokens
    asyncio.run(give_up())
    deadline = time.monotonic() + TIMEOUT_S  # Ray may deliver a cancellation seconds later
    while (pulse := get(worker.ping.remote())).requests and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    assert get(worker.ping.remote()) == pulse
    assert pulse.requests == {}
    assert pulse.num_tokens - begun < 64 * 500, "given up, and sampled to its end nevertheless"


def test_a_dead_engine_ends_its_worker_within_seconds(worker):
    process = psutil.Process(get(worker.info.remote()).pid)
    running = worker.generate.remote(
        dataclasses.replace(REQUEST, sampling=SamplingContract(1.0, (), 500))
    )
    time.sleep(0.2)
    engine_core_of(worker).kill()
    with pytest.raises((RayActorError, RayTaskError)) as caught:
        ray.get(running, timeout=20)
    assert isinstance(caught.value, RayActorError)
    process.wait(timeout=20)


@pytest.mark.slow  # in `make test`, test_lifecycle.py ends an engine with its worker
def test_a_killed_worker_takes_its_engine_along(late):
    core = engine_core_of(late)
    ray.kill(late)
    core.wait(timeout=20)
    assert not os.path.exists(f"/proc/{core.pid}")
