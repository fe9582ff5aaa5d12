"""What a dispatcher's workers take of a node with devices, and which variables they get."""

import pytest
from fake_cluster import FakeCluster

from async_grpo.cluster.head import LATE_REGISTRATION
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.inventory import Device, Inventory
from async_grpo.launch import actors
from async_grpo.rollout.early_process import program
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError


@pytest.fixture
def node(monkeypatch):
    """A node with so many devices, of which Ray counts some."""

    def make(num_devices, counted):
        devices = tuple(Device(i, f"GPU-{i}", "A", 1) for i in range(num_devices))
        monkeypatch.setattr(actors, "usable_devices", lambda: Inventory(devices, "580.1"))
        cluster = FakeCluster()
        cluster.resources = {"CPU": 8.0, "GPU": counted}
        return cluster

    return make


def kinds(cluster, **options):
    return actors.worker_kinds(cluster, WorkerConfig(**{"model_path": "m"} | options))


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, 1.0), ({"tensor_parallel_size": 4}, 4.0), ({"gpus_per_worker": 0.3}, 0.3),
        ({"mode": "judge", "name": "strict", "tensor_parallel_size": 2}, 2.0),
    ],
)  # fmt: skip
def test_a_worker_takes_its_devices_or_its_share(options, taken, node):
    if options.get("mode") == "judge":
        options = {**options, "reward_fns": "x"}
    [kind, *_] = kinds(node(8, counted=8.0), **{"reward_fns": ""} | options)
    assert kind.resources == {"CPU": 1.0, "GPU": taken}


def test_a_service_takes_what_its_class_says_and_libraries_find_their_variables(
    node, monkeypatch, tmp_path
):
    cluster = node(8, counted=8.0)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    file = tmp_path / "index.py"
    text = "class Index:\n    capacity = 4\n    devices = {}\n    async def answer(self, r): ...\n"
    for devices, variables in ((2, {"NCCL_DEBUG": "INFO"}), (0, {})):
        file.write_text(text.format(devices))
        [kind] = kinds(cluster, mode=f"{file}:Index", num_workers=3)
        assert (kind.role, kind.num_workers) == ("service:index", 3)
        assert kind.resources == {"CPU": 1.0, "GPU": float(devices)}
        kind.start("w")
        assert cluster.options["num_gpus"] == devices
        given = (cluster.options["runtime_env"] or {}).get("env_vars", {})
        assert given.items() >= variables.items()


def test_without_usable_devices_a_worker_takes_none_whatever_ray_counts(node):
    cluster = node(0, counted=8.0)
    [kind, *_] = kinds(cluster)
    assert kind.resources["GPU"] == 0.0
    kind.start("w")
    assert "py_executable" not in cluster.options["runtime_env"]
    assert kind.placed_s == deadlines.PLACED_S


def test_a_worker_imports_before_it_joins_where_ray_waits_for_it(node, monkeypatch):
    for name, value in LATE_REGISTRATION.items():
        monkeypatch.setenv(name, value)
    cluster = node(0, counted=0.0)
    engine, *others = kinds(cluster)
    engine.start("w")
    assert cluster.options["runtime_env"]["py_executable"] == program()
    assert engine.placed_s > deadlines.PLACED_S
    assert all(each.placed_s == deadlines.PLACED_S for each in others)
    cluster = node(8, counted=8.0)
    engine, *_ = kinds(cluster)
    engine.start("w")
    assert "py_executable" not in cluster.options["runtime_env"]


def test_devices_that_ray_does_not_count_are_not_taken_unseen(node):
    with pytest.raises(ConfigError, match=r"of the 8 x A .* it counts none: start Ray here with"):
        kinds(node(8, counted=0.0))


def test_engines_get_the_dispatcher_s_variables_of_libraries_but_no_secret(node, monkeypatch):
    cluster = node(1, counted=1.0)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    [kind, *_] = kinds(cluster)
    kind.start("w")
    variables = cluster.options["runtime_env"]["env_vars"]
    assert (variables["NCCL_DEBUG"], variables["VLLM_LOGGING_LEVEL"]) == ("INFO", "DEBUG")
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert variables["VLLM_NO_USAGE_STATS"] == "1"
    assert "HF_TOKEN" not in variables and cluster.options["num_gpus"] == 1.0
    assert "py_executable" not in cluster.options["runtime_env"]  # it forks, before vLLM's choices
