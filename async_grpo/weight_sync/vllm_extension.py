"""The engine's side of a weight update, run inside vLLM's engine core processes.

vLLM imports this module by name (`worker_extension_cls`), which registers the weight-transfer
backend `staged_file`. A worker puts the bytes into a shared file, bucket by bucket; here each
bucket is mapped, checked and kept while generation goes on, and all of them are loaded in one step
while it stands still. Until that step nothing of the live model is touched. Updates that come from
the trainer's device instead are handed on to a `DeviceReceiver`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from async_grpo.errors import WeightSyncError
from async_grpo.types import TensorMeta
from async_grpo.weight_sync.buckets import check_bytes, dtype_name, view_tensor
from async_grpo.weight_sync.manifest import ExpectedWeights, read_expected
from async_grpo.weight_sync.vllm_device import DeviceReceiver

BACKEND = "staged_file"
# It warns of every layer that has nothing of its own to load; what was loaded is checked below.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
# Of our scheduler it warns that another vLLM may not take it: the version is pinned.
logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)


@dataclass
class StagedFileInit(WeightTransferInitInfo):
    """The route from the trainer's device; buckets in shared files need none."""

    transport: str
    init_info: dict[str, Any]  # of vLLM's stock engine for it


@dataclass
class StagedFileUpdate(WeightTransferUpdateInfo):
    """One bucket: where its bytes are in the shared file, and what they hold."""

    path: str
    offset_bytes: int  # of the bucket in the file
    size_bytes: int
    checksum: int
    tensors: list[list]  # TensorMeta each, as messages carry it
    is_last: bool


class StagedFileEngine(WeightTransferEngine[StagedFileInit, StagedFileUpdate]):
    """Stage and verify bucket by bucket, then load everything at once; or let a device load."""

    init_info_cls = StagedFileInit
    update_info_cls = StagedFileUpdate
    supports_draft_weight_update = False
    _expected: ExpectedWeights | None = None
    _route: DeviceReceiver | None = None

    def init_transfer_engine(self, init_info: StagedFileInit) -> None:
        """Meet the trainer, in place of the one before it."""
        self.shutdown()
        route = DeviceReceiver(init_info.transport, self)
        route.open(init_info.init_info)
        self._route = route

    def expect(self, tensors: list[list]) -> None:
        """Raise `WeightSyncError` unless these are exactly the model's parameters."""
        metas = _metas(tensors)
        self._expected_weights().check(metas)
        self._expected_weights().check_complete({meta.name for meta in metas})

    def start_weight_update(self) -> None:
        self._staged: dict[str, torch.Tensor] = {}
        # Now: while weights are loaded, a tied head is a parameter of its own.
        self._parameters = {name for name, _ in self.model.named_parameters()}

    def update_weights(self, update_info: dict) -> None:
        if "path" in update_info:
            self.receive_weights(self.parse_update_info(update_info))
        else:
            route = self._open_route()
            if not route.is_receiving:
                _forget_packed(self.model)
            route.receive(update_info)

    def receive_weights(self, update_info: StagedFileUpdate) -> None:
        """Map and verify one bucket.

        Raises:
            WeightSyncError: wrong bytes, or parameters that are not exactly the model's.
        """
        metas = _metas(update_info.tensors)
        self._expected_weights().check(metas)
        # Copy-on-write, so that torch takes it for writable; nothing writes.
        data = np.memmap(
            update_info.path,
            dtype=np.uint8,
            mode="c",
            offset=update_info.offset_bytes,
            shape=(update_info.size_bytes,),
        )
        check_bytes(data, size_bytes=update_info.size_bytes, checksum=update_info.checksum)
        for meta in metas:
            if meta.name in self._staged:
                raise WeightSyncError(f"parameter {meta.name!r} must be sent once, got it twice")
            self._staged[meta.name] = view_tensor(data, meta)
        if update_info.is_last:
            self._expected_weights().check_complete(self._staged)

    def finish_weight_update(self) -> None:
        """Load what was staged; an error here leaves a broken model that must not serve."""
        with torch.no_grad():
            if self._staged:
                _forget_packed(self.model)
                initialize_layerwise_reload(self.model)
                loaded = self.model.load_weights(iter(self._staged.items()))
                finalize_layerwise_reload(self.model, self.model_config)
            else:
                loaded = self._open_route().finish(self._expected_weights())
            _pack_tied_head(self.model)
        torch.accelerator.synchronize()  # the copies read what is dropped next
        self._staged = {}
        if loaded is not None and (skipped := self._parameters - set(loaded)):
            raise WeightSyncError(
                f"vLLM must load every parameter of its model, it left {len(skipped)} as they "
                f"were, such as {min(skipped)!r}: the model cannot be updated while it serves"
            )

    def discard(self) -> None:
        """Forget an update that will not be finished."""
        self._staged = {}

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._staged = {}
        if self._route is not None:
            self._route.shutdown()
            self._route = None

    def _open_route(self) -> DeviceReceiver:
        if self._route is None:
            raise WeightSyncError("an update must have buckets, or a route from a device: got none")
        return self._route

    def _expected_weights(self) -> ExpectedWeights:
        if self._expected is None:
            text_config = self.model_config.hf_config.get_text_config()
            self._expected = read_expected(
                self.model_config.model,
                dtype=dtype_name(self.model_config.dtype),
                tied_head=bool(text_config.tie_word_embeddings),
            )
        return self._expected


def _metas(tensors: list[list]) -> list[TensorMeta]:
    return [TensorMeta(n, d, tuple(s), o) for n, d, s, o in tensors]


def _forget_packed(model: torch.nn.Module) -> None:
    """On CPU vLLM multiplies by packed copies of the weights: drop them, loading packs new ones."""
    for module in model.modules():
        vars(module).pop("cpu_linear", None)


def _pack_tied_head(model: torch.nn.Module) -> None:
    """No reload packs a tied output head, which loads nothing: it takes its embedding's copy."""
    packed = {
        id(module.weight): module.cpu_linear
        for module in model.modules()
        if "cpu_linear" in vars(module)
    }
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if id(weight) in packed and "cpu_linear" not in vars(module):
            module.cpu_linear = packed[id(weight)]


class WeightsExtension:
    """Becomes part of every vLLM worker: what an update needs beside vLLM's own calls."""

    def device_id(self) -> str:
        """The identity of this worker's NVIDIA device, empty on a CPU."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        on_cuda = device.type == "cuda"
        return str(torch.cuda.get_device_properties(device).uuid) if on_cuda else ""

    def expect_weights(self, tensors: list[list]) -> None:
        """Refuse parameters that are not the model's before anything of it is touched."""
        self.weight_transfer_engine.expect(tensors)  # type: ignore[attr-defined]

    def discard_weight_update(self) -> None:
        """Undo an update that was begun and not finished."""
        self.weight_transfer_engine.discard()  # type: ignore[attr-defined]
        self._weight_update_active = False


WeightTransferEngineFactory.register_engine(BACKEND, StagedFileEngine)
