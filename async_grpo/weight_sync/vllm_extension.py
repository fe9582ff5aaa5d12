"""The engine's side of a weight update, run inside vLLM's engine core processes.

vLLM imports this module by name (`worker_extension_cls`), which registers the weight-transfer
backend `staged_file`. A worker checks the bytes and puts them into a shared file while generation
goes on; this module maps the file, and loads it in one step while generation is paused. Nothing
before that step changes the live model.

Weights over NCCL are received by vLLM's engine and loaded as they arrive, while generation is
paused: this needs no second copy of the model, and cannot be undone once it has begun.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from async_grpo.model.policy import as_stored, stored_buffers
from async_grpo.model.text_towers import text_name
from async_grpo.model.weight_files import tensors_in
from async_grpo.types import TensorMeta, WeightSample
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.adapter_checks import AdapterReadback, leave_base_rows_alone
from async_grpo.weight_sync.buckets import dtype_name, view_tensor
from async_grpo.weight_sync.routes import check_group
from async_grpo.weight_sync.update_checks import (
    ExpectedWeights,
    Packed,
    Readback,
    check_samples,
    unpack_samples,
)

logger = logging.getLogger(__name__)
BACKEND = "staged_file"
TEXT_TOWER = "text_tower"  # the way to load the text model in one that also takes images or sound
Tensors = Iterator[tuple[str, torch.Tensor]]
# Silence warnings of layers that load nothing themselves; `_check_loaded` checks what was loaded.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
# Silence the warning that another vLLM may not accept our scheduler: the version is pinned.
logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)


class StagedFileEngine(NCCLWeightTransferEngine):
    """Maps a staged file and loads all of it at once, or loads what NCCL receives."""

    supports_draft_weight_update = False
    _expected: ExpectedWeights | None = None
    _num_updates = 0
    _is_partial = False
    _samples: Sequence[WeightSample] = ()
    _file: _StagedFile | None = None
    # Parameters that cannot be read back, found at the first update; None before it.
    unreadable: set[str] | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's NCCL group in place of an earlier one; blocks until it has joined."""
        self.shutdown()
        super().init_transfer_engine(init_info)
        check_group(self.model_update_group)

    def expect(self, tensors: list[list], rest_of_folder: bool) -> None:
        """Raise `WeightSyncError` unless these are the model's parameters, or some of them."""
        if self._expected is None:
            dtype = dtype_name(self.model_config.dtype)
            # vLLM compiles a model of transformers when it is built, and needs its configuration.
            with set_current_vllm_config(self.vllm_config):
                self._expected = ExpectedWeights.read(self.model_config.model, dtype=dtype)
        rest_of = Path(self.model_config.model) if rest_of_folder else None
        self._expected.check(_metas(tensors), rest_of=rest_of)

    def announce(self, rest_of_folder: bool, samples: Iterable[Packed]) -> None:
        """Called before weights are loaded; see `WeightsSnapshot`."""
        self._is_partial = rest_of_folder
        self._samples = unpack_samples(samples)

    def start_weight_update(self) -> None:
        self._staged: dict[str, torch.Tensor] = {}
        self._loaded: set[str] | None = set()  # None: this model does not report it
        # Before loading: while weights are loaded, a tied head is a separate parameter.
        parameters = dict(_loaded_parameters(self.model))
        self._parameters = {*parameters}
        # Not vectors: a router's correction is part of two layers, and loaded by one.
        self._matrices = [name for name, each in parameters.items() if each.ndim > 1]
        if self.unreadable is None:
            self.unreadable = self._differing_from_files()
        self._num_updates += 1
        self._readback = Readback(self.model, seed=self._num_updates)

    def _differing_from_files(self) -> set[str] | None:
        """Parameters that read back other than the files that the model was loaded from.

        None where the files do not hold every parameter by its published name: then the first
        update decides, and a parameter that it misses counts as unreadable.
        """
        reading, read = Readback(self.model, seed=0), set[str]()
        with torch.no_grad():
            for name, _ in reading.through(tensors_in(Path(self.model_config.model))):
                read.add(name)
            if self._expected is None or not read.issuperset(self._expected.shapes):
                return None
            return {*reading.differing(), *reading.unread} & self._expected.shapes.keys()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "path" in update_info:
            self._map(update_info["path"], _metas(update_info["tensors"]))
        else:
            self._receive(update_info)

    def _map(self, path: str, tensors: list[TensorMeta]) -> None:
        """Stage the parameters in a file, whose bytes the worker has checked."""
        if self._file is None or not self._file.is_at(path):
            self._forget_file()
            self._file = _StagedFile(path)
        self._staged = {meta.name: view_tensor(self._file.data, meta) for meta in tensors}

    def _receive(self, update_info: dict[str, object]) -> None:
        """Load all parameters from the trainer's device; an error leaves a broken model."""
        self._begin_loading()
        recorder = _Recorder(self.model, lambda own: self._as_stored(self._readback.through(own)))
        self.set_weight_update_target(recorder, self.model_config)
        with torch.no_grad():
            super().update_weights(update_info)
            for pair in self._others():
                recorder.load_stored(iter([pair]))
        self.reset_weight_update_target()
        self._loaded = recorder.loaded

    def finish_weight_update(self) -> None:
        """Load what was staged; an error here leaves a broken model that must not serve."""
        with torch.no_grad():
            if self._staged:
                self._begin_loading()
                through = self._readback.through(self._staged.items())
                stored = chain(self._as_stored(through), self._others())
                self._loaded = self.model.load_weights(stored)
            self._check_received()
            super().finish_weight_update()
            _pack_tied_head(self.model)
        torch.accelerator.synchronize()  # the copies read what is written to next
        self._staged = {}
        self._check_loaded()

    @property
    def _outline(self) -> PreTrainedModel:
        assert self._expected is not None and self._expected.model is not None
        return self._expected.model

    def _as_stored(self, published: Tensors) -> Tensors:
        """Published tensors as vLLM loads them from a checkpoint."""
        for name, tensor in published:
            yield from as_stored(self._outline, name, tensor).items()

    def _others(self) -> Tensors:
        """What vLLM needs besides what `through` has seen, from the model's files."""
        others = {name for name, _ in self._as_stored(stored_buffers(self._outline))}
        if self._is_partial:
            assert self._expected is not None
            unsent = self._expected.shapes.keys() - self._readback.sent
            others |= self._expected.stored_names(unsent)
        if others:
            yield from tensors_in(Path(self.model_config.model), among=others)

    def _check_received(self) -> None:
        """Raise for layers that got nothing: what is written past vLLM's loaders is lost."""
        infos = (
            (n, get_layerwise_info(self.model.get_submodule(_place(n)))) for n in self._matrices
        )
        if lost := [n for n, info in infos if info.can_load() and not info.load_numel]:
            raise WeightSyncError(
                f"vLLM must load every parameter by its loaders, it wrote {len(lost)} past them, "
                f"such as {min(lost)!r}: the model cannot be updated while it serves"
            )

    def _check_loaded(self) -> None:
        if self._loaded is not None and (skipped := self._parameters - self._loaded):
            raise WeightSyncError(
                f"vLLM must load every parameter of its model, it left {len(skipped)} as they "
                f"were, such as {min(skipped)!r}: the model cannot be updated while it serves"
            )
        with torch.no_grad():
            differing = {*self._readback.differing()}
        if self.unreadable is None:
            self.unreadable = differing.union(self._readback.unread)
        elif stale := differing - self.unreadable:
            raise WeightSyncError(
                f"a model must compute with the weights that it has loaded, {len(stale)} "
                f"parameters read back other than they were sent, such as {min(stale)!r}: "
                "start the worker again"
            )
        self._check_samples()

    def _check_samples(self) -> None:
        if not self._samples:
            return
        assert self._expected is not None and self.unreadable is not None
        with torch.no_grad():
            counts = self._readback.differing_samples(self._samples, self._expected.shapes)
        check_samples({n: count for n, count in counts.items() if n not in self.unreadable})

    def discard(self) -> None:
        """Forget an update that will not be finished, and its file."""
        self._forget_file()

    def _forget_file(self) -> None:
        self._staged = {}
        if self._file is not None:
            self._file.close()
        self._file = None

    def _begin_loading(self) -> None:
        _forget_packed(self.model)
        initialize_layerwise_reload(self.model)


