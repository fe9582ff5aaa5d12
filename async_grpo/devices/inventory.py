"""The NVIDIA devices of this machine that this process may use, as `nvidia-smi` lists them.

Dispatchers, `launch` and trainer ranks read them once, when they start: an error names all that the
machine lacks for them, with the remedy. Nothing here imports torch, because environment variables
that decide how torch uses devices must be set before.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError

QUERY = "--query-gpu=index,uuid,name,memory.total,driver_version"
DEVICE_FILES = "/dev/nvidia[0-9]*"  # a container may be given any of them
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDES_ALL = ("-1", "NoDevFiles")  # values with which CUDA and Slurm hide all devices
LEAST_DRIVER = 580  # of CUDA 13, for which requirements/gpu.txt is built; tools/setup_env.sh too
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 1 << 30  # for NCCL and engines of several devices; Docker gives 64 MB
CHOSEN_SET = Path(sys.prefix, "setup.device")  # DEVICE of `make setup`, where it was given
# A number must mean the same device to torch, the driver and Ray.
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # two names of one setting
FORWARDED = re.compile(r"(NCCL|GLOO|UCX|VLLM|TORCH|PYTORCH|TRITON|HF|CUDA_DEVICE)_")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


@dataclass(frozen=True, slots=True)
class Device:
    """One NVIDIA device."""

    index: int  # the driver's, by bus: a number of Ray's or in CUDA_VISIBLE_DEVICES
    uuid: str  # GPU-...
    name: str
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices of one machine that a process may use, in the order of torch."""

    devices: tuple[Device, ...] = ()
    driver: str = ""  # its version, such as 580.95.05; empty without a device
    num_unused: int = 0  # devices that are there, but torch was installed for CPUs

    def __str__(self) -> str:
        """Such as "2 x NVIDIA H200 (141 GB)"."""
        names = {f"{each.name} ({each.memory_mib / 1000:.0f} GB)" for each in self.devices}
        return f"{len(self.devices)} x {' or '.join(sorted(names))}" if names else "no device"

    def position(self, name: str) -> int | None:
        """Torch's index of the device that Ray names by number or uuid; None: it is hidden.

        >>> four = Inventory(tuple(Device(i, f"GPU-{i}a", "A", 1) for i in (2, 3)))
        >>> four.position("3"), four.position("GPU-2a"), four.position("0")
        (1, 0, None)
        """
        names = ((str(device.index), device.uuid) for device in self.devices)
        return next((position for position, each in enumerate(names) if name in each), None)


def ask_driver() -> str:
    """nvidia-smi's answer to `QUERY`, a line a device; empty without driver and devices.

    Raises `ConfigError` where a device is there, and the driver does not answer.
    """
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

    Where `DEVICE=cpu make setup` has chosen that build, the driver is not asked. Raises
    `ConfigError` for devices whose driver does not answer, and for a CUDA_VISIBLE_DEVICES that
    hides all of them by mistake.
    """
    for_cpus = (torch_build() if torch is None else torch).endswith("+cpu")
    is_chosen = CHOSEN_SET.is_file() and CHOSEN_SET.read_text().strip() == "cpu"
    if not environ.get(VISIBLE, "all") or (for_cpus and is_chosen):
        return Inventory()
    listed, drivers = [], set()
    for line in ask().splitlines():
        index, uuid, name, memory, driver = (field.strip() for field in line.split(","))
        listed.append(Device(int(index), uuid, name, int(memory) if memory.isdigit() else 0))
        drivers.add(driver)
    devices = visible(listed, environ.get(VISIBLE))
    if for_cpus:
        return Inventory(num_unused=len(devices))
    if listed and not devices and environ[VISIBLE].strip() not in HIDES_ALL:
        raise ConfigError(
            f"{VISIBLE} must begin with a device of this machine, by number (0 to "
            f"{len(listed) - 1}) or uuid, got {environ[VISIBLE]!r}: correct it, or leave it empty "
            "to use the CPU; a MIG slice is not taken"
        )
    return Inventory(devices, "".join(drivers))


def visible(devices: Iterable[Device], names: str | None) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES names, in its order; like CUDA up to an unknown name.

    >>> two = [Device(0, "GPU-ab", "A", 1), Device(1, "GPU-cd", "A", 1)]
    >>> [each.index for each in visible(two, "GPU-c,0,7,1")]
    [1, 0]
    """
    devices = tuple(devices)
    if names is None:
        return devices
    found: list[Device] = []
    for name in names.split(","):
        if (device := _named(devices, name.strip())) is None:
            break
        found.append(device)
    return tuple(found)


