"""How the policy's parameters lie on the ranks, as far as it matters to whoever gathers them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from async_grpo.model.policy import PolicyModel, hf_named_parameters


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Parameters cut by rows over the `num_ranks` ranks of `group`."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # whole parameters, as checkpoints name them
    group: dist.ProcessGroup | None  # None: this rank holds everything
    rank: int  # in the group
    num_ranks: int
    is_first_replica: bool  # of several groups that hold the same, one gives its weights away

    @classmethod
    def of(cls, policy: PolicyModel) -> Shards:
        """Those of a policy that is sharded, or whole on one rank."""
        named = tuple(hf_named_parameters(policy))
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in named)
        first = next((p for _, p in named if isinstance(p, DTensor)), None)
        if first is None:
            return cls(shapes, None, 0, 1, is_first_replica=True)
        mesh = first.device_mesh
        dim = next(i for i, placement in enumerate(first.placements) if placement.is_shard())
        others = [mesh.get_local_rank(i) for i in range(mesh.ndim) if i != dim]
        return cls(
            shapes,
            mesh.get_group(dim) if mesh.size(dim) > 1 else None,
            mesh.get_local_rank(dim),
            mesh.size(dim),
            is_first_replica=not any(others),
        )
