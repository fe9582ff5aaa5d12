"""A subclass of vLLM's scheduler that sends a sequence once, and can keep its KV cache.

consumes      the outputs of each engine step: one token of each of hundreds of sequences
produces      whole sequences when they end; partial ones before a pause or for a cut; token counts
              on request
waits for     nothing
unblocked by  a sequence's end, a pause, or a request

Nothing reads a training sample before it is complete, but vLLM would serialise and send each token
in a message. A message has one weight version, so a pause, after which the version may change,
first sends what was sampled before it. Runs inside vLLM's engine core process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from async_grpo.rollout.expert_choices import ReturnsExperts
from async_grpo.types.snapshots import NUM_ROWS

KEEP = "keep_kv_cache"  # in vLLM's `additional_config`
FIRST_IN_QUEUE = -1  # the priority of the canary; all other requests have 0 or more
# An output with any other field is not held back: that belongs to its tokens alone.
MERGED = {
    "request_id", "new_token_ids", "new_logprobs", "prefill_stats", "trace_headers",
    "routed_experts",
}  # fmt: skip
NO_PARTICULARS = {"finish_reason", "stop_reason", "num_nans_in_logits"}
PARTICULARS = tuple({*EngineCoreOutput.__struct_fields__} - MERGED - NO_PARTICULARS)
Mixin: Any = object  # lets mypy accept that the mixins below call a scheduler's methods


def make_scheduler(*, vllm_config: VllmConfig, **arguments: object) -> Scheduler:
    """The scheduler that vLLM would choose, with the mixins."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler = WholeOutputsAsyncScheduler if is_async else WholeOutputsScheduler
    return scheduler(vllm_config=vllm_config, **arguments)


class WholeOutputs(Mixin):
    """A mixin, before a `Scheduler`, that holds outputs back until a sequence ends."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self._held: dict[str, _Held] = {}
        self._num_tokens = 0
        self._is_cut = False

    def __call__(self, cuts: bool = False) -> tuple[int, dict[str, int], list[str]]:
        """Tokens sampled so far, tokens of each unfinished sequence, and which of these run.

        `cuts`: all of these tokens are sent, after the engine's next step at the latest. vLLM's
        front end can call any attribute of the engine core by name, such as the scheduler, so this
        needs no message type.
        """
        self._is_cut |= cuts
        num_tokens = {name: request.num_output_tokens for name, request in self.requests.items()}
        return self._num_tokens, num_tokens, [request.request_id for request in self.running]

    def has_requests(self) -> bool:
        """A pause, or a cut, waits for the step that sends what is held."""
        return super().has_requests() or self._is_to_send

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        messages = super().update_from_output(scheduler_output, model_runner_output)
        for client, message in messages.items():
            message.outputs = [
                whole
                for output in message.outputs
                if (whole := self._hold_or_send(client, output)) is not None
            ]
        if self._is_to_send:
            self._send_all(messages)
        return {client: message for client, message in messages.items() if _has_content(message)}

    def finish_requests(
        self, request_ids: object, finished_status: RequestStatus
    ) -> Sequence[Request]:
        """Drop held outputs of aborted sequences, whose abort the caller reports."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    @property
    def _is_to_send(self) -> bool:
        return bool(self._held) and (self._is_cut or self.pause_state == PauseState.PAUSED_ALL)

    def _hold_or_send(self, client: int, output: EngineCoreOutput) -> EngineCoreOutput | None:
        name, may_wait = output.request_id, self._may_wait(output)
        self._num_tokens += len(output.new_token_ids)
        if not may_wait and name not in self._held:
            return output
        held = self._held.setdefault(name, _Held(client, first=output))
        held.add(output)
        return None if may_wait else self._held.pop(name).whole(output)

    def _may_wait(self, output: EngineCoreOutput) -> bool:
        if output.finished or any(getattr(output, name) is not None for name in PARTICULARS):
            return False
        sampling = self.requests[output.request_id].sampling_params
        return (
            sampling is not None
            and sampling.output_kind == RequestOutputKind.FINAL_ONLY
            and not sampling.logprobs  # those of tokens that were not sampled are not held
        )

    def _send_all(self, messages: dict[int, EngineCoreOutputs]) -> None:
        for held in self._held.values():
            message = messages.setdefault(held.client, EngineCoreOutputs())
            message.outputs.append(held.whole(held.first))
        self._held.clear()
        self._is_cut = False