class _StagedFile:
    """A worker's file in this process's memory; pinned where a device copies out of it.

    The worker writes the next weights to the same file, so that it is mapped and pinned once.
    """

    def __init__(self, path: str) -> None:
        # Shared: a private mapping need not see what is written later. Nothing writes to it here;
        # it is writable because torch warns of memory that is not.
        self.data = np.memmap(path, dtype=np.uint8, mode="r+")
        self._identity = _identity(path)
        self._is_pinned = current_platform.is_cuda() and self._pin()

    def is_at(self, path: str) -> bool:
        """Whether this file lies at `path`, which another one may have had before."""
        return self._identity == _identity(path)

    def _pin(self) -> bool:
        address, size_bytes = self.data.ctypes.data, self.data.nbytes
        if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)) == 0:
            return True
        with suppress(RuntimeError):  # CUDA tells the error once more, of whatever comes next
            torch.zeros(1, device="cuda")
        logger.warning(
            "staged weights of %d bytes cannot be pinned: generation pauses longer for each update",
            size_bytes,
        )
        return False

    def close(self) -> None:
        """Unpin it; it is unmapped with its last view."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.data.ctypes.data)


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


class _Recorder:
    """Takes the model's place while vLLM's engine loads, and remembers what was loaded."""

    def __init__(self, model: torch.nn.Module, as_stored: Callable[[Tensors], Tensors]) -> None:
        self._model = model
        self._as_stored = as_stored
        self.loaded: set[str] | None = set()

    def load_weights(self, weights: Tensors) -> None:
        self.load_stored(self._as_stored(weights))

    def load_stored(self, weights: Tensors) -> None:
        loaded = self._model.load_weights(weights)
        self.loaded = self.loaded | loaded if self.loaded is not None and loaded else None


@register_model_loader(TEXT_TOWER)
class TextTowerLoader(DefaultModelLoader):
    """Loads the tensors of a text model by its own names, and no others."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="hf"))

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Tensors:
        for stored, tensor in super().get_all_weights(model_config, model):
            if name := text_name(stored):
                yield name, tensor


