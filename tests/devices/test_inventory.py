"""What nvidia-smi, CUDA_VISIBLE_DEVICES and the installed torch make of a machine."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.devices import inventory
from async_grpo.devices.inventory import Device, Inventory, read_inventory
from async_grpo.util.errors import ConfigError

EIGHT = "".join(f"{i}, GPU-{i}aaa, NVIDIA H100 80GB HBM3, 81559, 580.95.05\n" for i in range(8))
CUDA = "2.13.0"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def set_of_environment(monkeypatch, tmp_path):
    """Where `make setup` would have kept the set that was asked for: nothing was."""
    monkeypatch.setattr(inventory, "CHOSEN_SET", tmp_path / "setup.device")
    return tmp_path / "setup.device"


def read(environ=None, text=EIGHT, torch=CUDA):
    return read_inventory(environ or {}, ask=lambda: text, torch=torch)


def test_devices_are_read_with_their_driver():
    found = read()
    assert len(found.devices) == 8 and found.driver == "580.95.05"
    assert found.devices[3] == Device(3, "GPU-3aaa", "NVIDIA H100 80GB HBM3", 81559)
    assert str(found) == "8 x NVIDIA H100 80GB HBM3 (82 GB)"


@pytest.mark.parametrize(
    ("names", "indices"),
    [
        ("4,5", [4, 5]), ("5,4", [5, 4]), ("GPU-2aaa", [2]), ("GPU-2, 1", [2, 1]),
        ("1,9,2", [1]), ("-1", []), ("NoDevFiles", []), ("1,", [1]),
    ],
)  # fmt: skip
def test_hidden_devices_are_no_part_of_it(names, indices):
    found = read({"CUDA_VISIBLE_DEVICES": names})
    assert [device.index for device in found.devices] == indices


@pytest.mark.parametrize("names", ["8", "MIG-GPU-1aaa/1/0", "gpu0", ","])
def test_names_of_no_device_here_are_no_cpu_run(names):
    with pytest.raises(
        ConfigError, match=rf"must begin with a .* \(0 to 7\) or uuid, got '{names}'"
    ):
        read({"CUDA_VISIBLE_DEVICES": names})
    assert read({"CUDA_VISIBLE_DEVICES": names}, text="") == Inventory()
    assert read({"CUDA_VISIBLE_DEVICES": names}, torch="2.13.0+cpu") == Inventory()


def test_a_machine_without_devices_or_with_hidden_ones_is_not_asked_further():
    def never():
        raise AssertionError

    assert read(text="") == Inventory()
    assert read_inventory({"CUDA_VISIBLE_DEVICES": ""}, ask=never) == Inventory()


def test_torch_for_cpus_uses_none_and_the_inventory_tells_how_many():
    assert read(torch="2.13.0+cpu") == Inventory(num_unused=8)


def test_a_set_for_cpus_that_was_asked_for_leaves_devices_alone(set_of_environment):
    def never():
        raise AssertionError

    set_of_environment.write_text("cpu\n")
    assert read_inventory({}, ask=never, torch="2.13.0+cpu") == Inventory()
    assert len(read().devices) == 8  # of a torch that somebody has put there since
    set_of_environment.write_text("gpu\n")
    assert read(torch="2.13.0+cpu") == Inventory(num_unused=8)


def test_memory_that_the_driver_does_not_tell_is_no_error():
    found = read(text="0, GPU-a, NVIDIA GB10, [N/A], 580.1\n")
    assert found.devices == (Device(0, "GPU-a", "NVIDIA GB10", 0),)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a device file and an nvidia-smi that says what a test wants."""

    def make(script):
        if script is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        for name in ("nvidia3", "nvidiactl"):  # as in a container that was given one of eight
            (tmp_path / name).touch()
        monkeypatch.setattr(inventory, "DEVICE_FILES", f"{tmp_path}/nvidia[0-9]*")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=None)

    return make


def test_the_program_is_asked_for_what_is_read(machine):
    machine(f'case "$*" in *uuid*) printf "%s" "{EIGHT}" ;; esac')
    assert read_inventory(os.environ, torch=CUDA) == read()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "nvidia3 is there, but nvidia-smi is not installed"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
         "nvidia-smi failed: Failed to initialize NVML: Driver/library version mismatch"),
        ("exec sleep 60", "did not answer within 0.2 s"),
    ],
)  # fmt: skip
def test_a_device_whose_driver_does_not_answer_is_an_error(script, said, machine, monkeypatch):
    machine(script)
    monkeypatch.setattr("async_grpo.util.deadlines.DRIVER_ANSWER_S", 0.2)
    monkeypatch.setenv("PATH", os.environ["PATH"] + ("" if script is None else ":/usr/bin:/bin"))
    with pytest.raises(ConfigError, match=said):
        read_inventory(os.environ, torch=CUDA)


# A command of its own process, whose environment was made as the file says.
PROGRAM = """
import sys
from pathlib import Path
from async_grpo.devices import inventory
from async_grpo.cli.main import main
inventory.CHOSEN_SET = Path(sys.argv.pop(1))
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ("launch", str(REPOSITORY / "examples" / "quickstart.toml")),
        ("worker", "--model-path", "./none"),
        ("train", "--model-name-or-path", "./none", "--data-path", "none.jsonl"),
    ],
    ids=" ".join,
)
def test_no_command_takes_the_cpus_of_a_machine_with_devices_unless_that_was_said(
    command, machine, tmp_path, set_of_environment
):
    machine(f'printf "%s" "{EIGHT}"')
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}

    def error(**variables):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(set_of_environment), *command],
            env=environ | variables, cwd=tmp_path, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 1
        return done.stderr.splitlines()[-1]

    refused = "error: torch must be built for the 8 NVIDIA device(s) of this machine, got "
    assert error().startswith(refused)
    if command[0] == "launch":  # it would start
        return
    others = "error: the model must be a Hugging Face folder"
    assert error(CUDA_VISIBLE_DEVICES="").startswith(others)
    set_of_environment.write_text("cpu")
    assert error().startswith(others)
