"""Weights as one run of bytes, cut into buckets with a checksum each, and turned back into tensors.

All parameters lie end to end, each at an offset that `lay_out` gives it; a bucket holds pieces of
that run. The trainer packs, workers unpack; neither needs Ray or vLLM for it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from async_grpo.types import Piece, TensorMeta, WeightsBucket, WeightsSnapshot, WeightsVersion
from async_grpo.util.errors import WeightSyncError

ALIGNMENT_BYTES = 64  # every tensor can be viewed in place as any dtype
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BUCKET_BYTES = 64 << 20
NamedTensors = Iterable[tuple[str, torch.Tensor]]
Put = Callable[[NDArray[np.uint8]], Awaitable[NDArray[np.uint8]]]


def pack(
    named_tensors: NamedTensors,
    *,
    put: Put,
    version: WeightsVersion,
    bucket_bytes: int = BUCKET_BYTES,
) -> WeightsSnapshot:
    """Lay tensors into buckets of at most `bucket_bytes`; `put` stores each and returns its data.

    Tensors are copied when taken, so the iterator may free or reuse them. All buckets are filled in
    the same memory, because new memory is slower to write: `put` must copy.
    """
    buffer, used, end = np.empty(bucket_bytes, dtype=np.uint8), 0, 0
    pieces: list[Piece] = []
    metas: list[TensorMeta] = []
    buckets: list[WeightsBucket] = []

    def close() -> None:
        data = buffer[:used]
        buckets.append(WeightsBucket(tuple(pieces), put(data), used, checksum_of(data)))
        pieces.clear()

    for name, tensor in named_tensors:
        meta = _placed(name, dtype_name(tensor.dtype), tuple(tensor.shape), after=end)
        end = laid_out_bytes([meta])
        metas.append(meta)
        data, at = bytes_of(tensor), 0
        while at < data.nbytes:
            size = min(data.nbytes - at, bucket_bytes - used)
            buffer[used : used + size] = data[at : at + size]
            pieces.append(Piece(meta.offset_bytes + at, size))
            used, at = used + size, at + size
            if used == bucket_bytes:
                close()
                used = 0
    if pieces:
        close()
    return WeightsSnapshot(version, tuple(buckets), tensors=tuple(metas))


def unpack(
    snapshot: WeightsSnapshot, data: Iterable[NDArray[np.uint8]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a snapshot in its order, copied out of its buckets' bytes.

    All bytes of a bucket are checked before any is used. A tensor is held back until it is whole,
    which takes little more memory than a bucket: a bucket holds the same part of all ranks' rows.

    Raises:
        WeightSyncError: the bytes are not those that were sent, or some are missing.
    """
    tensors = snapshot.tensors
    check_whole(tensors, snapshot.buckets)
    begun: dict[int, NDArray[np.uint8]] = {}
    missing = [tensor_bytes(meta) for meta in tensors]
    following = 0

    def whole() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal following
        while following < len(tensors) and not missing[following]:
            own = begun.pop(following, np.empty(0, dtype=np.uint8))
            meta = tensors[following]
            yield meta.name, view_tensor(own, meta._replace(offset_bytes=0))
            following += 1

    for bucket, bytes_ in zip(snapshot.buckets, data, strict=True):
        check_bytes(bytes_, size_bytes=bucket.size_bytes, checksum=bucket.checksum)
        for piece, part in parts(bucket, bytes_):
            index = owner_of(tensors, piece.offset_bytes)
            if index not in begun:
                begun[index] = np.empty(missing[index], dtype=np.uint8)
            at = piece.offset_bytes - tensors[index].offset_bytes
            begun[index][at : at + piece.size_bytes] = part
            missing[index] -= piece.size_bytes
        yield from whole()
    yield from whole()


def parts(
    bucket: WeightsBucket, data: NDArray[np.uint8]
) -> Iterator[tuple[Piece, NDArray[np.uint8]]]:
    """Each piece of a bucket with its bytes, which share the memory of `data`."""
    at = 0
    for piece in bucket.pieces:
        yield piece, data[at : at + piece.size_bytes]
        at += piece.size_bytes


def check_whole(tensors: tuple[TensorMeta, ...], buckets: Iterable[WeightsBucket]) -> None:
    """Raise `WeightSyncError` unless the buckets hold every byte of every parameter once."""
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


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Iterator[TensorMeta]:
    """Give each (name, dtype, shape) its offset, after the tensor before it.

    >>> [meta.offset_bytes for meta in lay_out([("a", "float32", (3,)), ("b", "float32", (20,))])]
    [0, 64]
    """
    end = 0
    for name, dtype, shape in tensors:
        meta = _placed(name, dtype, tuple(shape), after=end)
        end = laid_out_bytes([meta])
        yield meta


def _placed(name: str, dtype: str, shape: tuple[int, ...], *, after: int) -> TensorMeta:
    return TensorMeta(name, dtype, shape, -(-after // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def laid_out_bytes(tensors: Iterable[TensorMeta]) -> int:
    """Where the last of the tensors ends; 0 without any."""
    return max((meta.offset_bytes + tensor_bytes(meta) for meta in tensors), default=0)


def owner_of(tensors: tuple[TensorMeta, ...], offset_bytes: int) -> int:
    """The index of the parameter that a byte belongs to; `tensors` is in the order of offsets."""
    return bisect.bisect_right(tensors, offset_bytes, key=lambda meta: meta.offset_bytes) - 1


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


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The [nbytes] bytes of a tensor on the CPU, which share its memory where it is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data


def view_tensor(data: NDArray[np.uint8], meta: TensorMeta) -> torch.Tensor:
    """The tensor that `meta` describes, sharing the memory of `data`."""
    dtype, size_bytes = torch_dtype(meta.dtype), tensor_bytes(meta)
    if size_bytes == 0:  # torch cannot view an empty tensor as another dtype
        return torch.empty(meta.shape, dtype=dtype)
    flat = torch.from_numpy(data[meta.offset_bytes : meta.offset_bytes + size_bytes])
    return flat.view(dtype).reshape(meta.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; raises `WeightSyncError` for a name that torch lacks."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"a tensor's dtype must be one of torch's, got {name!r}")
    return dtype
