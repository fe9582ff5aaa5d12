"""Prepares new weights while an engine generates with the old ones.

Buckets are fetched one ahead and staged in memory that the engine's processes map. The staged
weights wait for sequences that are about to end; the tokens whose caches are lost are counted.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save

from async_grpo.types import WeightsBucket, WeightsDelta, WeightsSnapshot, WeightsVersion
from async_grpo.util import deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import SnapshotLostError, WeightSyncError
from async_grpo.weight_sync.buckets import (
    ITEM_BYTES,
    check_bytes,
    laid_out_bytes,
    parts,
    view_tensor,
)

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState

Wanted = WeightsBucket | WeightsDelta
Fetch = Callable[[Wanted], Awaitable[NDArray[np.uint8]]]
Fetched = AsyncIterator[tuple[Wanted, NDArray[np.uint8]]]
DELAY_SHARE = 0.5  # of the time since the last update: the longest delay
MAX_DELAY_S = 20.0
POLL_INTERVAL_S = 0.01
NUM_REMEMBERED = 64  # recent requests, whose median duration is used


class StagedWeights:
    """The bytes of new weights in a file that the engine maps: all sent, or patched with a delta.

    The file is kept, since new memory is slower to write, and on a device to copy from; it costs a
    copy of the model in host memory. The engine reads it between `begin` and `end` alone; after a
    failure, when a write may still be under way, another file takes its place.
    """

    def __init__(self) -> None:
        self._file: SharedFile | None = None
        self._holds: WeightsVersion | None = None  # the file has all bytes of this version

    def begin(self, snapshot: WeightsSnapshot) -> Sequence[Wanted]:
        """Start to stage a snapshot; returns what to fetch for each of its buckets."""
        self._patches = self._holds is not None and snapshot.delta_since == self._holds
        self._holds = None
        size_bytes = laid_out_bytes(snapshot.tensors)
        if self._file is None or self._file.size_bytes != size_bytes:
            self.drop()
            self._file = SharedFile(size_bytes)
        self._snapshot = snapshot
        return [(self._patches and bucket.delta) or bucket for bucket in snapshot.buckets]

    @property
    def path(self) -> str:
        """The path of the file, for the engine's processes."""
        assert self._file is not None, "staging has begun"
        return self._file.path

    def take(self, index: int, fetched: NDArray[np.uint8]) -> None:
        """Write what was fetched for bucket `index` to the file.

        Raises `WeightSyncError` unless the bucket's bytes then equal the sent ones.
        """
        assert self._file is not None, "staging has begun"
        bucket, data = self._snapshot.buckets[index], fetched
        if self._patches and bucket.delta is not None:
            data = np.empty(bucket.size_bytes, dtype=np.uint8)
            for piece, part in parts(bucket, data):
                self._file.read(part, piece.offset_bytes)
            item_bytes = ITEM_BYTES[self._snapshot.tensors[0].dtype]
            add_on("weight_delta").patch(data, fetched, item_bytes=item_bytes)
        check_bytes(data, size_bytes=bucket.size_bytes, checksum=bucket.checksum)
        for piece, part in parts(bucket, data):
            self._file.write(part, piece.offset_bytes)

    def as_safetensors(self) -> SharedFile:
        """The staged tensors in another file, as safetensors has them."""
        data = np.memmap(self.path, dtype=np.uint8, mode="c")
        content = save({meta.name: view_tensor(data, meta) for meta in self._snapshot.tensors})
        file = SharedFile(len(content))
        file.write(np.frombuffer(content, dtype=np.uint8), 0)
        return file

    def end(self) -> None:
        """Called when the engine has loaded all staged weights, and has no view of the file."""
        if self._snapshot.is_base:
            self._holds = self._snapshot.unchanged_since or self._snapshot.version

    def drop(self) -> None:
        """Close the file, for example if only a part of it is new; the engine must too."""
        if self._file is not None:
            self._file.close()
        self._file, self._holds = None, None


