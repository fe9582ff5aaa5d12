"""Shows the pipeline's status while the main thread trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from async_grpo import cluster
from async_grpo.errors import AsyncGrpoError
from async_grpo.telemetry.console import Console

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
TIMEOUT_S = 30.0
JOIN_TIMEOUT_S = 5.0  # the thread is a daemon: a batcher that hangs holds up nobody's end


@contextmanager
def watch_pipeline(batcher: Any, console: Console) -> Iterator[None]:
    """Within, `console` is told the status of `batcher` every second."""
    stop = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(batcher, console, stop), name="watch-pipeline", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join(JOIN_TIMEOUT_S)


def _watch(batcher: Any, console: Console, stop: threading.Event) -> None:
    while not stop.wait(INTERVAL_S):
        try:
            status = cluster.wait(
                batcher.status.remote(), timeout_s=TIMEOUT_S, who="the experience batcher"
            )
        except AsyncGrpoError as error:
            logger.debug("no status to show: %s", error)  # whoever needs the batcher says why
            continue
        console.status(status)