def _named(devices: Sequence[Device], name: str) -> Device | None:
    """The device with a number, or the first whose uuid begins so."""
    if name.isdigit():
        return next((each for each in devices if str(each.index) == name), None)
    return next((each for each in devices if name and each.uuid.startswith(name)), None)


def usable_devices() -> Inventory:
    """The devices of this machine, after checks of driver, headers and shared memory.

    Raises `ConfigError` for what is missing, and for devices that a torch for CPUs would not use.
    """
    inventory = read_inventory()
    if inventory.num_unused:
        raise ConfigError(
            f"torch must be built for the {inventory.num_unused} NVIDIA device(s) of this machine, "
            f"got {torch_build()}: `DEVICE=gpu make setup` (or pip's extra gpu) installs it, "
            f"{VISIBLE}= or `DEVICE=cpu make setup` says that its CPUs are meant"
        )
    if inventory.devices:
        check_driver(inventory)
        check_headers()
        check_shared_memory()
    return inventory


def check_driver(inventory: Inventory) -> None:
    """Raise `ConfigError` for a driver that is older than the installed CUDA needs."""
    major = inventory.driver.partition(".")[0]
    if not major.isdigit() or int(major) < LEAST_DRIVER:
        raise ConfigError(
            f"the NVIDIA driver must be {LEAST_DRIVER} or newer for CUDA 13, got "
            f"{inventory.driver or 'none'}: update it, or train on the CPU with "
            "`DEVICE=cpu make setup`"
        )


def check_headers(
    include: str = sysconfig.get_paths()["include"], compiler: str = os.environ.get("CC", "cc")
) -> None:
    """Raise `ConfigError` unless Triton, which engines need, can compile against this Python."""
    if not (Path(include) / "Python.h").exists():
        raise ConfigError(
            f"Triton needs the headers of this Python, {include} has no Python.h: install them "
            "(Debian and Ubuntu: python3-dev)"
        )
    if not any(map(shutil.which, (compiler, "gcc", "clang"))):
        raise ConfigError(
            f"Triton needs a C compiler, there is no {compiler}: install gcc, or name one in CC"
        )


def check_shared_memory(folder: Path = SHARED_MEMORY, *, least: int = LEAST_SHARED_BYTES) -> None:
    """Raise `ConfigError` for a folder of shared memory that is too small for any run."""
    if not folder.exists():
        return
    size = os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize
    if size < least:
        raise ConfigError(
            f"{folder} must hold {least >> 20} MiB at least, for NCCL and Ray's store, got "
            f"{size >> 20} MiB: start the container with --shm-size 32g, or more for a large model"
        )


def lacks_rdma(folder: Path = Path("/dev/infiniband"), library: str = "libibverbs.so.1") -> str:
    """Why NCCL must take sockets between machines, which it tells nobody; empty if it need not."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return f"{library} cannot be loaded"
    return "" if folder.exists() else f"there is no {folder}"


def check_seen(inventory: Inventory, *, num_seen: int) -> None:
    """Raise `ConfigError` when torch, which is imported by now, does not see every device."""
    if num_seen < len(inventory.devices):
        raise ConfigError(
            f"torch must see the {inventory} of this machine, got {num_seen}: see what "
            '`python -c "import torch; torch.cuda.init()"` says, or hide the devices with '
            f"{VISIBLE}= to train on the CPU"
        )


def prepare_for_devices(environ: MutableMapping[str, str]) -> None:
    """Set torch's variables that are not set yet, before a trainer rank first uses a device.

    Without expandable segments, rows of ever different lengths would fragment the memory.

    >>> environ = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    >>> prepare_for_devices(environ)
    >>> sorted(environ)
    ['CUDA_DEVICE_ORDER', 'PYTORCH_ALLOC_CONF']
    """
    for name, value in DEVICE_ORDER.items():
        environ.setdefault(name, value)
    if not any(name in environ for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = "expandable_segments:True"


def own_ids() -> tuple[str, ...]:
    """Ids of the devices that this process may use, as torch names them."""
    return tuple(each.uuid.removeprefix("GPU-") for each in usable_devices().devices)


def forwarded(environ: Mapping[str, str], *, secrets: bool = False) -> dict[str, str]:
    """Variables that a dispatcher passes to its workers, which inherit those of `ray start` alone.

    Secrets are left out, because Ray writes the environment of its actors into logs; `secrets`: of
    a process that is told in another way.

    >>> forwarded({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_1", "HOME": "/root"})
    {'CUDA_DEVICE_ORDER': 'PCI_BUS_ID', 'NCCL_DEBUG': 'INFO'}
    """
    return DEVICE_ORDER | {
        name: value
        for name, value in environ.items()
        if FORWARDED.match(name) and (secrets or not SECRET.search(name))
    }
