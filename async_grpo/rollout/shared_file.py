"""A nameless file in memory that other processes of this user can map while it is held."""

from __future__ import annotations

import os
import threading

import numpy as np
from numpy.typing import NDArray

from async_grpo.util.errors import WeightSyncError


class SharedFile:
    """Bytes for the engine's processes, in memory and outside the size limit of /dev/shm.

    The system frees it with its last user, so that not even SIGKILL leaves anything behind.
    """

    def __init__(self, size_bytes: int) -> None:
        self._descriptor = os.memfd_create("async-grpo-weights")
        # A thread may still write when its caller has been cancelled: never into another file.
        self._lock = threading.Lock()
        os.truncate(self._descriptor, size_bytes)

    @property
    def path(self) -> str:
        """Where other processes of this machine open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self, into: NDArray[np.uint8], offset_bytes: int) -> None:
        """Fill `into` with what lies at an offset."""
        at, remaining = offset_bytes, into.data.cast("B")
        while remaining:
            with self._lock:
                count = os.preadv(self._descriptor, [remaining], at)
            if not count:  # beyond its end
                return
            remaining = remaining[count:]
            at += count

    def write(self, data: NDArray[np.uint8], offset_bytes: int) -> None:
        """Put `data` at an offset."""
        at, remaining = offset_bytes, data.data.cast("B")
        while remaining:  # one call moves at most 2 GiB
            try:
                with self._lock:
                    written = os.pwrite(self._descriptor, remaining, at)
            except OSError as error:
                raise WeightSyncError(
                    f"new weights need {data.nbytes} more bytes of memory, and the system refused "
                    f"({error.strerror}): free memory on the worker's machine"
                ) from error
            remaining = remaining[written:]
            at += written

    def close(self) -> None:
        """Let go of it; who has mapped it keeps it."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
