"""A nameless file in memory that other processes of this user can map while it is held."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from async_grpo.errors import WeightSyncError


class SharedFile:
    """Bytes for the engine's processes, in memory and outside the size limit of /dev/shm.

    The system frees it with its last user, so that not even SIGKILL leaves anything behind.
    """

    def __init__(self, size_bytes: int) -> None:
        self._descriptor = os.memfd_create("async-grpo-weights")
        self._used = 0
        os.truncate(self._descriptor, size_bytes)

    @property
    def path(self) -> str:
        """Where other processes of this machine open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def append(self, data: NDArray[np.uint8]) -> int:
        """Write `data` after what is there; returns its offset in bytes."""
        start, remaining = self._used, data.data.cast("B")
        while remaining:  # one call moves at most 2 GiB
            try:
                written = os.pwrite(self._descriptor, remaining, self._used)
            except OSError as error:
                raise WeightSyncError(
                    f"new weights need {data.nbytes} more bytes of memory, and the system refused "
                    f"({error.strerror}): free memory on the worker's machine"
                ) from error
            remaining = remaining[written:]
            self._used += written
        return start

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
