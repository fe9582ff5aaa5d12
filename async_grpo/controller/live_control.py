"""Whom a request of `async-grpo control` is for."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from async_grpo.types import RunStatus
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.batching.batcher import ExperienceBatcher
    from async_grpo.controller.registry import WorkerRegistry


def check_folder(folder: str, own: str | None) -> None:
    """Raise `ConfigError` unless `own`, the folder of the run that trains here, is meant."""
    if own is None:
        raise ConfigError(
            f"the run in {folder} must be training, this controller serves none: it has ended, or "
            "not begun to train"
        )
    if os.path.realpath(folder) != os.path.realpath(own):
        raise ConfigError(
            f"the run must be the one that trains here, in {own}, got {folder}: it has ended, or "
            "is one of another Ray cluster or namespace"
        )


def registry_with(worker_id: str, registries: Collection[WorkerRegistry]) -> WorkerRegistry:
    """Where a worker is registered; raises `ConfigError` when it is nowhere."""
    for registry in registries:
        if any(member.info.worker_id == worker_id for member in registry.members):
            return registry
    known = [member.info.worker_id for registry in registries for member in registry.members]
    raise ConfigError(
        f"the worker must be one of {', '.join(known) or 'those that have registered'}, got "
        f"{worker_id!r}: async-grpo control RUN show lists them"
    )


def run_status(batcher: ExperienceBatcher, registries: Collection[WorkerRegistry]) -> RunStatus:
    """What may be asked of a run, and of whom."""
    controls = batcher.controls
    draining = {name for registry in registries for name in registry.draining}
    members = [member.info for registry in registries for member in registry.members]
    return RunStatus(
        batcher.status().batch,
        controls.num_batches,
        controls.options,
        controls.waiting,
        {info.worker_id: (info.role, info.worker_id in draining) for info in members},
    )
