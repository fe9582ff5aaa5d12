"""What the devices of a machine make of the command lines of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli.assignment import placed
from async_grpo.cli.launch_file import launch
from async_grpo.cli.local_run import options_of_run, planned
from async_grpo.cli.memory import fleet_here
from async_grpo.cli.run_processes import name_of
from async_grpo.devices.inventory import Device, Inventory
from async_grpo.util.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def machine(num_devices):
    devices = tuple(Device(i, f"GPU-{i}", "NVIDIA H200", 143771) for i in range(num_devices))
    return Inventory(devices, "580.95.05")


def quick_start(num_devices, monkeypatch, *arguments):
    monkeypatch.chdir(REPOSITORY)
    run = plan_of("examples/quickstart.toml", *arguments)
    return run, placed(run, machine(num_devices))


def plan_of(*arguments):
    options = launch.make_context("launch", list(arguments)).params
    return planned(**options_of_run(options))


@pytest.mark.parametrize(
    ("num_devices", "options", "room"),
    [
        (0, (), (0, 4)),
        (2, (), (8, 4)),
        (0, ("--adapter-publication", "adapter", "--max-staleness", "4"), (8, 7)),
        (2, ("--adapter-publication", "merged"), (0, 4)),
    ],
)
def test_engines_have_room_for_adapters_where_the_run_sends_them(
    num_devices, options, room, monkeypatch
):
    run, _ = quick_start(num_devices, monkeypatch, "--lora-rank", "8", *options)
    engines = tuple(each for each in run.workers if each.mode == "generation")
    [engine] = placed(replace(run, workers=engines), machine(num_devices)).workers
    assert (engine.max_lora_rank, engine.max_loras) == room


def shares(run):
    """Ranks, and the share of a device that each of them has, and each worker."""
    return (
        run.num_ranks,
        run.train.memory.gpus_per_rank,
        *(each.gpus_per_worker for each in run.workers),
    )


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [
        (0, (2, 1.0, 1.0, 1.0)),
        (1, (1, 0.1, 0.7, 0.1)),  # a small model's bills, and the cache has what is left
        (2, (1, 1.0, 0.8, 0.1)),
        (3, (1, 1.0, 1.0, 1.0)),
        (4, (2, 1.0, 1.0, 1.0)),
        (8, (2, 1.0, 1.0, 1.0)),
    ],
)
def test_the_quick_start_on_so_many_devices(num_devices, expected, monkeypatch):
    _, found = quick_start(num_devices, monkeypatch)
    assert shares(found) == expected
    assert found.num_devices == num_devices
    if num_devices:
        assert found.placement.startswith(f"{num_devices} x NVIDIA H200 (144 GB) here; ")


SERVICE = """
class Index:
    capacity = 4
    devices = 2
    async def answer(self, request): ...
"""


@pytest.mark.parametrize(("threads", "number"), [("1", 1), ("0", 1), ("", 1), ("4,2", 1), ("2", 2)])
def test_cores_are_measured_with_the_threads_that_are_given(threads, number):
    fleet = fleet_here(machine(0), threads=threads)
    assert fleet.threads == number and "measured" in fleet.kind.source
    assert "measured" not in fleet_here(machine(0)).kind.source


def test_a_service_has_the_devices_that_its_class_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "index.py").write_text(SERVICE)
    text = (REPOSITORY / "examples/quickstart.toml").read_text()
    (tmp_path / "run.toml").write_text(f'{text}\n[[worker]]\nmode = "index.py:Index"\n')
    run = plan_of("run.toml")
    assert shares(placed(run, machine(6))) == (2, 1.0, 1.0, 1.0, 1.0)
    assert shares(placed(run, machine(5)))[0] == 1  # one rank less, for it
    assert name_of(run, 2) == "service"  # of its log


def test_on_another_cluster_devices_are_those_of_its_nodes(monkeypatch):
    run, found = quick_start(1, monkeypatch, "--ray-address", "head:1")
    assert found is run


def test_a_run_that_fits_no_plan_is_refused_before_anything_starts(monkeypatch, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[[worker]]\nmodel_path = "m"\ntensor_parallel_size = 2\n'
        f'[train]\nmodel_name_or_path = "m"\ndata_path = "d"\noutput_dir = "{tmp_path}/run"\n'
    )
    run = plan_of(str(file))
    with pytest.raises(ConfigError, match=r"2 NVIDIA devices cannot hold a trainer rank and 1 gen"):
        placed(run, machine(2))


def test_a_plan_for_other_machines_is_said_and_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    typed = ["examples/quickstart.toml", "--plan-for", "8,8", "--output-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(launch, typed, catch_exceptions=False)
    assert result.output.splitlines() == [
        "8 + 8 NVIDIA devices: 2 trainer ranks with a device each, 1 generation worker with a "
        "device, 1 reference worker with a device",
        "  trainer rank 0           machine 0, device 0",
        "  trainer rank 1           machine 0, device 1",
        "  generation worker 0      machine 1, device 7",
        "  reference worker 0       machine 1, device 6",
    ]
    assert not (tmp_path / "run").exists()
    result = CliRunner().invoke(launch, [*typed, "--plan-for", "two"])
    assert (
        result.exit_code == 1
        and "as in 8xA100 where it is none of H100, got 'two'" in result.stderr
    )


def test_a_colocated_run_has_engines_that_can_sleep_and_no_further_device(monkeypatch):
    from async_grpo.cli.local_run import num_devices

    run, found = quick_start(
        1, monkeypatch, "--colocated", "--max-staleness", "1", "--kl-coefficient", "0"
    )
    assert [each.colocated for each in found.workers] == [
        each.mode == "generation" for each in run.workers
    ]
    assert num_devices(found) == 1
    assert "in turns with the generation worker" in found.placement
