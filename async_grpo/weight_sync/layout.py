"""How weights are laid out as one run of bytes, and which bytes of it lie in which bucket. Pure.

All parameters lie end to end, each at an offset that `lay_out` gives it. A bucket holds pieces of
that run. The trainer's ranks hold each parameter by rows, `ceil(rows / ranks)` each, the last ones
fewer or none. A bucket takes the same share of every rank's rows, so that in a round of as many
buckets as there are ranks every rank sends and receives as much as any other:

    rows of p   0 1 2 | 3 4 5 | 6 7     three ranks hold 3, 3 and 2
    bucket 0    0       3       6       and each sends its own part of each bucket to its owner:
    bucket 1      1       4       7     rank 0, 1, 2, 0, ...
    bucket 2        2       5
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from async_grpo.types import Piece, TensorMeta, WeightsBucket
from async_grpo.util.errors import WeightSyncError

ALIGNMENT_BYTES = 64  # every tensor can be viewed in place as any dtype
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def tensor_bytes(meta: TensorMeta) -> int:
    """Bytes of one parameter; raises `WeightSyncError` for a dtype that is not published.

    >>> tensor_bytes(TensorMeta("w", "bfloat16", (3, 5), 0))
    30
    """
    if meta.dtype not in ITEM_BYTES:
        raise WeightSyncError(
            f"a tensor's dtype must be one of {', '.join(ITEM_BYTES)}, got {meta.dtype!r}"
        )
    return math.prod(meta.shape) * ITEM_BYTES[meta.dtype]


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Iterator[TensorMeta]:
    """Give each (name, dtype, shape) its place.

    >>> [meta.offset_bytes for meta in lay_out([("a", "float32", (3,)), ("b", "float32", (20,))])]
    [0, 64]
    """
    end = 0
    for name, dtype, shape in tensors:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        meta = TensorMeta(name, dtype, tuple(shape), start)
        end = start + tensor_bytes(meta)
        yield meta


def laid_out_bytes(tensors: tuple[TensorMeta, ...]) -> int:
    """The length of the run in which they lie."""
    return max((meta.offset_bytes + tensor_bytes(meta) for meta in tensors), default=0)


def owner_of(tensors: tuple[TensorMeta, ...], offset_bytes: int) -> int:
    """The index of the parameter in which a byte lies; parameters are in the order of offsets."""
    return bisect.bisect_right(tensors, offset_bytes, key=lambda meta: meta.offset_bytes) - 1


def check_whole(tensors: tuple[TensorMeta, ...], buckets: Iterable[WeightsBucket]) -> None:
    """Raise `WeightSyncError` unless buckets hold every byte of every parameter once."""
    end, sent = 0, [0] * len(tensors)
    for offset, size in sorted(piece for bucket in buckets for piece in bucket.pieces):
        index = owner_of(tensors, offset)
        if index < 0 or offset + size > tensors[index].offset_bytes + tensor_bytes(tensors[index]):
            raise WeightSyncError(f"bytes of weights must lie within a parameter, got {offset}")
        if offset < end:
            raise WeightSyncError(f"bytes of {tensors[index].name!r} must be sent once, got twice")
        end = offset + size
        sent[index] += size
    missing = [m.name for m, size in zip(tensors, sent, strict=True) if size != tensor_bytes(m)]
    if missing:
        raise WeightSyncError(
            f"weights must be sent whole, of {len(tensors)} parameters {len(missing)} are missing "
            f"or incomplete, the first is {missing[0]!r}: publish the weights again"
        )


class Slice(NamedTuple):
    """Elements [start, stop) of what one rank holds of one parameter."""

    parameter: int  # its index
    start: int
    stop: int


@dataclass(frozen=True)
class GatherPlan:
    """What each rank sends to the owner of each bucket; the same on all ranks."""

    tensors: tuple[TensorMeta, ...]  # all of one dtype
    num_ranks: int
    bucket_bytes: int  # at most so many

    def owner(self, bucket: int) -> int:
        """The rank that stores it."""
        return bucket % self.num_ranks

    @property
    def num_buckets(self) -> int:
        return self.num_rounds * self.num_ranks

    @cached_property
    def num_rounds(self) -> int:
        return -(-self._ends[-1] * self.num_ranks * self.item_bytes // self._round_bytes)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.tensors[0].dtype] if self.tensors else 1

    @property
    def size_bytes(self) -> int:
        """Of all buckets."""
        return sum(map(tensor_bytes, self.tensors))

    @property
    def most_elements(self) -> int:
        """At most so many are in a bucket, and leave a rank in a round."""
        return self._width * self.num_ranks

    def slices(self, bucket: int, rank: int) -> Iterator[Slice]:
        """What `rank` holds of a bucket, in the order in which it lies there."""
        low, high = bucket * self._width, (bucket + 1) * self._width
        first = bisect.bisect_right(self._ends, low) - 1
        for index in range(max(first, 0), len(self.tensors)):
            begin = self._ends[index]
            if begin >= high:
                return
            held = self.num_held(index, rank)
            start, stop = max(low - begin, 0), min(high - begin, held)
            if start < stop:
                yield Slice(index, start, stop)

    def num_elements(self, bucket: int, rank: int) -> int:
        return sum(stop - start for _, start, stop in self.slices(bucket, rank))

    def pieces(self, bucket: int) -> tuple[Piece, ...]:
        """A bucket's content: what the ranks hold of it, one after the other."""
        return tuple(
            Piece(
                self.tensors[index].offset_bytes
                + (rank * self._chunks[index] + start) * self.item_bytes,
                (stop - start) * self.item_bytes,
            )
            for rank in range(self.num_ranks)
            for index, start, stop in self.slices(bucket, rank)
        )

    def num_held(self, index: int, rank: int) -> int:
        """Elements of a parameter on a rank, as FSDP2 shards it.

        >>> plan = GatherPlan((TensorMeta("w", "float32", (5, 2), 0),), 3, 1 << 20)
        >>> [plan.num_held(0, rank) for rank in range(3)]
        [4, 4, 2]
        """
        chunk, total = self._chunks[index], math.prod(self.tensors[index].shape)
        return min((rank + 1) * chunk, total) - min(rank * chunk, total)

    @cached_property
    def _chunks(self) -> list[int]:
        """Elements of each parameter on the rank that holds most of it."""
        rows = [meta.shape[0] if meta.shape else 1 for meta in self.tensors]
        return [
            -(-n // self.num_ranks) * math.prod(meta.shape[1:])
            for n, meta in zip(rows, self.tensors, strict=True)
        ]

    @cached_property
    def _ends(self) -> list[int]:
        """Where parameter i begins among all that a rank holds, were none of its rows missing."""
        ends = [0]
        for chunk in self._chunks:
            ends.append(ends[-1] + chunk)
        return ends

    @property
    def _round_bytes(self) -> int:
        return max(self.bucket_bytes, self.num_ranks * self.item_bytes) * self.num_ranks

    @cached_property
    def _width(self) -> int:
        """Elements that each rank has for a bucket: all buckets are of one size, or nearly."""
        return max(-(-self._ends[-1] // max(self.num_buckets, 1)), 1)
