"""Weights as runs of bytes: whole parameters packed end to end, with a manifest and a checksum.

The trainer packs, workers unpack; neither needs Ray or vLLM for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from async_grpo.errors import WeightSyncError
from async_grpo.types import TensorMeta, WeightsBucket

ALIGNMENT_BYTES = 64  # every tensor can be viewed in place as any dtype
BUCKET_BYTES = 256 << 20

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def pack_buckets(
    named_tensors: NamedTensors,
    *,
    put: Callable[[NDArray[np.uint8]], Any],
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[WeightsBucket]:
    """Lay tensors into buckets of at most `bucket_bytes`, whose bytes are what `put` has returned.

    A tensor larger than a bucket gets one of its own size. Tensors are copied when taken, so the
    iterator may free or reuse them. All buckets are laid into the same memory, since new memory is
    slower to write: `put` takes a copy.
    """
    buffer, used = np.empty(bucket_bytes, dtype=np.uint8), 0
    metas: list[TensorMeta] = []

    def bucket() -> WeightsBucket:
        data = buffer[:used]
        return WeightsBucket(tuple(metas), put(data), data.nbytes, checksum_of(data))

    for name, tensor in named_tensors:
        start = _aligned(used)
        if metas and start + tensor.nbytes > bucket_bytes:
            yield bucket()
            metas, used, start = [], 0, 0
        if tensor.nbytes > buffer.nbytes:  # then it is the first of its bucket
            buffer = np.empty(tensor.nbytes, dtype=np.uint8)
        buffer[used:start] = 0  # gaps between tensors are part of the checksum
        meta = TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), start)
        view_tensor(buffer, meta).copy_(tensor.detach())
        metas.append(meta)
        used = start + tensor.nbytes
    if metas:
        yield bucket()


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
