"""What a machine with devices lacks, said at set-up or start with the remedy: never found later."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from pathlib import Path

from async_grpo.devices.inventory import VISIBLE, Inventory, read_inventory
from async_grpo.util.errors import ConfigError

logger = logging.getLogger(__name__)
LEAST_DRIVER = 580  # of CUDA 13, for which requirements/gpu.txt is built; tools/setup_env.sh too
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 1 << 30  # NCCL and engines of several devices meet there; Docker gives 64 MB


def usable_devices() -> Inventory:
    """The devices of this machine, on which everything that a run needs has been found.

    Raises `ConfigError` for what is missing; says when devices are not used.
    """
    inventory = read_inventory()
    if inventory.num_unused:
        logger.warning(
            "%d NVIDIA device(s) are here and not used, for torch is installed for CPUs: "
            "`DEVICE=gpu make setup` installs it for them",
            inventory.num_unused,
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


def check_seen(inventory: Inventory, *, num_seen: int) -> None:
    """Raise `ConfigError` when torch, which is imported by now, does not see every device."""
    if num_seen < len(inventory.devices):
        raise ConfigError(
            f"torch must see the {inventory} of this machine, got {num_seen}: see what "
            '`python -c "import torch; torch.cuda.init()"` says, or hide the devices with '
            f"{VISIBLE}= to train on the CPU"
        )
