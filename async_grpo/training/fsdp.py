"""Sharding the policy over the trainer ranks, getting whole parameters back, stepping on the host.

Where gradients have which type: with `mixed_precision` off everything is the model's own float32.
With bf16, one backward pass makes a minibatch's gradient in bf16 (the head's in float32, cast at
its end); from there on, summing over ranks and over minibatches is in float32, whether each
minibatch is reduced or whole gradients wait on their rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from async_grpo.model.policy import PolicyModel, hf_named_parameters

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


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
    keep_gathered: bool = False,
    offload: bool = False,
    activation_checkpointing: bool = False,
    compile: bool = False,
) -> PolicyModel:
    """Shard `policy` in place over a mesh: each decoder layer, then the rest with the root.

    Master weights keep their type (float32); gradients are *summed* over all ranks of the mesh, in
    float32. Works on one rank as on many. Names of parameters do not change. `keep_gathered`: a
    layer's weights stay whole from its forward to its backward pass. `offload`: shards and their
    gradients lie in the host's memory. `compile`: the layers, and what becomes of logits.
    """
    if activation_checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.compile_logprobs = compile
    options: dict[str, object] = {
        "mesh": mesh,
        "mp_policy": (precision := _precision(mixed_precision, torch.device(mesh.device_type))),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        ),
    }
    for layer in policy.layers:
        if compile:
            layer.compile(dynamic=True)  # every packed row has another length
        fully_shard(layer, reshard_after_forward=not keep_gathered, **options)
    # The root's arguments are a minibatch and head terms: what teachers said stays float32.
    fully_shard(policy, **(options | {"mp_policy": replace(precision, cast_forward_inputs=False)}))
    _reduce_by_sum(policy)
    return policy.train()


def reshard(policy: PolicyModel) -> None:
    """Drop gathered parameters: after a forward without backward the root is still whole, and cast.

    Without this a change of the shards would not be seen.
    """
    for module in _sharded_modules(policy):
        module.reshard()


@contextmanager
def deferred_gradients(policy: PolicyModel, *, defer: bool) -> Iterator[None]:
    """With `defer`, backward passes in this block add to whole, unreduced gradients of this rank.

    The next backward pass outside of it reduces them together with its own. In between they cost
    4 bytes a parameter of the whole model.
    """
    if not defer or not isinstance(policy, FSDPModule):
        yield
        return
    # `set_is_last_backward` stays on: it only lets FSDP forget its order of prefetching, which
    # would otherwise lead from one minibatch's first layer into the previous one's last.
    policy.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        policy.set_requires_gradient_sync(True)


def drop_local_gradients(policy: PolicyModel) -> None:
    """Forget the unreduced gradients of this rank, which `zero_grad` does not reach."""
    for module in _sharded_modules(policy):
        for group in _parameter_groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def iter_full_tensors(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Gather whole parameters one at a time, in the model's order, under their checkpoint names.

    Collective: every rank must exhaust it. Rank 0 receives (name, CPU tensor), valid until the next
    optimizer step; the others receive nothing.
    """
    is_receiver = not dist.is_initialized() or dist.get_rank() == 0
    for name, full in iter_device_tensors(policy):
        if is_receiver:
            yield name, full.cpu()


def iter_device_tensors(
    policy: PolicyModel,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """As `iter_full_tensors`, for every rank, each where its shards lie.

    Cast to `dtype`, and moved to `device` where offloaded shards wait in host memory, before
    gathering. Collective: every rank must exhaust it.
    """
    reshard(policy)
    for name, parameter in hf_named_parameters(policy):
        held = parameter.detach()
        full = held.to(device=device or held.device, dtype=dtype or held.dtype)
        yield name, full.full_tensor() if isinstance(full, DTensor) else full


def local_shards(policy: PolicyModel) -> list[Tensor]:
    """This rank's rows of each parameter, flat, in the model's order; they share its memory."""
    reshard(policy)
    held = (parameter.detach() for _, parameter in hf_named_parameters(policy))
    return [_local(parameter).reshape(-1) for parameter in held]


def local_gradients(policy: PolicyModel) -> list[Tensor]:
    """This rank's part of the gradients that have been reduced so far, flat; in their memory."""
    held = (parameter.grad for _, parameter in hf_named_parameters(policy))
    return [_local(grad).reshape(-1) for grad in held if grad is not None]


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


def _parameter_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """What FSDP2 keeps of a module's parameters; there is no public way to it."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11


def _sharded_modules(policy: PolicyModel) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


class HostAdamW:
    """AdamW with its moments in the host's memory: 8 bytes a parameter less on the device.

    It stands in the place of an `AdamW` over the same groups of parameters, with the same results.
    Each step copies gradients and masters to the host, 8 bytes a parameter of this rank's shard,
    steps there, and copies masters back, 4 bytes. The masters of the device are the ones that
    count: what a resume or an exchange of weights writes into them is seen.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        groups = list(groups)
        self.twins = {p: _on_host(p) for group in groups for p in group["params"]}
        for parameter, twin in self.twins.items():
            twin.requires_grad_().grad = _on_host(parameter)
        self._adamw = AdamW(
            [{**group, "params": [self.twins[p] for p in group["params"]]} for group in groups],
            **options,
        )
        self.param_groups = self._adamw.param_groups  # of twins
        self.state = self._adamw.state  # of twins

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters by their gradients, all of which must be there."""
        for parameter, twin in self.twins.items():
            assert parameter.grad is not None and twin.grad is not None
            _local(twin).copy_(_local(parameter))
            _local(twin.grad).copy_(_local(parameter.grad))
        self._adamw.step()
        for parameter, twin in self.twins.items():
            _local(parameter).copy_(_local(twin))

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients of the device; those here are written over."""
        assert set_to_none
        for parameter in self.twins:
            parameter.grad = None


def moments_of(optimizer: AdamW | HostAdamW, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a trained parameter, wherever it lies."""
    twin = optimizer.twins[parameter] if isinstance(optimizer, HostAdamW) else parameter
    return optimizer.state[twin]


def _on_host(tensor: Tensor) -> Tensor:
    """Room in this host's memory for a tensor, or for this rank's shard of one."""
    local = _local(tensor.detach())
    held = torch.zeros(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
    return as_shard(held, tensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
