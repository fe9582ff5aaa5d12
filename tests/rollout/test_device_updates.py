"""Weights that the trainer drives into live engines: vLLM's stock engines, both ends, on CPU.

Run here is everything but NCCL itself, for which `devices_on_cpu` stands:
rendezvous, the four calls, loading into a paused model, the canary, acknowledgement, failures.
"""

import dataclasses
import inspect
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from local_ray import local_ray
from ray.exceptions import RayActorError
from registry_actor import publish, registry_client
from tiny_models import load_model

from async_grpo.cluster.cluster import Cluster
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout.generation_worker import GenerationWorker, worker_environment
from async_grpo.types import CanaryRow, GenerationRequest, SamplingContract, WeightsVersion
from async_grpo.util.errors import ConfigError, WeightSyncError
from async_grpo.weight_sync.publisher import Publisher
from async_grpo.weight_sync.routes import check_route
from async_grpo.weight_sync.transport import DeviceSender, Sender

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TIMEOUT_S = 60
TRAINER = "GPU-of-trainer"
TOLERANCE = 5e-6
PROMPT = np.arange(40, dtype=np.int32) % 75 + 3
HERE = str(Path(__file__).parent)


def get(reference):
    return Cluster().wait(reference, timeout_s=300, who="the actor")  # three engines start


def worker_class():
    class Worker(GenerationWorker):  # local: Ray then sends its code
        def __init__(self, *arguments, **options):
            from async_grpo.rollout import engine_args

            engine_args.EXTENSION = "devices_on_cpu_extension.WeightsExtension"
            super().__init__(*arguments, **options)

        async def info(self):
            from dataclasses import replace

            return replace(await super().info(), devices=("GPU-of-" + self._worker_id,))

    return Worker


class Counted:
    """What passes through, counted."""

    def __init__(self, call):
        self.call, self.num = call, 0

    def __call__(self, *arguments, **options):
        self.num += 1
        return self.call(*arguments, **options)


