"""The NVIDIA devices of this machine that this process may use, as `nvidia-smi` tells of them.

Dispatchers, `launch` and trainer ranks ask once, when they start; nothing here imports torch.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from glob import glob
from importlib.metadata import PackageNotFoundError, version

from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError

QUERY = "--query-gpu=index,uuid,name,memory.total,driver_version"
DEVICE_FILES = "/dev/nvidia[0-9]*"  # a container may be given any of them
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDES_ALL = ("-1", "NoDevFiles")  # as CUDA and Slurm write it


@dataclass(frozen=True, slots=True)
class Device:
    """One NVIDIA device."""

    index: int  # the driver's, by bus: what Ray and CUDA_VISIBLE_DEVICES mean by a number
    uuid: str  # GPU-...
    name: str
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices of one machine that a process may use, in the order of torch."""

    devices: tuple[Device, ...] = ()
    driver: str = ""  # its version, such as 580.95.05; empty without a device
    num_unused: int = 0  # that are there, but torch was installed for CPUs

    def __str__(self) -> str:
        """Such as "2 x NVIDIA H200 (141 GB)"."""
        names = {f"{each.name} ({each.memory_mib / 1000:.0f} GB)" for each in self.devices}
        return f"{len(self.devices)} x {' or '.join(sorted(names))}" if names else "no device"

    def position(self, name: str) -> int | None:
        """Where torch counts the device that Ray calls so, by number or uuid; None: it is hidden.

        >>> four = Inventory(tuple(Device(i, f"GPU-{i}a", "A", 1) for i in (2, 3)))
        >>> four.position("3"), four.position("GPU-2a"), four.position("0")
        (1, 0, None)
        """
        for position, device in enumerate(self.devices):
            if name in (str(device.index), device.uuid):
                return position
        return None


def ask_driver() -> str:
    """A line a device, as `QUERY` has it; empty where there is neither driver nor device."""
    command = ("nvidia-smi", QUERY, "--format=csv,noheader,nounits")
    files = sorted(glob(DEVICE_FILES))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=deadlines.DRIVER_ANSWER_S
        )
    except FileNotFoundError:
        if not files:
            return ""
        problem = "is not installed"
    except subprocess.TimeoutExpired:
        problem = f"did not answer within {deadlines.DRIVER_ANSWER_S:g} s"
    else:
        if not done.returncode or not files:
            return "" if done.returncode else done.stdout
        problem = f"failed: {(done.stdout or done.stderr).strip().splitlines()[0]}"
    found = f"{files[0]} is there, but " if files else ""
    raise ConfigError(
        f"{found}nvidia-smi {problem}: mend the driver (in a container, "
        "NVIDIA_DRIVER_CAPABILITIES must hold compute,utility), or hide the devices with "
        f"{VISIBLE}="
    )


def torch_build() -> str:
    """The version of the installed torch, such as 2.13.0+cpu, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def read_inventory(
    environ: Mapping[str, str] = os.environ,
    *,
    ask: Callable[[], str] = ask_driver,
    torch: str | None = None,
) -> Inventory:
    """The devices that `environ` lets a process use; none where torch is built for CPUs.

    Raises `ConfigError` for devices whose driver does not answer, and for names that hide all of
    them without being meant to.
    """
    if not environ.get(VISIBLE, "all"):
        return Inventory()
    listed, drivers = [], set()
    for line in ask().splitlines():
        index, uuid, name, memory, driver = (field.strip() for field in line.split(","))
        listed.append(Device(int(index), uuid, name, int(memory) if memory.isdigit() else 0))
        drivers.add(driver)
    devices = visible(listed, environ.get(VISIBLE))
    if (torch_build() if torch is None else torch).endswith("+cpu"):
        return Inventory(num_unused=len(devices))
    if listed and not devices and environ[VISIBLE].strip() not in HIDES_ALL:
        raise ConfigError(
            f"{VISIBLE} must begin with a device of this machine, by number (0 to "
            f"{len(listed) - 1}) or uuid, got {environ[VISIBLE]!r}: correct it, or leave it empty "
            "to use the CPU; a MIG slice is not taken"
        )
    return Inventory(devices, "".join(drivers))


def visible(devices: Iterable[Device], names: str | None) -> tuple[Device, ...]:
    """Those that CUDA_VISIBLE_DEVICES names, in its order; as CUDA does, up to an unknown name.

    >>> two = [Device(0, "GPU-ab", "A", 1), Device(1, "GPU-cd", "A", 1)]
    >>> [each.index for each in visible(two, "GPU-c,0,7,1")]
    [1, 0]
    """
    devices = tuple(devices)
    if names is None:
        return devices
    found: list[Device] = []
    for name in (each.strip() for each in names.split(",")):
        is_meant = (
            (lambda device, name=name: str(device.index) == name)
            if name.isdigit()
            else (lambda device, name=name: bool(name) and device.uuid.startswith(name))
        )
        meant = next(filter(is_meant, devices), None)
        if meant is None:
            break
        found.append(meant)
    return tuple(found)
