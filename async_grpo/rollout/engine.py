"""An engine of a run, by vLLM: token ids in, token ids and log-probabilities out.

It takes new weights while it answers requests, and uses neither Ray nor text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout import vllm_requests, weights_update
from async_grpo.rollout.engine_adapters import Adapters, InUse
from async_grpo.rollout.engine_args import USAGE, engine_args
from async_grpo.rollout.in_flight import InFlight, cuts_of
from async_grpo.types import (
    Experts,
    GenerationRequest,
    Pulse,
    Turn,
    WeightsSnapshot,
    WeightsVersion,
)
from async_grpo.types.snapshots import NUM_ROWS
from async_grpo.util import deadlines
from async_grpo.util.errors import WeightSyncError, WorkerError
from async_grpo.weight_sync.buckets import check_whole
from async_grpo.weight_sync.update_checks import pack_samples

logger = logging.getLogger(__name__)
T = TypeVar("T")

UNPUBLISHED = "default"  # vLLM's name for the weights it read from the folder


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What an update cost the engine, and the engine's scores of the update's canary."""

    pause_seconds: float  # during which generation stood still
    recomputed_tokens: int  # of running requests, whose KV cache was dropped
    kept_tokens: int  # of running requests, whose KV cache was kept
    canary: tuple[NDArray[np.float32], ...]
    canary_problem: str  # what cannot be checked, and why; the weights serve nevertheless
    received_bytes: int = 0  # from the object store
    canary_experts: tuple[Experts, ...] = ()  # see `WeightsAck`


class EngineBrokenError(WorkerError):
    """The engine's process died, or its weights may be wrong: it must not serve again."""


