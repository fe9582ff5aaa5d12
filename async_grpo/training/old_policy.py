"""The policy as it was at the start of the batch, for the mode `decoupled` with several steps.

Its log-probabilities are those of the ratio's denominator. One more copy of this rank's shard is
kept, so that samples still stream: no step waits for the whole batch to be scored beforehand.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import reshard
from async_grpo.types import PackedMinibatch


class BatchStart:
    """Scores minibatches with the weights that the current batch started from."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._weights: list[Tensor] = []
        self._has_moved = False

    def begin_batch(self) -> None:
        """The policy of this moment is the one that later steps are compared with."""
        self._has_moved = False

    def before_update(self) -> None:
        """The policy is about to move: keep what it was, unless the batch has moved it already."""
        if self._has_moved:
            return
        reshard(self._policy)
        shards = _local_shards(self._policy)
        if not self._weights:
            self._weights = [torch.empty_like(shard) for shard in shards]
        torch._foreach_copy_(self._weights, shards)
        self._has_moved = True

    @torch.no_grad()
    def logprobs(
        self, packed: PackedMinibatch, *, temperature: float, chunk_size: int
    ) -> Tensor | None:
        """[N] under the batch's first weights; None while the policy still has them.

        Collective like every forward: all ranks have moved, or none.
        """
        if not self._has_moved:
            return None
        self._exchange()
        try:
            scored = self._policy(packed, temperature=temperature, chunk_size=chunk_size)
        finally:
            self._exchange()
        return scored.logprobs.clone()

    def _exchange(self) -> None:
        """The kept weights are the policy's, and the other way round."""
        # In place, because FSDP gathers from these very tensors; what it has gathered of the
        # other weights must not serve these.
        reshard(self._policy)
        for shard, kept in zip(_local_shards(self._policy), self._weights, strict=True):
            current = shard.clone()
            shard.copy_(kept)
            kept.copy_(current)


def _local_shards(policy: PolicyModel) -> list[Tensor]:
    """This rank's part of every trained parameter."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return [
        parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
        for parameter in parameters
    ]
