"""What takes published weights in place of an engine's worker.

An actor's class must stand in a module that Ray can import: ranks that are spawned run their script
as `__mp_main__`, which no other process has.
"""

from contextlib import closing

from async_grpo.rollout.weights_update import SharedFile, fetch_bytes
from async_grpo.types import WeightsSnapshot
from async_grpo.weight_sync.buckets import check_bytes, laid_out_bytes, parts


class Receiver:
    """A worker as far as it matters here: what it fetches is checked and laid out for an engine."""

    async def stage(self, snapshot: WeightsSnapshot) -> None:
        with closing(SharedFile(laid_out_bytes(snapshot.tensors))) as file:
            for bucket in snapshot.buckets:
                data = await fetch_bytes(bucket)
                check_bytes(data, size_bytes=bucket.size_bytes, checksum=bucket.checksum)
                for piece, part in parts(bucket, data):
                    file.write(part, piece.offset_bytes)