class SharedFile:
    """A file in memory for the engine's processes, outside of the size limit of /dev/shm.

    The system frees it with its last user, so that nothing is left even after SIGKILL.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create("async-grpo-weights")
        # A thread may still write after its caller was cancelled: never into another file.
        self._lock = threading.Lock()
        os.truncate(self._descriptor, size_bytes)

    @property
    def path(self) -> str:
        """The path by which other processes of this machine open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self, into: NDArray[np.uint8], offset_bytes: int) -> None:
        """Fill `into` with the bytes at an offset."""
        at, remaining = offset_bytes, into.data.cast("B")
        while remaining:
            with self._lock:
                count = os.preadv(self._descriptor, [remaining], at)
            if not count:  # at the end of the file
                return
            remaining = remaining[count:]
            at += count

    def write(self, data: NDArray[np.uint8], offset_bytes: int) -> None:
        """Write `data` at an offset."""
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
        """Close it; processes that have mapped it keep it."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


@asynccontextmanager
async def fetch_ahead(buckets: Sequence[Wanted], fetch: Fetch) -> AsyncIterator[Fetched]:
    """The buckets in order, each with its [size_bytes] bytes; at most two are held at a time.

    An error of a fetch is raised when its bucket is taken. Leaving the context early cancels the
    running fetch.
    """
    under_way: list[asyncio.Future[NDArray[np.uint8]]] = []

    async def in_order() -> Fetched:
        under_way.extend(asyncio.ensure_future(fetch(bucket)) for bucket in buckets[:1])
        for bucket, following in zip_longest(buckets, buckets[1:]):
            data = await under_way.pop()
            if following is not None:
                under_way.append(asyncio.ensure_future(fetch(following)))
            yield bucket, data

    try:
        yield in_order()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def fetch_into(staging: StagedWeights, wanted: Sequence[Wanted], fetch: Fetch) -> None:
    """Stage all that `StagedWeights.begin` wants."""
    async with fetch_ahead(wanted, fetch) as fetched:
        index = 0
        async for _, data in fetched:
            await asyncio.to_thread(staging.take, index, data)
            index += 1


class UpdateDelay:
    """Decides how long an engine waits before it loads new weights, by recent requests.

    An update invalidates the KV cache of every running sequence, whose prefix the engine then
    computes again. With outputs of similar length, which begin and end together, that can be most
    of a batch's tokens.

    A delay costs no throughput while the engine is full, only freshness, so it is bounded. It pays
    off if half of the requests will have ended within `DELAY_SHARE` of the time since the last
    update, judged by the median duration of recent requests that no update interrupted. It ends
    when half of the sequences have ended, since the batch is then half empty. While sequences are
    queued a delay gains nothing: the next one takes the place of each that ends.
    """

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._seconds: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._updated_at: float | None = None

    def ended(self, *, began_at: float) -> None:
        """Called when a request is answered that arrived at `began_at` (`time.monotonic`)."""
        if self._updated_at is None or began_at >= self._updated_at:
            self._seconds.append(time.monotonic() - began_at)

    def updated(self) -> None:
        """Called when the engine has loaded weights."""
        self._updated_at = time.monotonic()

    async def wait(self, began: Collection[float], num_unfinished: Callable[[], int]) -> None:
        """Return when the weights may be loaded.

        Args:
            began: arrival time of each running request.
            num_unfinished: returns the number of sequences, with those in the queue.
        """
        num_before, now = num_unfinished(), time.monotonic()
        if self._updated_at is None or not self._seconds or num_before > self._max_num_seqs:
            return
        deadline = now + min(MAX_DELAY_S, DELAY_SHARE * (now - self._updated_at))
        typical_s = statistics.median(self._seconds)
        if 2 * sum(began_at + typical_s <= deadline for began_at in began) < len(began):
            return
        while 2 * num_unfinished() > num_before and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_INTERVAL_S)


def cached_tokens(states: Iterable[RequestState], *, shares_prompts: bool) -> int:
    """Tokens in the KV cache of running requests, which must be recomputed when it is cleared.

    A sequence holds its prompt and its output but for the last token, which is computed with the
    next one; a prompt that several samples share counts once. Sequences without a sampled token
    are not counted.
    """
    num_tokens, seen = 0, set[int]()
    for state in states:
        num_sampled = state.detokenizer.num_output_tokens() if state.detokenizer else 0
        if not num_sampled:
            continue
        num_tokens += num_sampled - 1
        group = id(state.parent_req or state)
        if not shares_prompts or group not in seen:
            num_tokens += state.prompt_len
            seen.add(group)
    return num_tokens


async def fetch_bytes(
    bucket: Wanted, *, timeout_s: float = deadlines.BUCKET_FETCH_S
) -> NDArray[np.uint8]:
    """The [size_bytes] bytes of a bucket of weights, or of its delta.

    Raises `SnapshotLostError` when the trainer has ended, `WeightSyncError` when none arrive.
    """
    from ray.exceptions import ObjectFetchTimedOutError, ObjectLostError, RayError

    try:
        async with asyncio.timeout(timeout_s):
            return await bucket.data
    except TimeoutError:
        raise WeightSyncError(
            f"a bucket of {bucket.size_bytes} bytes of weights did not arrive within "
            f"{timeout_s:g} s: look at the network and the load of the trainer's machine"
        ) from None
    except RayError as error:
        # A trainer rank owns the bytes: they are lost with it, or freed for newer ones.
        lost = isinstance(error, ObjectLostError) and not isinstance(
            error, ObjectFetchTimedOutError
        )
        raise (SnapshotLostError if lost else WeightSyncError)(
            f"a bucket of weights is lost, its sender has probably died: {type(error).__name__}"
        ) from None
