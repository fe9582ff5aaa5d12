"""What a checkpoint holds of tensors: the policy, AdamW's moments, and each rank's random state.

Shards are safetensors files that torch.distributed.checkpoint writes and reads, so nothing is
pickled and another number of ranks can read them. Names are Hugging Face's:

    policy.<name>  exp_avg.<name>  exp_avg_sq.<name>  [rank_3.random_cpu, rank_3.random_cuda]

AdamW's count of updates is the run's clock of steps: every update moves every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from async_grpo.checkpoint.resume import Start
from async_grpo.errors import CheckpointError
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.training.fsdp import reshard
from async_grpo.training.learner import Learner
from async_grpo.training.schedule import Clocks

FILE_BYTES = 1 << 30  # one file's worth of shards is serialised in memory at a time
MOMENTS = ("exp_avg", "exp_avg_sq")

Tensors = dict[str, Tensor]


def staged_tensors(policy: PolicyModel, optimizer: Optimizer, clocks: Clocks) -> Tensors:
    """A copy in this host's memory of all that a checkpoint holds of this rank; no collectives."""
    reshard(policy)
    mesh = _host_mesh()
    tensors = _named_state(policy, optimizer, clocks)
    return {name: _staged(tensor, mesh) for name, tensor in tensors.items()} | _random_states()


def save_tensors(tensors: Tensors, folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Write this rank's shards of staged tensors; collective over `group`, a host's backend.

    Raises `CheckpointError` on every rank when any rank could not write its own.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(tensors), save_distributed=True
    )
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"shards could not be written: {_cause(error)}") from None


def restore_learner(learner: Learner, start: Start) -> None:
    """Collective: go on from a checkpoint, whatever number of ranks has saved it.

    Raises `CheckpointError` on every rank when one cannot read it.
    """
    assert start.folder and start.manifest
    load_tensors(
        start.folder,
        learner.policy,
        learner.step.optimizer,
        start.clocks,
        world_size=start.manifest.world_size,
    )
    learner.step.clocks = start.clocks


def load_tensors(
    folder: Path,
    policy: PolicyModel,
    optimizer: Optimizer,
    clocks: Clocks,
    *,
    world_size: int,
) -> None:
    """Put a checkpoint's tensors in place; collective, for any number of ranks.

    `world_size` is that of the run that saved: random states are restored when it is ours too.
    Raises `CheckpointError` on every rank when any rank could not read its own.
    """
    reshard(policy)
    if clocks.steps:
        _begin_moments(optimizer, clocks)
    tensors = _named_state(policy, optimizer, clocks)
    random_states = _random_states() if world_size == _world_size() else {}
    try:
        dcp.load(
            tensors | random_states,
            storage_reader=HuggingFaceStorageReader(str(folder)),
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        raise CheckpointError(f"{folder} could not be read: {_cause(error)}") from None
    _set_random_states(random_states)


def _named_state(policy: PolicyModel, optimizer: Optimizer, clocks: Clocks) -> Tensors:
    """The trained state itself, not a copy."""
    named = dict(hf_named_parameters(policy))
    tensors = {f"policy.{name}": parameter.detach() for name, parameter in named.items()}
    if not clocks.steps:
        return tensors  # AdamW makes its moments with its first step
    trained = {name: p for name, p in named.items() if p.requires_grad}
    counts = torch.stack([optimizer.state[p]["step"].cpu() for p in trained.values()])
    assert bool((counts == clocks.steps).all()), f"AdamW counts {counts}, the clock {clocks}"
    for moment in MOMENTS:
        for name, parameter in trained.items():
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def _begin_moments(optimizer: Optimizer, clocks: Clocks) -> None:
    """AdamW's state as its first step would make it, after `clocks.steps` of them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(
                    float(clocks.steps), dtype=torch.float32, device=parameter.device
                ),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }


def _staged(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The same tensor, or shard of one, in this host's memory."""
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True).contiguous()
    local = tensor.to_local().to("cpu", copy=True).contiguous()
    return DTensor.from_local(
        local,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _host_mesh() -> DeviceMesh | None:
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """File of each tensor, from 1, so that no file of a rank exceeds `FILE_BYTES` by much.

    Rank 0's answer serves all ranks, so it names their random states too.
    """
    numbers = {name: 1 for rank in range(_world_size()) for name in _random_names(rank)}
    number, size_bytes = 1, 0
    for name, tensor in tensors.items():
        if name in numbers:
            continue
        own_bytes = tensor.numel() * tensor.element_size() // _world_size()
        if size_bytes and size_bytes + own_bytes > FILE_BYTES:
            number, size_bytes = number + 1, 0
        numbers[name] = number
        size_bytes += own_bytes
    return numbers


def _random_names(rank: int) -> tuple[str, str]:
    return f"rank_{rank}.random_cpu", f"rank_{rank}.random_cuda"


def _random_states() -> Tensors:
    """This rank's generators, under names that are its own."""
    on_cpu, on_cuda = _random_names(dist.get_rank() if dist.is_initialized() else 0)
    states = {on_cpu: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[on_cuda] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        if name.endswith("random_cpu"):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _cause(error: CheckpointException) -> str:
    """The first line of the first rank's error."""
    rank = min(error.failures)
    cause, _ = error.failures[rank]
    return f"rank {rank}: {' '.join([type(cause).__name__, *str(cause).splitlines()[:1]])}"
