"""What the devices of a machine make of the command lines of a run."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli.launch_file import launch, placed, planned
from async_grpo.devices.inventory import Device, Inventory
from async_grpo.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def machine(num_devices):
    devices = tuple(Device(i, f"GPU-{i}", "NVIDIA H200", 143771) for i in range(num_devices))
    return Inventory(devices, "580.95.05")


def quick_start(num_devices, monkeypatch, *arguments):
    monkeypatch.chdir(REPOSITORY)
    context = launch.make_context("launch", ["examples/quickstart.toml", *arguments])
    run = planned(**context.params)
    return run, placed(run, machine(num_devices))


def added(run, found):
    """Options that the plan has given to the trainer, and to each dispatcher."""
    pairs = zip(run.workers, found.workers, strict=True)
    workers = [new[len(old) :] for (_, old), (_, new) in pairs]
    return [found.train_options[len(run.train_options) :], *workers]


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (0, [(), (), ()]),
        (1, [("--nproc-per-node=1", "--gpus-per-rank=0.36"),
             ("--gpus-per-worker=0.36",), ("--gpus-per-worker=0.18",)]),
        (2, [("--nproc-per-node=1",), ("--gpus-per-worker=0.6",), ("--gpus-per-worker=0.3",)]),
        (3, [("--nproc-per-node=1",), (), ()]),
        (4, [(), (), ()]),
        (8, [(), (), ()]),
    ],
)  # fmt: skip
def test_the_quick_start_on_so_many_devices(num_devices, options, monkeypatch):
    run, found = quick_start(num_devices, monkeypatch)
    assert added(run, found) == options
    assert found.num_devices == num_devices
    if num_devices:
        assert found.placement.startswith(f"{num_devices} x NVIDIA H200 (144 GB) here; ")


def test_on_another_cluster_devices_are_those_of_its_nodes(monkeypatch):
    run, found = quick_start(1, monkeypatch, "--ray-address", "head:1")
    assert found is run


def test_a_run_that_fits_no_plan_is_refused_before_anything_starts(monkeypatch, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[[worker]]\nmodel_path = "m"\ntensor_parallel_size = 2\n'
        f'[train]\nmodel_name_or_path = "m"\ndata_path = "d"\noutput_dir = "{tmp_path}/run"\n'
    )
    run = planned(**launch.make_context("launch", [str(file)]).params)
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
    assert result.exit_code == 1 and "such as 8 or 8,8, got 'two'" in result.stderr
