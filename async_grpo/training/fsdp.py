"""Sharding the policy over the trainer ranks, and getting whole parameters back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from async_grpo.model.policy import PolicyModel, hf_named_parameters


def compute_dtype(mixed_precision: str, device: torch.device) -> torch.dtype:
    """The type of activations: bf16 on request, and by itself where the device likes it."""
    likes_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if mixed_precision == "bf16" or (mixed_precision == "auto" and likes_bf16):
        return torch.bfloat16
    return torch.float32


def shard(
    policy: PolicyModel,
    mesh: DeviceMesh,
    *,
    mixed_precision: str = "no",
    activation_checkpointing: bool = False,
    compile: bool = False,
) -> PolicyModel:
    """Shard `policy` in place over a 1-D mesh: each decoder layer, then the rest with the root.

    Master weights keep their type (float32); gradients are *summed* over ranks, in float32. Works
    on one rank as on many. Names of parameters do not change.
    """
    if activation_checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = _precision(mixed_precision, torch.device(mesh.device_type))
    for layer in policy.layers:
        if compile:
            layer.compile(dynamic=True)  # every packed row has another length
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    _reduce_by_sum(policy)
    return policy.train()


def iter_full_tensors(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Gather whole parameters one at a time, in the model's order, under their checkpoint names.

    Collective: every rank must exhaust it. Rank 0 receives (name, CPU tensor), valid until the next
    optimizer step; the others receive nothing.
    """
    for module in _sharded_modules(policy):
        module.reshard()  # after a forward without backward the root is still whole, and cast
    is_receiver = not dist.is_initialized() or dist.get_rank() == 0
    for name, parameter in hf_named_parameters(policy):
        full = parameter.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        if is_receiver:
            yield name, full.cpu()


def _precision(mixed_precision: str, device: torch.device) -> MixedPrecisionPolicy:
    dtype = compute_dtype(mixed_precision, device)
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _reduce_by_sum(policy: PolicyModel) -> None:
    """Undo FSDP's averaging, here and nowhere else; gloo needs both calls."""
    for module in _sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _sharded_modules(policy: PolicyModel) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]
