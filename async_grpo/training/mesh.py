"""How the trainer's ranks divide the model: in one group of shards, or in several that replicate.

shard       all ranks hold one copy of masters, gradients and moments between them
replicate   ranks of the same place in their groups hold the same shards, and add up gradients
"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from async_grpo.util.errors import ConfigError

SHARD, REPLICATE = "shard", "replicate"


def make_mesh(device_type: str, *, num_ranks: int, shard_ranks: int = 0) -> DeviceMesh:
    """("shard",) over all ranks, or ("replicate", "shard") of groups of `shard_ranks`; collective.

    Raises ConfigError where groups of that size do not hold all ranks.

    Six ranks in groups of two: rank 3 is in (1, 1), shards with rank 2, replicates with 1 and 5.
    """
    if shard_ranks in (0, num_ranks):
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=(SHARD,))
    if num_ranks % shard_ranks:
        raise ConfigError(
            f"--fsdp-shard-ranks must divide the number of trainer ranks ({num_ranks}), got "
            f"{shard_ranks}: give a divisor; without it, the ranks of a machine share a copy"
        )
    shape = num_ranks // shard_ranks, shard_ranks
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))


@functools.cache
def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same places on hosts, for shards in their memory; its first call is collective."""
    if mesh.device_type == "cpu":
        return mesh
    return init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)


def as_shard(held: Tensor, tensor: Tensor) -> Tensor:
    """`held`, in this host's memory, in the place of `tensor` or of this rank's shard of it."""
    if not isinstance(tensor, DTensor):
        return held
    return DTensor.from_local(
        held,
        host_mesh(tensor.device_mesh),
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
