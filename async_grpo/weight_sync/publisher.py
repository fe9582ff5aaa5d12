"""Sends the policy's weights, from trainer rank 0 through Ray's object store to every worker.

The ranks gather full tensors one by one; rank 0 packs them into buckets and gives the controller a
snapshot that any worker can fetch, at once or when it joins later. Ranks stand still while they
gather, not while workers load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import ray
import torch

from async_grpo import cluster, deadlines
from async_grpo.errors import WeightSyncError
from async_grpo.types import PublishReport, WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync.buckets import BUCKET_BYTES, NamedTensors, pack_buckets

if TYPE_CHECKING:
    from async_grpo.controller.client import RunClient

Roles = tuple[str, ...]


class Publisher:
    """Lives in trainer rank 0, which owns the bytes until newer ones are served."""

    def __init__(
        self, *, dtype: torch.dtype = torch.float32, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._served: dict[str, WeightsSnapshot] = {}  # kept alive for workers that join later

    def collect(self, named_tensors: NamedTensors, *, version: WeightsVersion) -> WeightsSnapshot:
        """Put the weights into the object store, under their checkpoint names.

        The iterator is always used up, also after an error: each of its steps may be a collective
        operation that the other ranks run too.

        Raises:
            WeightSyncError: a parameter is not finite; nothing is published.
        """
        try:
            checked = _checked(named_tensors, dtype=self._dtype, version=version)
            buckets = tuple(pack_buckets(checked, put=ray.put, bucket_bytes=self._bucket_bytes))
        finally:
            join_gather(named_tensors)
        return WeightsSnapshot(version, buckets)

    def announce(
        self, client: RunClient, snapshot: WeightsSnapshot, *, roles: Roles, timeout_s: float
    ) -> dict[str, PublishReport]:
        """See `Transport.announce`."""
        reports: dict[str, PublishReport] = cluster.wait(
            client.publish(snapshot, roles, timeout_s),
            timeout_s=timeout_s + deadlines.PUBLISH_SLACK_S,
            who="the controller",
        )
        self._served |= dict.fromkeys(roles, snapshot)
        return reports


def join_gather(named_tensors: NamedTensors) -> None:
    """Ranks other than 0 call it while rank 0 publishes: they gather each tensor and drop it."""
    for _ in named_tensors:
        pass


def _checked(
    named_tensors: NamedTensors, *, dtype: torch.dtype, version: WeightsVersion
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named_tensors:
        sent = tensor.detach().to(dtype)
        if not _is_finite(sent):
            raise WeightSyncError(
                f"weights must be finite to be published, {name!r} of version {version} is not: "
                "training has diverged, lower --learning-rate or --max-grad-norm"
            )
        yield name, sent


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every number of it is; one pass, where `isfinite` makes several of its own.

    >>> nan = float("nan")
    >>> [_is_finite(torch.tensor(values)) for values in ([1.0], [], [1.0, nan], [-math.inf, 1.0])]
    [True, True, False, False]
    """
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # not a number as soon as one element is not
    return math.isfinite(low) and math.isfinite(high)