def _metas(tensors: list[list]) -> list[TensorMeta]:
    return [TensorMeta(n, d, tuple(s), o) for n, d, s, o in tensors]


def _loaded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All but those that latent attention derives of others."""
    for name, parameter in model.named_parameters():
        if not isinstance(model.get_submodule(_place(name)), MLAAttention):
            yield name, parameter


def _place(name: str) -> str:
    return name.rpartition(".")[0]


def _forget_packed(model: torch.nn.Module) -> None:
    """On CPU vLLM multiplies by packed copies of the weights: drop them, loading packs new ones."""
    for module in model.modules():
        vars(module).pop("cpu_linear", None)
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) and current_platform.is_cpu():
            method.moe_kernel = None  # vLLM packs experts only where it makes their kernel


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Give a tied output head its embedding's packed copy: a reload packs only what it loads."""
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
    """Methods that vLLM adds to each of its workers, called by name for an update."""

    _adapters: AdapterReadback | None = None

    def device_id(self) -> str:
        """The identity of this worker's NVIDIA device, empty on a CPU."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        on_cuda = device.type == "cuda"
        return str(torch.cuda.get_device_properties(device).uuid) if on_cuda else ""

    def expect_weights(self, tensors: list[list], rest_of_folder: bool) -> None:
        """See `StagedFileEngine.expect`; changes nothing."""
        self.weight_transfer_engine.expect(tensors, rest_of_folder)  # type: ignore[attr-defined]

    def announce_weights(self, rest_of_folder: bool, samples: list[Packed]) -> None:
        """See `StagedFileEngine.announce`."""
        self.weight_transfer_engine.announce(rest_of_folder, samples)  # type: ignore[attr-defined]

    def unreadable_weights(self) -> list[str]:
        """The parameters for which a missed update cannot be detected."""
        return sorted(self.weight_transfer_engine.unreadable or ())  # type: ignore[attr-defined]

    def add_adapter(self, name: str, number: int, folder: str, samples: list[Packed]) -> None:
        """Load an adapter; raises `WeightSyncError` unless vLLM computes with these `samples`."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if current_platform.is_cpu():
            leave_base_rows_alone()
        runner.add_lora(LoRARequest(name, number, folder))
        if self._adapters is None:
            self._adapters = AdapterReadback(runner.lora_manager._adapter_manager)
        found = self._adapters.differing(number, Path(folder), unpack_samples(samples))
        check_samples(found)

    def discard_weight_update(self) -> None:
        """Undo an update that was begun and not finished."""
        self.weight_transfer_engine.discard()  # type: ignore[attr-defined]
        self._weight_update_active = False


WeightTransferEngineFactory.register_engine(BACKEND, StagedFileEngine)
