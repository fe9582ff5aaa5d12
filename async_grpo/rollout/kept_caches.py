"""Running sequences keep their KV cache over an update, where `--keep-kv-cache` says so.

vLLM resets its prefix cache only where no sequence runs, so before new weights it would take the
caches of all that run. Here what has been cached is forgotten by everybody who comes later, and
those that run go on with what they have. Runs inside vLLM's engine core process.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

KEEP = "keep_kv_cache"  # in vLLM's `additional_config`


class KeptCaches:
    """To be mixed in before a `Scheduler`."""

    requests: dict[str, Request]
    kv_cache_manager: KVCacheManager
    vllm_config: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._resets = count()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """A pause calls it before new weights; nobody who comes later finds a block of before."""
        if not self.vllm_config.additional_config.get(KEEP):
            did_reset: bool = super().reset_prefix_cache(  # type: ignore[misc]
                reset_running_requests, reset_connector
            )
            return did_reset
        pool = self.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()
        # What running sequences will cache stands upon old blocks: under names of its own, for a
        # new prompt may have the same tokens.
        salt = f"kept at reset {next(self._resets)}"
        for request in self.requests.values():
            if request.num_computed_tokens:
                request.cache_salt = salt
                request.block_hashes.clear()
                request.update_block_hashes()
        return True
