"""Weights as runs of bytes: whole parameters packed end to end, with a manifest and a checksum.

The trainer packs, workers unpack; neither needs Ray or vLLM for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from async_grpo.errors import WeightSyncError
from async_grpo.types import TensorMeta, WeightsBucket

ALIGNMENT_BYTES = 64  # every tensor can be viewed in place as any dtype
BUCKET_BYTES = 256 << 20

NamedTensors = Iterator[tuple[str, torch.Tensor]]
PackedBucket = tuple[tuple[TensorMeta, ...], NDArray[np.uint8], int]


def pack_buckets(
    named_tensors: NamedTensors,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    buffer: NDArray[np.uint8] | None = None,
) -> Iterator[PackedBucket]:
    """Lay tensors into buckets of at most `bucket_bytes`; yields (manifest, bytes, checksum).

    A tensor larger than a bucket gets one of its own size. Tensors are copied when taken, so the
    iterator may free or reuse them. `buffer`: memory of `bucket_bytes` for every bucket in turn,
    whose bytes are then valid until the next one is asked for; new memory is slower to write.
    """
    writer = _BucketWriter(bucket_bytes, buffer)
    for name, tensor in named_tensors:
        if not writer.has_room(tensor.nbytes):
            yield writer.close()
            writer = _BucketWriter(bucket_bytes, buffer)
        writer.add(name, tensor.detach())
    if writer.tensors:
        yield writer.close()


class _BucketWriter:
    """One bucket being filled; memory is taken lazily by the system as it is written."""

    def __init__(self, bucket_bytes: int, buffer: NDArray[np.uint8] | None) -> None:
        self.bucket_bytes = bucket_bytes
        self.tensors: list[TensorMeta] = []
        self._buffer = buffer
        self._data = np.zeros(0, dtype=np.uint8)
        self._used = 0

    def has_room(self, size_bytes: int) -> bool:
        return not self.tensors or _aligned(self._used) + size_bytes <= self.bucket_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        start = _aligned(self._used)
        if not self.tensors:
            self._data = self._memory(max(self.bucket_bytes, tensor.nbytes))
        self._data[self._used : start] = 0  # gaps between tensors are part of the checksum
        meta = TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), start)
        self._used = start + tensor.nbytes
        view_tensor(self._data, meta).copy_(tensor)
        self.tensors.append(meta)

    def _memory(self, size_bytes: int) -> NDArray[np.uint8]:
        if self._buffer is not None and self._buffer.nbytes >= size_bytes:
            return self._buffer
        return np.empty(size_bytes, dtype=np.uint8)

    def close(self) -> PackedBucket:
        data = self._data[: self._used]
        return tuple(self.tensors), data, checksum_of(data)


def unpack_bucket(
    bucket: WeightsBucket, data: NDArray[np.uint8]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, each a copy of its own, after checking all of its bytes.

    Raises:
        WeightSyncError: the bytes are not those that were sent.
    """
    check_bytes(data, size_bytes=bucket.size_bytes, checksum=bucket.checksum)
    for meta in bucket.tensors:
        end = meta.offset_bytes + tensor_bytes(meta)
        own = np.array(data[meta.offset_bytes : end])  # Ray's arrays are read-only
        yield meta.name, view_tensor(own, meta._replace(offset_bytes=0))


def view_tensor(data: NDArray[np.uint8], meta: TensorMeta) -> torch.Tensor:
    """The tensor that `meta` describes, sharing the memory of `data`."""
    dtype, size_bytes = torch_dtype(meta.dtype), tensor_bytes(meta)
    if size_bytes == 0:  # torch cannot view nothing as another dtype
        return torch.empty(meta.shape, dtype=dtype)
    flat = torch.from_numpy(data[meta.offset_bytes : meta.offset_bytes + size_bytes])
    return flat.view(dtype).reshape(meta.shape)


def check_bytes(data: NDArray[np.uint8], *, size_bytes: int, checksum: int) -> None:
    """Raise `WeightSyncError` unless the bytes have the announced length and checksum."""
    if data.nbytes != size_bytes:
        raise WeightSyncError(
            f"a bucket of weights must hold {size_bytes} bytes, got {data.nbytes}: "
            "publish the weights again"
        )
    if (found := checksum_of(data)) != checksum:
        raise WeightSyncError(
            f"a bucket of weights must have the checksum {checksum:016x} of its sender, "
            f"got {found:016x}: its bytes were damaged on the way, publish the weights again"
        )


def checksum_of(data: NDArray[np.uint8]) -> int:
    """xxh3_64 of the bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def tensor_bytes(meta: TensorMeta) -> int:
    """Bytes of one parameter.

    >>> tensor_bytes(TensorMeta("w", "bfloat16", (3, 5), 0))
    30
    """
    return int(np.prod(meta.shape, dtype=np.int64)) * torch_dtype(meta.dtype).itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; raises `WeightSyncError` for a name that torch lacks."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"a tensor's dtype must be one of torch's, got {name!r}")
    return dtype


def _aligned(offset_bytes: int) -> int:
    """
    >>> _aligned(0), _aligned(1), _aligned(64)
    (0, 64, 64)
    """
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
