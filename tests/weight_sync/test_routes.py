"""Which transport leads where."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.types import WorkerInfo
from async_grpo.util.errors import ConfigError, WeightSyncError
from async_grpo.weight_sync.routes import (
    check_group,
    check_route,
    publishes_adapter,
    serving_adapters,
)


def worker(*devices):
    return WorkerInfo("w7", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, devices=devices)


@pytest.mark.parametrize("sender", ["", "GPU-a"])
@pytest.mark.parametrize("devices", [(), ("GPU-a",), ("GPU-b", "GPU-c")])
def test_the_object_store_leads_everywhere(sender, devices):
    check_route("object_store", worker(*devices), sender=sender)


def test_nccl_leads_from_one_device_to_others():
    check_route("nccl", worker("GPU-b"), sender="GPU-a")
    check_route("nccl", worker("GPU-b", "GPU-c"), sender="GPU-a")


@pytest.mark.parametrize(
    ("transport", "sender", "devices", "complaint"),
    [
        ("nccl", "", ("GPU-b",), "trainer rank 0, which has none: use object_store"),
        ("nccl", "GPU-a", (), "worker w7 has none: use object_store"),
        ("nccl", "GPU-a", ("GPU-a",), "worker w7 share GPU-a: use object_store"),
        ("nccl", "GPU-a", ("GPU-b", "GPU-a"), "worker w7 share GPU-a: use object_store"),
    ],
)
def test_a_transport_that_leads_nowhere_is_refused_with_one_that_does(
    transport, sender, devices, complaint
):
    with pytest.raises(ConfigError, match=f"--weight-transport {transport} .*{complaint}"):
        check_route(transport, worker(*devices), sender=sender)


def test_workers_of_one_group_have_devices_of_their_own():
    """Two engines with half of a device each are served by the object store alone."""
    beside = [replace(worker("GPU-b"), worker_id="w1"), replace(worker("GPU-c"), worker_id="w2")]
    check_route("nccl", worker("GPU-d"), sender="GPU-a", others=beside)
    check_route("object_store", worker("GPU-c"), sender="GPU-a", others=beside)
    sentence = "nccl needs a device of its own .* worker w2 and worker w7 share GPU-c: use object_"
    with pytest.raises(ConfigError, match=sentence):
        check_route("nccl", worker("GPU-d", "GPU-c"), sender="GPU-a", others=beside)


def test_a_group_that_would_send_nothing_is_refused():
    check_group(SimpleNamespace(disabled=False))
    for useless in (None, SimpleNamespace(disabled=True)):
        with pytest.raises(WeightSyncError, match="needs the NCCL library"):
            check_group(useless)


def engine(role="generation", *, dtype="bfloat16", rank=16, loras=9):
    return WorkerInfo("w7", role, "n", 1, dtype=dtype, max_lora_rank=rank, max_loras=loras)


def published(*workers, adapter=None, **options):
    config = TrainConfig(model_name_or_path="m", data_path="d", lora_rank=16, **options)
    return publishes_adapter(config, {"r": 16} | (adapter or {}), workers)


def test_an_adapter_goes_alone_to_workers_that_are_started_for_it():
    assert published(engine(), engine())[0]
    assert published(engine(dtype="float32"))[0]
    assert not published(engine(rank=0))[0]
    with pytest.raises(ConfigError, match=r"--max-lora-rank is for .* is merged.* w7: start it w"):
        published(engine(), adapter_publication="merged")


@pytest.mark.parametrize(
    ("adapter", "workers", "options", "why"),
    [
        ({"use_dora": True}, [engine()], {}, "vLLM serves no adapter with --use-dora"),
        ({"modules_to_save": ["norm"]}, [engine()], {}, "no other modules .*norm.*"),
        ({"r": 600}, [engine(rank=512)], {}, "ranks up to 512, this one is 600"),
        ({"rank_pattern": {"q_proj": 32}}, [engine()], {}, "up to rank 16.* --max-lora-rank 32"),
        ({}, [engine(), engine(rank=0)], {}, "worker w7 serves adapters up to rank 0"),
        ({}, [engine(loras=2)], {"max_staleness": 1}, "2 adapters at a time.* --max-loras 3"),
        ({}, [engine(loras=2)], {"eval_data_path": "e"}, "2 adapters at a time, and 4 versions"),
        ({}, [engine(), engine(dtype="float32")], {}, "workers of bfloat16 and float32"),
        ({}, [engine(), engine("reference")], {}, "a reference worker takes weights"),
        ({}, [engine()], {"kl_coefficient": 0.1, "adapter_reference": "worker"}, "a reference"),
        ({}, [engine()], {"kl_coefficient": 0.1, "kl_estimator": "k1"}, "a reference worker"),
    ],
)  # fmt: skip
def test_weights_are_merged_where_an_adapter_alone_would_not_do(adapter, workers, options, why):
    with pytest.raises(ConfigError, match=f"--max-lora-rank .* is merged .*{why.split('.*')[0]}"):
        published(*workers, adapter=adapter, **options)
    with pytest.raises(ConfigError, match=f"--adapter-publication must be merged: .*{why}"):
        published(*workers, adapter=adapter, adapter_publication="adapter", **options)


def test_the_trainers_own_reference_needs_no_merged_weights():
    assert published(engine(), kl_coefficient=0.1)[0]


def tables(*workers, on_cpu=False, **options):
    config = TrainConfig(model_name_or_path="m", data_path="d", lora_rank=16, **options)
    found = serving_adapters(config, config.adapter.stated, workers, on_cpu=on_cpu)
    return [(each.max_lora_rank, each.max_loras) for each in found]


def test_tables_get_room_for_adapters_where_the_run_sends_them():
    engine = WorkerConfig(model_path="m")
    teacher = WorkerConfig(model_path="m", mode="teacher", name="t")
    assert tables(engine, teacher) == [(16, 4), (0, 4)]
    assert tables(engine, max_staleness=4, eval_data_path="e") == [(16, 7)]
    assert tables(engine, on_cpu=True) == [(0, 4)]
    assert tables(engine, on_cpu=True, adapter_publication="adapter") == [(16, 4)]
    assert tables(WorkerConfig(model_path="m", max_lora_rank=64)) == [(64, 4)]
    for options in ({"use_dora": True}, {"adapter_publication": "merged"}):
        assert tables(engine, **options) == [(0, 4)]
