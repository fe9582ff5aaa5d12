"""Sends snapshots of weights from trainer rank 0, through Ray's object store, to every worker.

Rank 0 gives the controller a snapshot that any worker can fetch, at once or when it joins later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from async_grpo.cluster import cluster
from async_grpo.types import PublishReport, WeightsSnapshot, WeightsVersion
from async_grpo.util import deadlines
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.buckets import BUCKET_BYTES, NamedTensors, pack
from async_grpo.weight_sync.collector import not_finite
from async_grpo.weight_sync.gather import is_finite

if TYPE_CHECKING:
    from async_grpo.controller.client import RunClient

Roles = tuple[str, ...]


class Publisher:
    """Lives in trainer rank 0, and keeps what it has announced until newer weights are served."""

    def __init__(
        self, *, dtype: torch.dtype = torch.float32, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._served: dict[str, WeightsSnapshot] = {}  # kept alive for workers that join later

    def pack(self, named_tensors: NamedTensors, *, version: WeightsVersion) -> WeightsSnapshot:
        """Put whole tensors that this process has into the object store.

        Raises:
            WeightSyncError: a parameter is not finite; nothing is published.
        """
        checked = _checked(named_tensors, dtype=self._dtype, version=version)
        return pack(
            checked, put=cluster.put_bytes, version=version, bucket_bytes=self._bucket_bytes
        )

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


def _checked(
    named_tensors: NamedTensors, *, dtype: torch.dtype, version: WeightsVersion
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named_tensors:
        sent = tensor.detach().to(dtype)
        if not is_finite(sent):
            raise WeightSyncError(not_finite(name, version))
        yield name, sent
