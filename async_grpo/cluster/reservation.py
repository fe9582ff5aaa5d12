"""Reserves a trainer rank's device in Ray, so that no worker gets the same one.

consumes:     the devices of this machine, and what Ray has given of them
produces:     the device that this rank uses, as long as the rank lives
waits for:    Ray to start an actor that holds the device, and does nothing else
unblocked by: a free device; workers that have just ended give theirs back in seconds
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_grpo.devices.inventory import VISIBLE, Inventory
from async_grpo.util import deadlines
from async_grpo.util.errors import ClusterError, ConfigError, DeadlineError
from async_grpo.util.waiting import poll

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from async_grpo.cluster.cluster import Cluster

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5
REMEDY = (
    "stop those that are not needed, start the trainer with fewer ranks, or share devices with "
    "--gpus-per-worker and --gpus-per-rank"
)


class DeviceHolder:
    """Wrap with `ray.remote(num_gpus=share)`; the rank that has made it ends it."""

    async def device(self) -> str:
        """Ray's id of the device: its number or uuid."""
        import ray

        ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return ids[0]

    async def visible(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of Ray on this node; None where it is not set."""
        return os.environ.get(VISIBLE)


@dataclass(frozen=True, slots=True)
class RankHere:
    """One of the trainer's ranks on this machine."""

    rank: int
    local_rank: int
    local_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankHere:
        """The rank that torchrun or `local_ranks` started; without them rank 0 of 1."""
        names = (("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        return cls(*(int(environ.get(name, default)) for name, default in names))


def own_device(inventory: Inventory, rank: RankHere, *, share: float) -> int:
    """Torch's index of the device of a rank, where the machine has no workers.

    Raises `ConfigError` for more ranks than devices, which NCCL would refuse later.
    """
    num_devices = len(inventory.devices)
    if rank.local_size > num_devices:
        raise ConfigError(
            f"--nproc-per-node must be at most the devices of this machine ({inventory}), got "
            f"{rank.local_size}: a device takes one rank"
        )
    if share < 1 and rank.local_size > 1:
        raise ConfigError(
            f"--gpus-per-rank must be 1 with {rank.local_size} ranks on a machine, got {share:g}: "
            "two of them could not meet on one device"
        )
    return rank.local_rank


@contextmanager
def held_device(
    cluster: Cluster, inventory: Inventory, rank: RankHere, *, share: float
) -> Iterator[int]:
    """Torch's index of the device that Ray reserves for this rank within the block.

    Where Ray has no devices on this node, or none that this process sees, the rank takes its own.
    Raises `ClusterError`, naming the actors that hold the devices, when none is free.
    """
    own = own_device(inventory, rank, share=share)
    if not cluster.resources_here().get("GPU") or not _overlaps(cluster, inventory):
        yield own
        return
    who = f"trainer rank {rank.rank}"
    _await_room(cluster, who, share)
    holder = cluster.actor(DeviceHolder, num_gpus=share).remote()
    try:
        yield _given(cluster, holder, inventory, who=who, share=share)
    finally:
        cluster.end(holder)


def _given(
    cluster: Cluster, holder: ActorHandle, inventory: Inventory, *, who: str, share: float
) -> int:
    """Torch's index of the device that Ray gave to a `DeviceHolder`."""
    try:
        name = cluster.wait(
            holder.device.remote(), timeout_s=deadlines.PLACED_S, who="a device of Ray's"
        )
    except DeadlineError:
        raise _no_device(cluster, who, share) from None
    position = inventory.position(name)
    if position is None:
        raise ConfigError(
            f"{who} was given device {name} by Ray, which {VISIBLE}={os.environ.get(VISIBLE)} "
            "hides from it: give Ray and trainer the same devices, or none in common"
        )
    logger.info("%s holds %s of device %s in Ray", who, f"{share:.0%}", name)
    return position


@contextmanager
def rank_device(
    *, asks_ray: bool, address: str, namespace: str, share: float
) -> Iterator[int | None]:
    """Torch's index of the device of this trainer rank; None on a CPU.

    `asks_ray`: the run has workers, which must not get the same device. Raises `ConfigError` for a
    machine whose devices torch cannot use: no run falls back to the CPU silently.
    """
    from async_grpo.devices.current import seen_devices  # imports torch

    inventory = seen_devices()
    if not inventory.devices:
        yield None
        return
    rank = RankHere.of(os.environ)
    if not asks_ray:
        yield own_device(inventory, rank, share=share)
        return
    from async_grpo.cluster.cluster import Cluster  # imports Ray

    cluster = Cluster.join(address, namespace=namespace)
    with held_device(cluster, inventory, rank, share=share) as position:
        yield position


def _overlaps(cluster: Cluster, inventory: Inventory) -> bool:
    """Whether Ray may give out a device that this process sees too."""
    if VISIBLE not in os.environ:
        return True
    holder = cluster.actor(DeviceHolder, num_gpus=0).remote()
    names = cluster.wait(
        holder.visible.remote(), timeout_s=deadlines.ANSWER_S, who="an actor of this node"
    )
    cluster.end(holder)
    if names is None:
        return True
    return any(inventory.position(name.strip()) is not None for name in names.split(","))


def _await_room(cluster: Cluster, who: str, share: float) -> None:
    """Raise `ClusterError` unless a device is free: Ray would wait for one silently."""
    for _ in poll(every_s=POLL_INTERVAL_S, within_s=deadlines.ROOM_S):
        if cluster.free_here().get("GPU", 0.0) >= share:
            return
    raise _no_device(cluster, who, share)


def _no_device(cluster: Cluster, who: str, share: float) -> ClusterError:
    free, whole = cluster.free_here().get("GPU", 0.0), cluster.resources_here()["GPU"]
    return ClusterError(
        f"{who} needs {share:g} of a device, and Ray has {free:g} of {whole:g} free on this node, "
        f"held by {cluster.holders_here('GPU') or 'nobody'}: {REMEDY}"
    )
