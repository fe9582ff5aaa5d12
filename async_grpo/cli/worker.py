"""`worker_dispatcher.py`: starts workers on this node, keeps them, and takes them down with it.

The first dispatcher also makes what all workers of a role share: the role's registry and, for
generation, the verifier pool. Those outlive it as long as somebody uses them.
"""

from __future__ import annotations

import logging
import signal
import threading
import uuid
from typing import Any

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, options_of
from async_grpo.config.worker import WorkerConfig

logger = logging.getLogger(__name__)
WATCH_INTERVAL_S = 1.0
PING_TIMEOUT_S = 120.0


@click.command(context_settings=CONTEXT)
@options_of(WorkerConfig)
@command_boundary()
def main(**options: Any) -> None:
    """Start workers on this node and serve until Ctrl-C or the end of the Ray cluster."""
    config = WorkerConfig(**options)
    logging.basicConfig(level=config.logging_level, format="%(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    serve(config, stop)


def serve(config: WorkerConfig, stop: threading.Event) -> None:
    """Start the workers, register them, and watch them until `stop` is set."""
    from async_grpo import cluster
    from async_grpo.cli import launch
    from async_grpo.model.loading import check_model_folder

    check_model_folder(config.model_path)
    cluster.connect(config.ray_address, namespace=config.namespace)
    registry = launch.make_registry(config.mode)
    if config.mode == "generation":
        launch.make_verifier_pool(config)
    workers = {name: launch.start_worker(config, name) for name in _worker_names(config)}
    try:
        for name, handle in workers.items():
            launch.register(registry, name, handle, timeout_s=config.start_timeout_s, stop=stop)
            if not stop.is_set():
                click.echo(f"worker {name} registered")
        watch(registry, workers, stop)
    finally:
        launch.release(registry, workers)


def watch(registry: Any, workers: dict[str, Any], stop: threading.Event) -> None:
    """Return when `stop` is set or the cluster ends; raise when a worker is lost."""
    from async_grpo import cluster

    while not stop.wait(WATCH_INTERVAL_S):
        for name, handle in workers.items():
            cluster.wait(handle.ping.remote(), timeout_s=PING_TIMEOUT_S, who=f"worker {name}")
        # Asking keeps a registry without members alive, and finds one that was restarted empty.
        cluster.wait(registry.members.remote(), timeout_s=PING_TIMEOUT_S, who="the registry")


def _worker_names(config: WorkerConfig) -> list[str]:
    return [f"{config.mode}-{uuid.uuid4().hex[:8]}" for _ in range(config.num_workers)]
