"""Whether the cluster that a run joins has what its file starts there."""

import pytest

from async_grpo.check.finding import Setup
from async_grpo.check.worker_tables import room_in
from async_grpo.cluster.head import ClusterResources
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig

WORKERS = (
    WorkerConfig(model_path="m", num_workers=3, tensor_parallel_size=2),
    WorkerConfig(model_path="m", mode="logprob", num_workers=2, gpus_per_worker=0.5),
    WorkerConfig(mode="verifier"),
)
TRAIN = TrainConfig(model_name_or_path="m", data_path="d")
# 5 CPUs; devices: 3 engines of 2, 2 halves, 2 ranks.
SETUP = Setup(train=TRAIN, workers=WORKERS, num_ranks=2)


@pytest.mark.parametrize(
    ("cluster", "level", "said"),
    [
        (ClusterResources(2, 8, 8, 16, 9), "ok", "the run takes 5 CPUs, 9 devices"),
        (ClusterResources(1, 5, 5, 0, 0), "ok", "1 machine, 5 of 5 CPUs and 0 of 0 devices free"),
        (ClusterResources(2, 8, 4, 16, 9), "warning", "of CPUs it has too few: end other runs"),
        (ClusterResources(1, 8, 8, 8, 8), "warning", "of devices it has too few: add machines"),
        (ClusterResources(1, 4, 4, 8, 8), "warning", "of CPUs and devices it has too few: add"),
    ],
)
def test_what_is_free_is_held_against_what_is_started(cluster, level, said):
    finding = room_in(cluster, SETUP, address="head:6379")
    assert (finding.level, finding.subject) == (level, "cluster")
    assert said in finding.text and "head:6379" in finding.text
