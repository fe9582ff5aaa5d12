"""AdamW with its moments in the host's memory: 8 bytes a parameter less on the device.

Each step copies gradients and masters to the host, 8 bytes a parameter of this rank's shard, steps
there, and copies masters back, 4 bytes. The masters of the device are the ones that count: what a
resume or an exchange of weights writes into them is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from async_grpo.training.mesh import as_shard


class HostAdamW:
    """In the place of an `AdamW` over the same groups of parameters, with the same results."""

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
