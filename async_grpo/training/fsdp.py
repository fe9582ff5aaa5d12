"""Sharding the policy over the trainer ranks, gathering whole parameters, stepping apart from them.

Types of gradients: without `mixed_precision` everything is float32, the model's type. With bf16, a
backward pass computes a minibatch's gradient in bf16 (the head's in float32, cast at its end); sums
over ranks and over minibatches are float32, whether each minibatch is reduced or whole gradients
wait on their rank.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
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

from async_grpo.devices.bill import GIB
from async_grpo.model.fused import compile_parts
from async_grpo.model.packed_linear import library
from async_grpo.model.policy import PolicyModel, trained_parameters
from async_grpo.model.served import Served, adapter_alone, served
from async_grpo.model.weight_files import local_part, own_rows

logger = logging.getLogger(__name__)
ALIGNED_BYTES = 64


def compute_dtype(mixed_precision: str, device: torch.device) -> torch.dtype:
    """The type of activations: bf16 on request, and with `auto` where the device supports it."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if mixed_precision == "bf16" or (mixed_precision == "auto" and has_bf16):
        return torch.bfloat16
    return torch.float32


def shard(
    policy: PolicyModel,
    mesh: DeviceMesh,
    *,
    mixed_precision: str = "no",
    keep_gathered: bool = False,
    offload: bool = False,
    activation_checkpointing: int = 0,
    compile: bool = False,
) -> PolicyModel:
    """Shard `policy` in place over a mesh: each layer and its experts, the rest with the root.

    Master weights keep their type (float32); gradients are *summed* over all ranks of the mesh, in
    float32. The mesh may have one rank, or one in its last dimension: then each rank holds all, and
    what FSDP gathers is a copy. Names of parameters do not change. `keep_gathered`: a layer's
    weights stay whole from its forward to its backward pass. `activation_checkpointing`: one layer
    in so many, 0: none. `offload`: shards and their
    gradients lie in the host's memory. `compile`: the layers, and what is computed of logits.
    """
    if activation_checkpointing:
        some = {"every_n_layers": activation_checkpointing} if activation_checkpointing > 1 else {}
        policy.model.gradient_checkpointing_enable({"use_reentrant": False}, **some)
    if compile:
        compile_parts(policy)
    precision = MixedPrecisionPolicy()
    dtype = compute_dtype(mixed_precision, torch.device(mesh.device_type))
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, object] = {
        "mesh": mesh,
        "mp_policy": precision,
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        ),
    }
    for layer in policy.layers:
        # peft changes the weights of experts before their forward, which must then be whole.
        apart = [] if policy.adapter and policy.adapter.target_parameters else _experts(layer)
        for part in (*apart, layer):
            fully_shard(part, reshard_after_forward=not keep_gathered, **options)
    # The root's arguments are a minibatch and head terms: teachers' payloads stay float32.
    fully_shard(policy, **(options | {"mp_policy": replace(precision, cast_forward_inputs=False)}))
    for module in _sharded_modules(policy):  # undo FSDP's averaging; gloo needs both calls
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return policy.train()


