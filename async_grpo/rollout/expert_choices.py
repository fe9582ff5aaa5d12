"""Returns the experts that an engine chose, where vLLM's runner does not do so itself.

vLLM's second runner, on devices, returns them (`enable_return_routed_experts`); the first, on CPUs,
refuses. Here its capturer is bound to the routers of the first one. Choices are kept by slot of the
KV cache, so that a prefix that was cached has those with which it was computed. Runs inside
vLLM's engine core process, where the scheduler finds them when a sequence ends.

Legend: B tokens of a step, R layers, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from async_grpo.types import Experts
from async_grpo.weight_sync.vllm_extension import WeightsExtension

WANTED = "with_experts"  # in vLLM's `SamplingParams.extra_args`
Mixin: Any = object  # lets mypy accept that the mixin calls a scheduler's methods


class Choices:
    """The choices of one engine, by slot of its KV cache."""

    def __init__(self, runner: Any) -> None:
        """Bind to vLLM's model runner; raises `ValueError` for an engine that cannot tell them."""
        config, kv_cache = runner.vllm_config, runner.kv_cache_config
        groups = [each.kv_cache_spec for each in kv_cache.kv_cache_groups]
        whole = [n for n, spec in enumerate(groups) if isinstance(spec, FullAttentionSpec)]
        if config.parallel_config.world_size > 1 or not whole:
            raise ValueError("on CPUs with one process, and layers that keep all keys, alone")
        self.group, self._block_size = whole[0], groups[whole[0]].block_size
        self._runner = runner
        most = config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(most, config)
        bind_routed_experts_capturer(runner.model, self._capturer)
        num_slots, shape = kv_cache.num_blocks * self._block_size, self._capturer.shape_per_token
        self._held = np.zeros((num_slots, *shape), self._capturer.output_dtype_name)
        self._execute, runner.execute_model = runner.execute_model, self._captured

    def of(self, blocks: Sequence[int], num_tokens: int) -> Experts:
        """[num_tokens, R, K] of a sequence whose keys lie in `blocks`."""
        return self._held[_slots(np.asarray(blocks), self._block_size, 0, num_tokens)]

    def _captured(self, step: SchedulerOutput, *args: object, **options: object) -> Any:
        """`execute_model`, whose tokens are those of the batch's requests, in its order."""
        result = self._execute(step, *args, **options)
        if not step.total_num_scheduled_tokens:
            return result
        batch, slots = self._runner.input_batch, []
        table = batch.block_table[self.group]
        blocks = table.get_numpy_array()  # of a kernel's size, several a block of the cache
        for row, name in enumerate(batch.req_ids):
            start, number = batch.num_computed_tokens_cpu[row], step.num_scheduled_tokens[name]
            slots.append(_slots(blocks[row], table.block_size, start, start + number))
        rows = self._capturer.snapshot_routing_data(step.total_num_scheduled_tokens)
        self._held[np.concatenate(slots)] = rows.numpy()
        return result


def _slots(blocks: Experts, block_size: int, start: int, stop: int) -> NDArray[np.intp]:
    places = np.arange(start, stop)
    return np.asarray(blocks[places // block_size] * block_size + places % block_size)


engine: Choices | None = None  # of this process


class WorkerExtension(WeightsExtension):
    """All methods that vLLM adds to each of its workers."""

    def capture_experts(self) -> str:
        """Why this process cannot tell its choices; empty: from now on it does."""
        global engine
        try:
            engine = engine or Choices(self.model_runner)  # type: ignore[attr-defined]
        except (AttributeError, ValueError) as error:  # AttributeError: of another runner
            return str(error)
        return ""


class ReturnsExperts(Mixin):
    """A mixin, before a `Scheduler`, that gives a finished output the choices of its sequence."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self._ended: dict[str, Experts] = {}

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        messages: dict[int, EngineCoreOutputs]
        messages = super().update_from_output(scheduler_output, model_runner_output)
        for output in (each for message in messages.values() for each in message.outputs):
            if output.finished and output.request_id in self._ended:
                output.routed_experts = self._ended[output.request_id]
        self._ended.clear()
        return messages

    def _free_request(self, request: Request, *args: object, **options: object) -> Any:
        sampling = request.sampling_params
        if engine is not None and sampling is not None and (sampling.extra_args or {}).get(WANTED):
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)[engine.group]
            self._ended[request.request_id] = engine.of(blocks, request.num_tokens - 1)
        return super()._free_request(request, *args, **options)
