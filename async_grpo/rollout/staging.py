"""The bytes of new weights on their way into an engine: whole, or what changed in those before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from async_grpo.rollout.shared_file import SharedFile
from async_grpo.types import WeightsBucket, WeightsDelta, WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync.buckets import check_bytes, parts
from async_grpo.weight_sync.delta import patch
from async_grpo.weight_sync.layout import ITEM_BYTES, laid_out_bytes


class Staging:
    """One engine's, which maps the file that is filled here.

    The file of weights that may be followed by what changes alone is kept: that costs a copy of the
    model in host memory.
    """

    def __init__(self) -> None:
        self._file: SharedFile | None = None
        self._holds: WeightsVersion | None = None  # all bytes of this version; None: of none

    def begin(self, snapshot: WeightsSnapshot) -> Sequence[WeightsBucket | WeightsDelta]:
        """What must be fetched for each bucket of a snapshot."""
        self._patches = self._holds is not None and snapshot.delta_since == self._holds
        self._holds = None
        if not self._patches:
            self.drop()
            self._file = SharedFile(laid_out_bytes(snapshot.tensors))
        self._snapshot = snapshot
        return [(self._patches and bucket.delta) or bucket for bucket in snapshot.buckets]

    @property
    def path(self) -> str:
        """Of the file, for the engine's processes."""
        assert self._file is not None, "staging has begun"
        return self._file.path

    def take(self, index: int, fetched: NDArray[np.uint8]) -> None:
        """Lay out what was fetched for a bucket.

        Raises `WeightSyncError` unless its bytes are then those that were sent.
        """
        assert self._file is not None, "staging has begun"
        bucket, data = self._snapshot.buckets[index], fetched
        if self._patches and bucket.delta is not None:
            data = np.empty(bucket.size_bytes, dtype=np.uint8)
            for piece, part in parts(bucket, data):
                self._file.read(part, piece.offset_bytes)
            patch(data, fetched, item_bytes=ITEM_BYTES[self._snapshot.tensors[0].dtype])
        check_bytes(data, size_bytes=bucket.size_bytes, checksum=bucket.checksum)
        for piece, part in parts(bucket, data):
            self._file.write(part, piece.offset_bytes)

    def end(self) -> None:
        """The engine has loaded all of it."""
        if self._snapshot.is_base:
            self._holds = self._snapshot.unchanged_since or self._snapshot.version
        else:
            self.drop()

    def drop(self) -> None:
        """Let go of the file, such as one of which only a part is new."""
        if self._file is not None:
            self._file.close()
        self._file, self._holds = None, None