class Engine:
    """One vLLM engine with its processes."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._has_ended = False  # on purpose, see `sleep`
        self._llm = self._begun()
        lora, seats = self._llm.vllm_config.lora_config, self._llm.vllm_config.scheduler_config
        self.max_lora_rank: int = lora.max_lora_rank if lora else 0
        self.max_num_seqs: int = seats.max_num_seqs - (NUM_ROWS if lora else 0)
        # None: weights replace the model's.
        self._adapters = Adapters(self._llm) if lora else None
        self._request_ids = itertools.count()
        self._running = set[InFlight]()
        self._staging = weights_update.StagedWeights()
        self._delay = weights_update.UpdateDelay(max_num_seqs=self.max_num_seqs)
        model_config = self._llm.model_config
        self.max_model_len: int = model_config.max_model_len
        self.vocab_size: int = model_config.get_vocab_size()
        self.dtype: str = str(model_config.dtype).removeprefix("torch.")
        self._shares_prompts = config.enable_prefix_caching
        self._keeps_caches = config.keep_kv_cache
        self._has_read_back = False  # has asked once which weights it cannot read back
        self._is_capturing = not model_config.is_moe  # its choices of experts, or has none

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process has ended."""
        return not self._has_ended and bool(self._llm.errored)

    def _begun(self) -> AsyncLLM:
        return AsyncLLM.from_engine_args(engine_args(self._config), usage_context=USAGE)

    async def sleep(self) -> None:
        """Give back the memory of weights and caches; requests that run end as by `abort`.

        On a device the weights go to the host (vLLM's level 1: its level 2 discards what it has
        derived of them too, which no update brings back). On a CPU the engine's processes end.

        Raises:
            EngineBrokenError: the engine died, or does not answer.
        """
        await self.abort()
        while self._running:  # noqa: ASYNC110 - the caller has a deadline
            await asyncio.sleep(weights_update.POLL_INTERVAL_S)
        if not current_platform.is_cpu():
            sleeping = self._llm.sleep(level=1)
            await self._transfer("sleep", sleeping, timeout_s=deadlines.ENGINE_SLEEPS_S)
            return
        self._has_ended = True
        await asyncio.to_thread(self._llm.shutdown)

    async def wake(self) -> bool:
        """Undo `sleep`; return whether the weights are still there, or else the folder's are."""
        if not current_platform.is_cpu():
            waking = self._llm.wake_up()
            await self._transfer("wake_up", waking, timeout_s=deadlines.ENGINE_SLEEPS_S)
            return True
        self._llm = await asyncio.to_thread(self._begun)
        self._has_ended, self._is_capturing = False, not self._llm.model_config.is_moe
        self._adapters = Adapters(self._llm) if self._adapters else None
        return False

    def cpu_seconds(self) -> float:
        """CPU time of the engine's processes so far, which grows while they work."""
        spent_s = 0.0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                spent_s += sum(process.cpu_times()[:2])
        return spent_s

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        """Sample `request.num_samples` outputs, with an empty `text`.

        Cancelling this call ends them in the engine.

        Raises:
            ConfigError: vLLM cannot make a grammar of what the request asks for.
            WorkerError: the request cannot fit the model, or the answer cannot be trained on.
            EngineBrokenError: the engine died.
        """
        self._check_length(request)
        running = InFlight(request, next(self._request_ids))
        self._running.add(running)
        try:
            with _alive(), self._adapter_in_use() as (adapter, running.version):
                turns = await running.turns(self._llm, adapter)
        except VLLMValidationError as error:
            raise vllm_requests.no_grammar(error) from error
        except (EngineGenerateError, ValueError) as error:
            raise WorkerError(f"vLLM refused question {request.ordinal}: {error}") from error
        finally:
            self._running.remove(running)
        self._delay.ended(began_at=running.began_at)
        return turns

    def _adapter_in_use(self) -> AbstractContextManager[InUse]:
        return self._adapters.in_use() if self._adapters else contextlib.nullcontext((None, None))

    async def _capture(self) -> None:
        """Let the engine tell which experts it chooses, before its first weights are served."""
        if self._is_capturing or not current_platform.is_cpu():  # elsewhere by `engine_args`
            return
        self._is_capturing = True
        reasons = await self._transfer("capture", self._llm.collective_rpc("capture_experts"))
        if reason := next(filter(None, reasons), ""):
            logger.warning("this engine does not tell which experts it chooses: %s", reason)

    def _check_length(self, request: GenerationRequest) -> None:
        num_prompt, num_output = len(request.input_token_ids), request.sampling.max_tokens
        if num_prompt + num_output > self.max_model_len:
            raise WorkerError(
                f"prompt + longest output must fit the worker's {self.max_model_len} tokens, got "
                f"{num_prompt} + {num_output}: start the worker with a larger --max-model-len, or "
                "lower --max-generation-tokens"
            )

    async def load(self, snapshot: WeightsSnapshot, fetch: weights_update.Fetch) -> Loaded:
        """Serve these weights from now on, and score the canary with them.

        The buckets are fetched, verified and staged while generation goes on, then loaded in one
        step, a little later if sequences are about to end. The other sequences continue with the
        new weights; their caches are recomputed or, with `keep_kv_cache`, kept.

        Raises:
            WeightSyncError: refused or incomplete; the old weights serve on.
            EngineBrokenError: the loading itself failed.
        """
        check_whole(snapshot.tensors, snapshot.buckets)
        await self.expect(snapshot)
        if self._adapters is not None:
            return await self._load_adapter(self._adapters, snapshot, fetch)
        staging = self._staging
        try:
            wanted = staging.begin(snapshot)
            await self._transfer("start_weight_update", self._llm.start_weight_update())
            await weights_update.fetch_into(staging, wanted, fetch)
            staged = {"path": staging.path, "tensors": [list(meta) for meta in snapshot.tensors]}
            mapping = self._llm.update_weights(WeightTransferUpdateRequest(staged))
            await self._transfer("update_weights", mapping)
            if not self._keeps_caches:
                await self._wait_for_ends()
        except BaseException:  # cancelled too: the engine must be ready for the next update
            staging.drop()
            await self._transfer("discard", self._llm.collective_rpc("discard_weight_update"))
            raise
        loaded = await self.apply(snapshot)
        staging.end()
        return replace(loaded, received_bytes=sum(each.size_bytes for each in wanted))

    async def _load_adapter(
        self, adapters: Adapters, snapshot: WeightsSnapshot, fetch: weights_update.Fetch
    ) -> Loaded:
        """Give new requests this adapter, while those that run keep theirs: nothing pauses."""
        await self._capture()
        adapter = await adapters.write(snapshot, fetch)
        await adapters.add(adapter, snapshot, transfer=self._transfer)
        # With sequences of --max-loras other adapters running it waits for the end of some.
        canary = vllm_requests.CanaryPass(self._llm, snapshot.canary, adapter=adapter.request)
        with _alive():
            await canary.queue()
            scores = await canary.scores()
        received = adapter.received_bytes
        return Loaded(0.0, 0, 0, scores, canary.problem, received, canary.experts)

    async def _wait_for_ends(self) -> None:
        states = self._llm.output_processor.request_states
        began = [running.began_at for running in self._running]
        await self._delay.wait(began, lambda: len(states))

    async def devices(self) -> tuple[str, ...]:
        """The ids of the NVIDIA devices that the engine's processes use, in the order of these."""
        found = await self._transfer("device_id", self._llm.collective_rpc("device_id"))
        return tuple(device for device in found if device)

    async def open_route(self, init_info: dict[str, object], *, timeout_s: float) -> None:
        """Meet the trainer over NCCL, for `apply`; generation stands still meanwhile.

        Raises:
            WeightSyncError: the two cannot meet; the old weights serve on.
            EngineBrokenError: the engine is still waiting.
        """
        request = WeightTransferInitRequest(init_info=init_info)
        call = self._llm.init_weight_transfer_engine(request)
        await self._transfer("init_weight_transfer_engine", call, timeout_s=timeout_s)

    async def expect(self, snapshot: WeightsSnapshot) -> None:
        """Raise `WeightSyncError` unless these are the model's parameters, or an adapter's."""
        if bool(snapshot.adapter) != (self._adapters is not None):
            raise WeightSyncError(
                "an engine takes adapters, or weights of its model where it was started without "
                f"--max-lora-rank, got {'an adapter' if snapshot.adapter else 'weights'}: start "
                f"the worker {'with' if snapshot.adapter else 'without'} --max-lora-rank"
            )
        if snapshot.adapter:
            return
        tensors = [list(meta) for meta in snapshot.tensors]
        call = self._llm.collective_rpc("expect_weights", args=(tensors, snapshot.rest_of_folder))
        await self._transfer("expect_weights", call)

    async def apply(
        self,
        snapshot: WeightsSnapshot,
        *,
        update_info: dict[str, object] | None = None,
        timeout_s: float = deadlines.WEIGHTS_APPLIED_S,
    ) -> Loaded:
        """Serve what was staged, or what arrives over NCCL as `update_info` describes.

        Generation stands still meanwhile, and the old weights are lost.

        Raises:
            EngineBrokenError: the loading failed, or did not end in time.
        """
        await self._capture()
        announced = (snapshot.rest_of_folder, pack_samples(snapshot.samples))
        canary, paused_at = vllm_requests.CanaryPass(self._llm, snapshot.canary), time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._llm.collective_rpc("announce_weights", args=announced)
                # The caches belong to the old weights: they are dropped, or (`KeptCaches`) only
                # running sequences go on with theirs.
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                cached = self._cached_tokens()
                if update_info is not None:
                    await self._llm.start_weight_update()
                    await self._llm.update_weights(WeightTransferUpdateRequest(update_info))
                await self._llm.finish_weight_update(weight_version=str(snapshot.version))
                await canary.queue()  # before generation resumes, or it would wait for a place
                await self._llm.resume_generation()
        except BaseException as error:  # cancelled too: half-loaded weights must never serve
            raise EngineBrokenError(
                f"loading weights {snapshot.version} failed: {error!r}"
            ) from error
        pause_seconds = time.monotonic() - paused_at
        self._delay.updated()
        with _alive():
            scores = await canary.scores()
        recomputed, kept = (0, cached) if self._keeps_caches else (cached, 0)
        problem = canary.problem or await self._readback_problem()
        return Loaded(
            pause_seconds, recomputed, kept, scores, problem, canary_experts=canary.experts
        )

    async def _readback_problem(self) -> str:
        """After the first update: which weights of later ones `Readback` cannot check."""
        if self._has_read_back:
            return ""
        call = self._llm.collective_rpc("unreadable_weights")
        names = sorted({*chain.from_iterable(await self._transfer("unreadable_weights", call))})
        self._has_read_back = True
        if not names:
            return ""
        return (
            f"vLLM holds {len(names)} parameters otherwise than they are sent, such as "
            f"{names[0]!r}: an update that misses them would not be told"
        )

    def _cached_tokens(self) -> int:
        states = self._llm.output_processor.request_states.values()
        return weights_update.cached_tokens(states, shares_prompts=self._shares_prompts)

    async def rename(self, version: WeightsVersion) -> None:
        """Call the weights that are served `version` from now on; they and the caches stay.

        Raises:
            EngineBrokenError: the engine died, or does not answer.
        """
        await self._capture()
        # The pause sends what was sampled under the old name, which the scheduler holds back.
        pausing = self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._transfer("pause_generation", pausing)
        try:
            renaming = self._llm.update_weight_version(str(version))
            await self._transfer("update_weight_version", renaming)
            if self._adapters is not None:
                self._adapters.version = version
        finally:
            await self._transfer("resume_generation", self._llm.resume_generation())

    async def _transfer(
        self, what: str, call: Awaitable[T], *, timeout_s: float = deadlines.BUCKET_STAGED_S
    ) -> T:
        try:
            with _alive():
                return await asyncio.wait_for(call, timeout_s)
        except EngineBrokenError:
            raise
        except TimeoutError:
            raise EngineBrokenError(
                f"the engine did not answer {what} within {timeout_s:g} s"
            ) from None
        except Exception as error:  # vLLM sends errors of its process as texts, without a type
            raise WeightSyncError(str(error)) from error

    async def abort(self) -> None:
        """End every running request; the callers get the tokens so far, marked `abort`."""
        names = chain.from_iterable(running.names.values() for running in self._running)
        await self._llm.abort([*names])

    def _tells_cuts(self, request: GenerationRequest) -> bool:
        """Whether it is asked for them; experts that are replayed are those of one engine."""
        of_one = self._llm.model_config.is_moe and request.sampling.with_experts
        return request.with_cuts and not of_one

    async def pulse(self, decode: Callable[[Sequence[int]], str] = lambda ids: "") -> Pulse:
        """The version served, the tokens of each request and what it has sampled since the last.

        `decode` gives the text of an output that has ended.

        Raises:
            EngineBrokenError: the process has died.
        """
        vllm, core = self._llm.output_processor, self._llm.engine_core
        with _alive():
            version = await self._llm.get_weight_version()
            before = {
                it: it.sequences(vllm) for it in self._running if self._tells_cuts(it.request)
            }
            asked = core.call_utility_async("scheduler", bool(before))
            made, num_tokens, running = await asked
        names = vllm.external_req_ids
        sequences = [
            (it.request.lease_id, [*chain(*(names.get(each, ()) for each in it.names.values()))])
            for it in self._running
        ]
        requests = vllm_requests.request_pulses(
            sequences, num_tokens=num_tokens, running=set(running)
        )
        for lease_id, cut in (await cuts_of(before, num_tokens, decode)).items():
            if lease_id in requests:
                requests[lease_id] = requests[lease_id]._replace(cut=cut)
        return Pulse("none" if version == UNPUBLISHED else version, made, requests)


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Within, the engine's death is an `EngineBrokenError`."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineBrokenError(f"the engine died: {error}") from error
