"""What the trainer announces, to whom and when; on two real FSDP2 ranks over gloo."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_cluster import FakeCluster, client_of
from oracle import make_config, oracle_twin, tiny_model
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.run.main_rank import OtherRank
from async_grpo.run.publication import Publication
from async_grpo.run.sampled_data import SampledData
from async_grpo.training.fsdp import shard
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.training.schedule import Clocks
from async_grpo.types import PublishReport, WeightsAck
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.buckets import unpack
from async_grpo.weight_sync.publisher import Publisher

pytestmark = pytest.mark.integration
PROMPTS = [np.arange(2, 12, dtype=np.int32), np.array([5], np.int32), np.array([9, 3], np.int32)]
INCARNATION = 7


class World:
    """The controller of a run as its client, and everything that it was told, in order."""

    def __init__(self, *, error_nats=0.0):
        self.told = []  # (who, batches in the weights)
        self.snapshots = []  # of generation
        self.error_nats = error_nats
        self.over_devices = []

    def publish(self, run, snapshot, roles, timeout_s):
        return {role: getattr(self, f"_{role}")(snapshot) for role in roles}

    def published(self, run, version):
        assert version.incarnation == INCARNATION
        self.told.append(("batcher", version.batches))

    def abort(self, run, reason):
        self.told.append(("aborted", reason))

    def main(self, config, *, on_synced):
        """Rank 0, with neither Ray nor a real controller behind it."""
        questions = [SimpleNamespace(input_token_ids=ids) for ids in PROMPTS]
        plan = SimpleNamespace(config=config, incarnation=INCARNATION, questions=questions)
        publisher = Publisher(FakeCluster())
        weights = Publication(plan, publisher, sender=self)
        weights.announcements.on_synced = on_synced
        return SimpleNamespace(weights=weights, client=client_of(self), report=Absent())

    def send(self, client, snapshot, tensors, *, timeout_s):
        """Over devices, whose tensors all ranks gather."""
        self.told.append(("device", snapshot.version.batches))
        assert not snapshot.buckets, "nothing is stored yet"
        assert len(snapshot.canary) == 2, "workers are told how the trainer scores it"
        self.over_devices.append({name: tensor.clone() for name, tensor in tensors})

    def _generation(self, snapshot):
        self.told.append(("generation", snapshot.version.batches))
        self.snapshots.append(snapshot)
        scores = tuple(row.logprobs + np.float32(self.error_nats) for row in snapshot.canary)
        acks = (
            WeightsAck("good", snapshot.version, 1.0, 0.25, recomputed_tokens=30, canary=scores),
            WeightsAck(
                "slow",
                snapshot.version,
                2.0,
                0.5,
                recomputed_tokens=12,
                kept_tokens=7,
                canary_problem="no answer in 60 s",
            ),
        )
        return PublishReport(snapshot.version, acks, {})

    def _reference(self, snapshot):
        self.told.append(("reference", snapshot.version.batches))
        return PublishReport(snapshot.version, (WeightsAck("r", snapshot.version, 0.0, 0.0),), {})


def publish_thrice(rank, *, tied, moves_reference=False, error_nats=0.0, transport="object_store"):
    """Publish, change the weights, publish, change nothing, publish."""
    config = make_config(
        max_staleness=1,
        weight_transport=transport,
        num_batches_per_ref_model_update=1,
        mixed_precision="no",
        kl_coefficient=0.1 if moves_reference else 0.0,
    )
    policy = PolicyModel(tiny_model(tied=tied))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(policy, mesh)
    step = SimpleNamespace(clocks=Clocks())
    learner = SimpleNamespace(config=config, device=torch.device("cpu"), policy=policy, step=step)
    world = World(error_nats=error_nats)
    reports, sent, forwards = [], [], []
    main = OtherRank() if rank else world.main(config, on_synced=reports.append)
    policy.register_forward_hook(lambda *_: forwards.append(1))
    ranks = Ranks(rank, dist.get_world_size(), learner.device, mesh)
    weights = SampledData(ranks, learner, main, FakeCluster(), None)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("async_grpo").addHandler(handler)
    for batches in range(3):
        if batches == 1:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.25)
            step.clocks = step.clocks.after(8)
        weights.publish(batches)
        main.weights.announcements.wait()
        sent.append({n: p.full_tensor().detach().clone() for n, p in hf_named_parameters(policy)})
    return {
        "over_devices": world.over_devices, "world": (world.told, world.snapshots), "sent": sent,
        "reports": reports, "forwards": forwards, "logged": records,
    }  # fmt: skip


def on_two_ranks(folder, **options):
    return run_ranks(publish_thrice, num_ranks=2, folder=folder, **options)


@pytest.mark.parametrize("tied", [True, False])
def test_the_canary_is_scored_with_exactly_the_weights_that_are_sent(tmp_path, tied):
    main, _ = on_two_ranks(tmp_path, tied=tied)
    _, snapshots = main["world"]
    for snapshot, weights in zip(snapshots, main["sent"], strict=True):
        received = dict(unpack(snapshot, [bucket.data for bucket in snapshot.buckets]))
        assert received.keys() == weights.keys()
        assert all(torch.equal(received[name], weights[name]) for name in weights)
        model = tiny_model(tied=tied)
        model.load_state_dict(weights, strict=False)
        twin = oracle_twin(model)
        assert [row.token_ids.tolist() for row in snapshot.canary] == [
            PROMPTS[0].tolist(),
            PROMPTS[2].tolist(),
        ]
        for row in snapshot.canary:
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            with torch.no_grad():
                logprobs = twin(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
            assert np.abs(expected - row.logprobs).max() <= 5e-6
            assert row.dtype == "float32"


def test_unchanged_weights_are_neither_scored_nor_gathered_again(tmp_path):
    main, other = on_two_ranks(tmp_path, tied=True)
    told, snapshots = main["world"]
    assert len(main["forwards"]) == len(other["forwards"]) == 2
    assert told == [(who, batches) for batches in range(3) for who in ("generation", "batcher")]
    first, second, alias = snapshots
    assert first.unchanged_since is None and second.unchanged_since is None
    assert alias.unchanged_since == second.version and alias.version.batches == 2
    assert alias.equals(second.version) and not alias.equals(first.version)
    assert [report.sync_bytes for report in main["reports"]] == [
        first.size_bytes,
        second.size_bytes,
        0,
    ]


def test_devices_get_what_all_ranks_gather_before_the_store_is_announced(tmp_path):
    main, other = on_two_ranks(tmp_path, tied=True, transport="nccl")
    told, _ = main["world"]
    changed = [(who, batches) for batches in (0, 1) for who in ("device", "generation", "batcher")]
    assert told == [*changed, ("generation", 2), ("batcher", 2)]
    for sent, weights in zip(main["over_devices"], main["sent"], strict=False):
        assert list(sent) == list(weights)
        assert all(torch.equal(sent[name], weights[name]) for name in weights)
    assert other["over_devices"] == []


def test_the_reference_gets_its_weights_late(tmp_path):
    main, _ = on_two_ranks(tmp_path, tied=True, moves_reference=True)
    told, _ = main["world"]
    assert [entry for entry in told if entry[0] == "reference"] == [
        ("reference", 0),
        ("reference", 1),
    ]
    # Staleness 1: version 1 is due with 2 batches, and the batcher hears of them after that.
    assert told.index(("generation", 1)) < told.index(("batcher", 1))
    assert told.index(("batcher", 1)) < told.index(("reference", 1)) < told.index(("batcher", 2))


def test_a_worker_that_serves_something_else_is_named(tmp_path):
    main, _ = on_two_ranks(tmp_path, tied=True, error_nats=0.01)
    complaints = [message for message in main["logged"] if message.startswith("worker ")]
    assert complaints[0] == "worker slow: no answer in 60 s"
    assert complaints[1].startswith(f"worker good: after weights {INCARNATION}.0, ")
    assert "differ from the trainer's by up to 0.01 nats" in complaints[1]
    assert len(complaints) == 6
    for report in main["reports"]:
        assert report.canary_max == pytest.approx(0.01, abs=1e-6)
        assert report.canary_mean == pytest.approx(0.01, abs=1e-6)


def test_a_report_has_the_longest_pause_and_the_work_of_all_workers(tmp_path):
    main, other = on_two_ranks(tmp_path, tied=True)
    assert other["reports"] == []
    assert [report.sync_batches for report in main["reports"]] == [0, 1, 2]
    for report in main["reports"]:
        assert (report.sync_pause_seconds, report.recomputed_tokens) == (0.5, 42)
        assert report.sync_seconds >= 0 and report.canary_max == 0.0
        assert report.kept_tokens == 7
    assert not any("differ from" in message for message in main["logged"])
    (told,) = (message for message in main["logged"] if "of mixed weights" in message)
    assert "now of 7 tokens" in told


def publish_infinite(rank):
    """What is said on a rank, and what has left, of weights that one rank's rows spoil."""
    config = make_config(weight_transport="nccl", mixed_precision="no")
    policy = PolicyModel(tiny_model(tied=True))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(policy, mesh)
    step = SimpleNamespace(clocks=Clocks())
    learner = SimpleNamespace(config=config, device=torch.device("cpu"), policy=policy, step=step)
    world = World(error_nats=0.0)
    main = OtherRank() if rank else world.main(config, on_synced=[].append)
    ranks = Ranks(rank, dist.get_world_size(), learner.device, mesh)
    with torch.no_grad():
        policy.model.model.norm.weight.to_local()[:] = float("inf") if rank else 1.0
    try:
        SampledData(ranks, learner, main, FakeCluster(), None).publish(0)
    except WeightSyncError as error:
        return str(error), world.told
    return "", world.told


def test_weights_that_are_infinite_on_one_rank_leave_over_no_device(tmp_path):
    for said, told in run_ranks(publish_infinite, num_ranks=2, folder=tmp_path):
        assert f"'model.norm.weight' of version {INCARNATION}.0 is not" in said
        assert told == []
