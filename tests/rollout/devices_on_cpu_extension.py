"""The engine's extension, in an engine whose NCCL is the stand-in."""

import devices_on_cpu

from async_grpo.weight_sync.vllm_extension import WeightsExtension

__all__ = ["WeightsExtension"]

devices_on_cpu.install(setattr)