@dataclass(slots=True)
class _Held:
    """The outputs of one sequence that are not sent yet: 12 bytes a token, and array's spare 6 %.

    vLLM's objects would take 500, and keep the arrays of the whole step alive.
    """

    client: int
    first: EngineCoreOutput
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    ranks: array[int] = field(default_factory=lambda: array("i"))
    experts: list[np.ndarray] = field(default_factory=list)  # of further tokens each

    def add(self, output: EngineCoreOutput) -> None:
        self.token_ids.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            token_ids, logprobs, ranks, _ = output.new_logprobs
            assert token_ids[:, 0].tolist() == output.new_token_ids  # the sampled ones come first
            self.logprobs.extend(logprobs[:, 0].tolist())
            self.ranks.extend(ranks.tolist())
            output.new_logprobs = None
        if output.routed_experts is not None:
            self.experts.append(output.routed_experts)
            output.routed_experts = None

    def whole(self, last: EngineCoreOutput) -> EngineCoreOutput:
        """`last`, which has been added, with the tokens of all outputs."""
        last.new_token_ids = self.token_ids.tolist()
        if self.logprobs:
            last.new_logprobs = LogprobsLists(
                np.array(self.token_ids, np.int32)[:, None],
                np.array(self.logprobs, np.float32)[:, None],
                np.array(self.ranks, np.int32),
            )
        if self.experts:
            last.routed_experts = np.concatenate(self.experts)
        last.prefill_stats = last.prefill_stats or self.first.prefill_stats
        return last


class KeptCaches(Mixin):
    """A mixin, before a `Scheduler`: with `--keep-kv-cache` running sequences keep their caches.

    vLLM resets its prefix cache only if no sequence runs, so before new weights it would drop the
    caches of all that run. Here running sequences go on with their caches, and later ones find
    no block that was cached before.
    """

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self._resets = count()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Called by a pause before new weights; see the class."""
        if not self.vllm_config.additional_config.get(KEEP):
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        pool = self.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()
        # New blocks of running sequences follow old ones, so they get hashes of another salt: a new
        # prompt may have the same tokens.
        salt = f"kept at reset {next(self._resets)}"
        for request in self.requests.values():
            if request.num_computed_tokens:
                request.cache_salt = salt
                request.block_hashes.clear()
                request.update_block_hashes()
        return True


class SeatsForCanary(Mixin):
    """A mixin, before a `Scheduler`, for an engine that is not paused when it gets an adapter.

    Some of vLLM's seats are the canary's, which would wait for the end of a sequence otherwise.
    """

    def schedule(self, *args: object, **options: object) -> SchedulerOutput:
        if self.lora_config:
            at_front = bool(self.waiting) and self.waiting.peek_request().priority == FIRST_IN_QUEUE
            num_rows = sum(each.priority == FIRST_IN_QUEUE for each in self.waiting if at_front)
            self.max_num_active_reqs = self.max_num_running_reqs - NUM_ROWS + num_rows
        output: SchedulerOutput = super().schedule(*args, **options)
        return output


class WholeOutputsScheduler(SeatsForCanary, WholeOutputs, KeptCaches, ReturnsExperts, Scheduler):
    """Schedules one step at a time, as on a CPU."""


class WholeOutputsAsyncScheduler(
    SeatsForCanary, WholeOutputs, KeptCaches, ReturnsExperts, AsyncScheduler
):
    """Schedules the next step while one runs."""


def _has_content(message: EngineCoreOutputs) -> bool:
    """Whether the engine core has to send the message."""
    return bool(message.outputs or message.finished_requests) or (
        message.scheduler_stats is not None
    )
