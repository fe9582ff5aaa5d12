"""The adapters of one engine: one a weights version, each served until its last request has ended.

A request keeps the adapter that it began with, so no token is of mixed weights, no cache of other
weights than its own, and nothing is computed again. vLLM reads an adapter out of a folder, again
if it had no place for it meanwhile: the folder stays as long as a request may need it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from async_grpo.rollout.weights_update import Fetch, SharedFile, StagedWeights, fetch_into
from async_grpo.types import WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync.adapter_checks import ADAPTER_FILE
from async_grpo.weight_sync.update_checks import pack_samples

Transfer = Callable[[str, Awaitable[object]], Awaitable[object]]  # of `Engine`, with its errors
InUse = tuple[LoRARequest | None, WeightsVersion | None]  # None: the base; that of its spans


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One adapter, in a folder whose large file lies in memory."""

    request: LoRARequest  # goes to vLLM with each request of ours that is to use it
    folder: TemporaryDirectory[str]
    file: SharedFile
    received_bytes: int
    num_running: int = 0  # requests

    def close(self) -> None:
        """Remove its folder."""
        self.folder.cleanup()
        self.file.close()


class Adapters:
    """Which adapters an engine has, and which one new requests get."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._staging = StagedWeights()
        self._numbers = itertools.count(1)
        self._serving: list[LoadedAdapter] = []  # the newest last
        # Of new requests; until the first adapter the base serves under the folder's version.
        self.version: WeightsVersion | None = None

    async def write(self, snapshot: WeightsSnapshot, fetch: Fetch) -> LoadedAdapter:
        """Fetch and verify an adapter, into a folder that vLLM can read; nobody uses it yet.

        Raises `WeightSyncError` when bytes are lost or damaged.
        """
        try:
            wanted = self._staging.begin(snapshot)
            await fetch_into(self._staging, wanted, fetch)
            folder, file = await asyncio.to_thread(self._write, snapshot.adapter)
        finally:
            self._staging.drop()
        request = LoRARequest(str(snapshot.version), next(self._numbers), folder.name)
        return LoadedAdapter(request, folder, file, sum(each.size_bytes for each in wanted))

    def _write(self, config: str) -> tuple[TemporaryDirectory[str], SharedFile]:
        file, folder = self._staging.as_safetensors(), TemporaryDirectory(prefix="async-grpo-")
        Path(folder.name, "adapter_config.json").write_text(config)
        Path(folder.name, ADAPTER_FILE).symlink_to(file.path)
        return folder, file

    async def add(
        self, adapter: LoadedAdapter, snapshot: WeightsSnapshot, *, transfer: Transfer
    ) -> None:
        """Load it into vLLM, check it, and give it to all new requests.

        Raises `WeightSyncError` unless vLLM then has the numbers of the snapshot's samples; the
        adapter before serves on.
        """
        request, samples = adapter.request, pack_samples(snapshot.samples)
        arguments = (request.lora_name, request.lora_int_id, request.lora_path, samples)
        try:
            adding = self._llm.collective_rpc("add_adapter", args=arguments)
            await transfer("add_adapter", adding)
        except BaseException:  # cancelled too
            await self._remove(adapter, transfer)
            raise
        renaming = self._llm.update_weight_version(str(snapshot.version))
        await transfer("update_weight_version", renaming)
        self.version = snapshot.version
        self._serving.append(adapter)
        unused = [each for each in self._serving[:-1] if not each.num_running]
        self._serving = [each for each in self._serving if each not in unused]
        for each in unused:
            await self._remove(each, transfer)

    async def _remove(self, adapter: LoadedAdapter, transfer: Transfer) -> None:
        try:
            await transfer("remove_lora", self._llm.remove_lora(adapter.request.lora_int_id))
        finally:
            adapter.close()

    @contextmanager
    def in_use(self) -> Iterator[InUse]:
        """Within, the newest adapter stays; None is the base."""
        adapter = self._serving[-1] if self._serving else None
        if adapter is None:
            yield None, self.version
            return
        adapter.num_running += 1
        try:
            yield adapter.request, self.version
        finally:
            adapter.num_running -= 1