def _experts(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """The experts of a mixture's layer, most of its parameters: gathered apart from the others."""
    return [module for module in layer.modules() if type(module).__name__.endswith("Experts")]


def reshard(policy: PolicyModel) -> None:
    """Drop gathered parameters: after a forward without a backward pass the root still has them.

    The next forward gathers again; otherwise it would use weights from before a change of shards.
    """
    for module in _sharded_modules(policy):
        module.reshard()


@contextmanager
def deferred_gradients(policy: PolicyModel, *, defer: bool) -> Iterator[None]:
    """With `defer`, backward passes in the block add to whole, unreduced gradients of this rank.

    The next backward pass outside of the block reduces them with its own. Until then they take 4
    bytes for each parameter of the whole model.
    """
    if not defer or not isinstance(policy, FSDPModule):
        yield
        return
    # `set_is_last_backward` stays on: it only makes FSDP forget its order of prefetching, which
    # would otherwise lead from a minibatch's first layer to the last layer of the one before.
    policy.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        policy.set_requires_gradient_sync(True)


def drop_local_gradients(policy: PolicyModel) -> None:
    """Forget the unreduced gradients of this rank, which `zero_grad` does not reach."""
    for module in _sharded_modules(policy):
        state = module._get_fsdp_state()  # torch has no public access to its groups of parameters
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for parameter in (parameter for group in groups for parameter in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def iter_full_tensors(
    policy: PolicyModel, dtype: torch.dtype | None = None, *, of_adapter: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Gather whole parameters one at a time, in the model's order, under their checkpoint names.

    An adapter is merged into them, or comes alone, by the names of its file. Shards are then cast
    to `dtype`, where it is given. Collective: every rank must exhaust it. Rank 0 gets (name, CPU
    tensor), valid until the next optimizer step; the others get nothing.
    """
    is_receiver = not dist.is_initialized() or dist.get_rank() == 0
    reshard(policy)
    tensors = adapter_alone(policy) if of_adapter else served(policy)
    for name, full in iter_device_tensors(tensors, dtype):
        if is_receiver:
            yield name, full.cpu()


def iter_device_tensors(
    tensors: Mapping[str, Served],
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """As `iter_full_tensors`, but every rank gets the tensors, on the device of its shards.

    Shards are cast to `dtype` and moved to `device` before gathering, where these are given.
    Collective: every rank must exhaust it.
    """
    for name, each in tensors.items():
        full = each.make().to(device=device, dtype=dtype)
        yield name, full.full_tensor() if isinstance(full, DTensor) else full


def local_shards(policy: PolicyModel) -> list[Tensor]:
    """This rank's part of each trained parameter, flat, in the model's order, in its memory.

    Gathered parameters are dropped first, so that a change of the shards takes effect.
    """
    reshard(policy)
    return [local_part(each.detach()).reshape(-1) for _, each in trained_parameters(policy)]


def local_gradients(policy: PolicyModel) -> list[Tensor]:
    """This rank's part of the gradients reduced so far, flat; they share the gradients' memory."""
    held = (parameter.grad for _, parameter in trained_parameters(policy))
    return [local_part(grad).reshape(-1) for grad in held if grad is not None]


def _sharded_modules(policy: PolicyModel) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


class TwinAdamW(ABC):
    """AdamW that steps a twin of each parameter: its methods, and for parameters the same results.

    Between steps the parameters are the valid ones: a resume or an exchange of weights may write
    into them.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, make: Callable[..., Any] = AdamW, **options: Any
    ) -> None:
        """`make`: the optimizer of the twins, with these `options`."""
        groups = list(groups)
        self.twins = {p: self._twin_of(p).requires_grad_() for g in groups for p in g["params"]}
        self.adamw = make(
            [{**group, "params": [self.twins[p] for p in group["params"]]} for group in groups],
            **options,
        )
        self.param_groups = self.adamw.param_groups  # of twins
        self.state = self.adamw.state  # of twins

    @abstractmethod
    def _twin_of(self, parameter: Tensor) -> Tensor:
        """Make the twin of a parameter."""

    @abstractmethod
    def step(self) -> None:
        """Update the parameters, each of which must have a gradient."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients of the parameters; the next step sets those of the twins."""
        assert set_to_none
        for parameter in self.twins:
            parameter.grad = None


class DividedAdamW(TwinAdamW):
    """AdamW with its moments divided by rows among ranks that all hold every parameter (ZeRO-1).

    A twin is this rank's rows, in the parameter's own memory. Each step moves these, and gathers
    those of the other ranks, one parameter at a time (4 bytes a parameter).
    """

    def _twin_of(self, parameter: Tensor) -> Tensor:
        return own_rows(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, each of which must have a gradient; collective."""
        for parameter, twin in self.twins.items():
            assert parameter.grad is not None
            twin.grad = own_rows(parameter.grad)
        self.adamw.step()
        for parameter, twin in self.twins.items():
            twin.grad = None
            if isinstance(twin, DTensor) and twin is not parameter:
                local_part(parameter).copy_(twin.full_tensor())


class HostAdamW(TwinAdamW):
    """AdamW with its moments in the host's memory: 8 bytes a parameter less on the device.

    Each step copies gradients and masters to the host (8 bytes a parameter of this rank's shard),
    steps there, and copies masters back (4 bytes).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        groups = list(groups)
        own = [local_part(p.detach()) for group in groups for p in group["params"]]
        self._held = iter(host_memory([each for each in own for _ in range(2)]))
        super().__init__(groups, **options)

    def _twin_of(self, parameter: Tensor) -> Tensor:
        twin = as_shard(next(self._held), parameter)
        twin.grad = as_shard(next(self._held), parameter)
        return twin

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, each of which must have a gradient."""
        for parameter, twin in self.twins.items():
            assert parameter.grad is not None and twin.grad is not None
            local_part(twin).copy_(local_part(parameter))
            local_part(twin.grad).copy_(local_part(parameter.grad))
        self.adamw.step()
        for parameter, twin in self.twins.items():
            local_part(parameter).copy_(local_part(twin))


class LibraryAdamW(TwinAdamW):
    """bitsandbytes' AdamW: moments in 8 bits, of blocks of 256 numbers, in pages, or both.

    Its kernels take plain tensors: a twin is this rank's shard, in the parameter's own memory. What
    a block holds depends on how the parameters are sharded. Of few numbers moments stay float32.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, kind: str, fused: bool, **options: Any
    ) -> None:
        optim = library().optim
        make = {
            "adamw_8bit": optim.AdamW8bit, "paged_adamw": optim.PagedAdamW32bit,
            "paged_adamw_8bit": optim.PagedAdamW8bit,
        }[kind]  # fmt: skip
        super().__init__(groups, make=make, **options)

    def _twin_of(self, parameter: Tensor) -> Tensor:
        return local_part(parameter.detach())

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, each of which must have a gradient."""
        for parameter, twin in self.twins.items():
            assert parameter.grad is not None
            # With more ranks than rows some have none, for which there is no kernel.
            twin.grad = local_part(parameter.grad) if twin.numel() else None
        self.adamw.step()
        for twin in self.twins.values():
            twin.grad = None

    def begin(self, num_steps: int) -> None:
        """Make the states of the moments, as the first step would, after `num_steps`."""
        for number, group in enumerate(self.param_groups):
            for index, twin in enumerate(group["params"]):
                if twin.numel():
                    self.adamw.init_state(group, twin, number, index)
                    self.state[twin]["step"] = num_steps

    def moments(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """{name: this rank's tensor} of the states; of codes and of the scales of their blocks."""
        kept = ("state1", "state2", "absmax1", "absmax2")
        states = ((names[p], self.state[twin]) for p, twin in self.twins.items() if twin.numel())
        return {f"{key}.{n}": state[key] for n, state in states for key in kept if key in state}


def moments_of(optimizer: AdamW | TwinAdamW, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's state of a trained parameter, or of this rank's rows of it."""
    if isinstance(optimizer, TwinAdamW):
        return moments_of(optimizer.adamw, optimizer.twins[parameter])
    return optimizer.state[parameter]


def host_memory(like: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised tensors of the same shapes and types in the host's memory, in one block.

    The block is pinned where one of `like` is on a device. In pinned blocks of their own torch
    would round each to the next power of two.
    """
    sizes = [-(-each.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for each in like]
    block = np.empty(sum(sizes), np.uint8)
    if any(each.is_cuda for each in like) and len(block):
        _pin(block)
    starts = accumulate(sizes, initial=0)
    return [
        torch.frombuffer(block, dtype=each.dtype, count=each.numel(), offset=start).view(each.shape)
        if each.numel()
        else torch.empty(each.shape, dtype=each.dtype)
        for each, start in zip(like, starts, strict=False)
    ]


def _pin(block: NDArray[np.uint8]) -> None:
    """Pin it until its last view is gone; copies are only slower where that fails."""
    runtime, address = torch.cuda.cudart(), block.ctypes.data
    if int(runtime.cudaHostRegister(address, block.nbytes, 0)) == 0:
        finalize(block, runtime.cudaHostUnregister, address).atexit = False
        return
    with suppress(RuntimeError):  # CUDA tells the error once more, of whatever comes next
        torch.zeros(1, device="cuda")
    logger.warning("%.1f GiB of the host cannot be pinned: copies are slower", block.nbytes / GIB)


@functools.cache
def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh over hosts, for shards in their memory; the first call is collective."""
    if mesh.device_type == "cpu":
        return mesh
    return init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)


def as_shard(held: Tensor, tensor: Tensor) -> Tensor:
    """`held`, in the host's memory, as a tensor of the form of `tensor`: sharded if that is."""
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


class Parked:
    """Tensors in the host's memory, which free their device until they return.

    Their storages are emptied in place, so that whoever holds the tensors (FSDP its shards, an
    optimizer its moments) has them again without being told.
    """

    def __init__(self, tensors: Iterable[Tensor], *, into: Sequence[Tensor] = ()) -> None:
        """Take all `tensors`, which nobody may read meanwhile.

        `into`: the memory of an earlier one, which is used again if it is of the same sizes.
        """
        storages = {s.data_ptr(): s for s in (each.untyped_storage() for each in tensors)}
        own = [_bytes_of(storage) for storage in storages.values() if storage.nbytes()]
        is_same = [each.nbytes for each in into] == [each.nbytes for each in own]
        self.memory = into if is_same else host_memory(own)
        copies = zip(own, self.memory, strict=True)
        self._held = [(each.untyped_storage(), copied.copy_(each)) for each, copied in copies]
        for storage, _ in self._held:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Bring the tensors back, bit for bit."""
        for storage, copied in self._held:
            storage.resize_(copied.numel())
            _bytes_of(storage).copy_(copied)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
