"""The engine's side of a device transport: vLLM's stock engine, loading into the live model.

Weights are loaded as they arrive, while generation stands still: no second copy of the model, and
no way back once it has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from async_grpo.errors import WeightSyncError
from async_grpo.weight_sync.group import check_group
from async_grpo.weight_sync.manifest import ExpectedWeights

STOCK: dict[str, type[WeightTransferEngine]] = {"nccl": NCCLWeightTransferEngine}


class _Recorder:
    """Stands before the model while a stock engine loads, and remembers what was loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model
        self.received: set[str] = set()
        self.loaded: set[str] | None = set()  # None: this model does not tell

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = list(weights)
        for name, _ in named:
            if name in self.received:
                raise WeightSyncError(f"parameter {name!r} must be sent once, got it twice")
            self.received.add(name)
        loaded = self._model.load_weights(iter(named))
        self.loaded = self.loaded | loaded if self.loaded is not None and loaded else None


class DeviceReceiver:
    """One route from the trainer, kept from update to update."""

    def __init__(self, transport: str, host: WeightTransferEngine) -> None:
        if transport not in STOCK:
            raise WeightSyncError(
                f"a device transport must be one of {', '.join(STOCK)}, got {transport!r}: give "
                "trainer and worker the same version of async-grpo"
            )
        self._stock = STOCK[transport](host.config, host.vllm_config, host.device, host.model)
        self._recorder: _Recorder | None = None

    @property
    def is_receiving(self) -> bool:
        return self._recorder is not None

    def open(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer; blocks until it is there too."""
        self._stock.init_transfer_engine(self._stock.parse_init_info(init_info))
        if isinstance(self._stock, NCCLWeightTransferEngine):
            check_group(self._stock.model_update_group)

    def receive(self, update_info: dict[str, Any]) -> None:
        """Load some parameters; the first ones begin the update."""
        if self._recorder is None:
            self._stock.start_weight_update()
            self._recorder = _Recorder(self._stock.model)
            self._stock.set_weight_update_target(self._recorder, self._stock.model_config)
        with torch.no_grad():
            self._stock.update_weights(update_info)

    def finish(self, expected: ExpectedWeights) -> set[str] | None:
        """End the update; the model's parameters that were loaded, None when it does not tell.

        Raises:
            WeightSyncError: not all parameters have come.
        """
        if self._recorder is None:
            raise WeightSyncError("an update must bring at least one parameter, got none")
        recorder, self._recorder = self._recorder, None
        self._stock.reset_weight_update_target()
        expected.check_complete(recorder.received)
        with torch.no_grad():
            self._stock.finish_weight_update()
        return recorder.loaded

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._stock.shutdown()