class Stack:
    """Trainer rank 0's side of the sync, a registry, and the workers that were started."""

    def __init__(self, folder, patch):
        import devices_on_cpu

        devices_on_cpu.install(patch.setattr)
        self.broadcasts = Counted(devices_on_cpu.StoreCommunicator.broadcast)
        patch.setattr(
            devices_on_cpu.StoreCommunicator,
            "broadcast",
            lambda *arguments, **options: self.broadcasts(*arguments, **options),
        )
        from async_grpo.weight_sync.nccl import NcclLink

        self.folder, self.make_link = folder, NcclLink
        self.client = registry_client(ping_interval_s=0.5)
        self.publisher = Publisher(Cluster(), bucket_bytes=40_000)
        self.sender = DeviceSender(self.connect, check=self.check)
        self.models, self.snapshots = {}, {}

    def check(self, worker, *, others):
        check_route("nccl", worker, sender=TRAINER, others=others)

    def connect(self, members):
        link = self.make_link(members, sender=Sender(torch.device("cpu"), "127.0.0.1", Cluster()))
        assert link._info.packed
        # A tiny model has several of such buffers, as a large one of those of a GiB.
        link._info = replace(link._info, packed_buffer_size_bytes=30_000)
        return link

    def start(self, name):
        environment = worker_environment() | {"PYTHONPATH": HERE}
        actor = ray.remote(worker_class()).options(
            num_cpus=1, max_concurrency=1000, runtime_env={"env_vars": environment}
        )
        worker = actor.remote(WorkerConfig(model_path=self.folder), worker_id=name)
        get(self.client.controller.register.remote(get(worker.info.remote()), worker))
        return worker

    def collect(self, batches):
        version = WeightsVersion(0, batches)
        model = self.models[version] = load_model(self.folder, noise_seed=batches + 1)
        return self.publisher.pack(model.named_parameters(), version=version)

    def announce(self, snapshot):
        parameters = self.models[snapshot.version].named_parameters()
        tensors = ((name, parameter.detach()) for name, parameter in parameters)
        self.sender.send(self.client, snapshot, tensors, timeout_s=TIMEOUT_S / 2)
        self.kept = snapshot  # for who joins later
        return publish(self.client, snapshot, timeout_s=TIMEOUT_S / 2)

    def generate(self, worker, *, num_samples=4, max_tokens=16):
        contract = SamplingContract(1.0, (), max_tokens)
        return worker.generate.remote(GenerationRequest(0, 0, PROMPT, num_samples, contract))

    def expected(self, completion, version):
        """[L] log-probabilities by transformers."""
        ids = torch.from_numpy(np.concatenate([PROMPT, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits = self.models[version](ids[None]).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()

    def assert_serves(self, worker, version):
        for completion in get(self.generate(worker)):
            assert [span.version for span in completion.weights_versions] == [version]
            error = np.abs(self.expected(completion, version) - completion.logprobs).max()
            assert error <= TOLERANCE


@pytest.fixture(scope="module")
def stack(model_folder):
    with (
        pytest.MonkeyPatch.context() as patch,
        local_ray(num_cpus=8, object_store_mib=200),
    ):
        yield Stack(model_folder, patch)


def test_vllms_trainer_engine_takes_what_we_give_it():
    from vllm.distributed.weight_transfer import nccl_engine

    fields = {
        field.name: field.default for field in dataclasses.fields(nccl_engine.NCCLTrainerInitInfo)
    }
    assert fields["packed"] is True
    assert {"master_address", "master_port", "world_size", "rank"} <= fields.keys()
    parameters = inspect.signature(
        nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init
    ).parameters
    assert list(parameters) == ["init_info", "client", "source"]
    assert "rank_offset" in inspect.signature(nccl_engine.NCCLWeightTransferInitInfo).parameters


@pytest.fixture(scope="module")
def worker(stack):
    return stack.start("one")


def with_canary(snapshot, model):
    ids = torch.from_numpy(PROMPT.astype(np.int64))
    with torch.no_grad():
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    row = CanaryRow(PROMPT, scores.numpy(), "float32")
    return replace(snapshot, canary=(row,))


def test_weights_come_over_the_route_and_are_acknowledged_as_such(stack, worker):
    for batches in range(2):  # the second goes over the route that the first has opened
        version = WeightsVersion(0, batches)
        snapshot = stack.collect(batches)
        snapshot = with_canary(snapshot, stack.models[version])
        num_before = stack.broadcasts.num
        (ack,) = stack.announce(snapshot).acks
        assert 1 < stack.broadcasts.num - num_before < len(snapshot.tensors), "many in a buffer"
        assert (ack.worker_id, ack.version, ack.transport) == ("one", version, "nccl")
        assert 0 < ack.pause_seconds <= ack.seconds
        (scores,) = ack.canary
        assert np.abs(scores - snapshot.canary[0].logprobs).max() <= TOLERANCE
        stack.assert_serves(worker, version)


def test_requests_in_flight_go_on_with_the_new_weights(stack, worker):
    before, after = WeightsVersion(0, 1), WeightsVersion(0, 2)
    snapshot = stack.collect(2)
    running = []
    for _ in range(5):  # begun one after another, so that some are midway whatever the load
        running.append(stack.generate(worker, max_tokens=450, num_samples=8))
        time.sleep(0.2)
    stack.announce(snapshot)
    completions = [completion for group in running for completion in get(group)]
    crossing = [found for found in completions if len(found.weights_versions) == 2]
    assert len(completions) == 40 and len(crossing) >= 8
    for completion in crossing:
        (first, _, cut), (second, _, stop) = completion.weights_versions
        assert (first, second, stop) == (before, after, 450) and 0 < cut < 450
        for version, part in ((before, slice(0, cut)), (after, slice(cut, 450))):
            error = np.abs(stack.expected(completion, version) - completion.logprobs)[part]
            assert error.max() <= TOLERANCE


def test_another_models_weights_are_refused_before_anything_stands_still(stack, worker):
    before = WeightsVersion(0, 2)
    model = load_model(stack.folder, noise_seed=9)
    renamed = ((f"other.{name}", tensor) for name, tensor in model.named_parameters())
    other = stack.publisher.pack(renamed, version=WeightsVersion(0, 3))
    with pytest.raises(WeightSyncError, match=r"'other.model.embed_tokens.weight'"):
        get(worker.expect_weights.remote(other))
    missing = stack.collect(3)
    fewer = replace(missing, buckets=missing.buckets[1:])
    with pytest.raises(WeightSyncError, match="are missing"):
        get(worker.expect_weights.remote(fewer))
    stack.assert_serves(worker, before)


def test_weights_that_are_not_newer_are_refused_to_whoever_sends_them(stack, worker):
    with pytest.raises(WeightSyncError, match="must be newer"):
        get(worker.expect_weights.remote(stack.collect(1)))
    stack.assert_serves(worker, WeightsVersion(0, 2))


def test_a_late_joiner_serves_the_version_and_is_of_the_group_from_the_next_on(stack, worker):
    late = stack.start("late")
    stack.assert_serves(late, WeightsVersion(0, 2))
    report = stack.announce(stack.collect(4))
    assert {ack.worker_id: ack.transport for ack in report.acks} == {"one": "nccl", "late": "nccl"}
    for each in (worker, late):
        stack.assert_serves(each, WeightsVersion(0, 4))


def test_a_worker_on_the_trainer_s_device_is_sent_nothing_over_it(stack, worker):
    shared = replace(get(worker.info.remote()), devices=(TRAINER,))
    with pytest.raises(ConfigError, match="share GPU-of-trainer: use object_store"):
        stack.sender._check(shared)


def test_a_trainer_that_vanishes_midway_costs_the_engine_and_no_other(stack, worker):
    snapshot = stack.collect(5)
    names, dtypes, shapes, _ = zip(*snapshot.tensors, strict=True)
    worker.receive_weights.remote(
        snapshot, {"names": names, "dtype_names": dtypes, "shapes": shapes}, 2.0
    )
    with pytest.raises(RayActorError):
        for _ in range(100):
            ray.get(worker.ping.remote(), timeout=30)
            time.sleep(0.2)
    snapshot = stack.collect(6)
    report = stack.announce(snapshot)
    assert [(ack.worker_id, ack.transport) for ack in report.acks] == [("late", "nccl")]
