"""Samples outputs with a vLLM engine; each worker is a Ray actor.

consumes:     questions as token ids with their sampling contract, snapshots of weights
produces:     groups of completions with behaviour log-probabilities and weight versions per token
waits for:    the engine, which decodes every running sequence of all requests together
unblocked by: the end of a group's last sequence; new weights end no request
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

import ray

from async_grpo.config.roles import GENERATION
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.core_shares import PASSIVE, THREADS
from async_grpo.rollout import early_process
from async_grpo.types import (
    GenerationRequest,
    Pulse,
    Turn,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import ConfigError, WeightSyncError
from async_grpo.util.imports import without_collection
from async_grpo.weight_sync.sync_report import canary_complaint

if TYPE_CHECKING:
    from async_grpo.rollout.engine import Loaded

logger = logging.getLogger(__name__)
T = TypeVar("T")
ENGINE_POLL_INTERVAL_S = 0.5
# vLLM reads these while it is imported, so they must be set before a worker's process begins.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# The first request would compile for seconds, which pays off on a GPU only.
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


def worker_environment(*, on_cpu: bool = True) -> dict[str, str]:
    """Environment variables for the process of a `GenerationWorker` (Ray's `env_vars`)."""
    threads = {THREADS: os.environ.get(THREADS, "1") if on_cpu else "1", **PASSIVE}
    return ENVIRONMENT | threads | (CPU_ENVIRONMENT if on_cpu else {})


class GenerationWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; each request runs as another coroutine."""

    def __init__(self, config: WorkerConfig, *, worker_id: str) -> None:
        # Not at the top: dispatchers import this file, and these imports take seconds.
        began = time.monotonic()
        with without_collection():
            from transformers import AutoTokenizer

            from async_grpo.model.model_folder import encoding_hash
            from async_grpo.rollout.engine import Engine
            from async_grpo.rollout.weights_update import fetch_bytes

        self._config = config
        self._worker_id = worker_id
        self._temperature = config.temperature or None
        self._fetch = fetch_bytes
        imported = time.monotonic()
        self._tokenizer = AutoTokenizer.from_pretrained(config.model_path)
        self._tokenizer_hash = encoding_hash(self._tokenizer)
        if early_process.begun:
            from vllm.v1.engine import utils

            early_process.begun.give_to(utils)
        self._engine = Engine(config)
        ready = time.monotonic()
        import_s = early_process.import_s + imported - began
        self._startup = (("importing", import_s), ("building the engine", ready - imported))
        self._version: WeightsVersion | None = None
        self._loading = asyncio.Lock()
        self._answering: asyncio.Task[Pulse] | None = None  # the engine's answer to a ping
        self._ack: WeightsAck | None = None  # for the version served
        self._is_asleep = False
        self._has_loaded = False  # weights that are not the folder's

    async def info(self) -> WorkerInfo:
        """Who this worker is; answers once its engine runs."""
        return WorkerInfo(
            worker_id=self._worker_id,
            role=GENERATION,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            model_path=self._config.model_path,
            vocab_size=self._engine.vocab_size,
            capacity=float(self._engine.max_num_seqs),
            overhead=float(self._config.overhead(self._engine.max_num_seqs)),
            max_model_len=self._engine.max_model_len,
            tokenizer_hash=self._tokenizer_hash,
            temperature=self._temperature,
            dtype=self._engine.dtype,
            max_lora_rank=self._engine.max_lora_rank,
            max_loras=self._config.max_loras if self._engine.max_lora_rank else 0,
            sleeps=self._config.colocated,
            devices=await self._alive(self._engine.devices()),
            lease_s=self._config.worker_lease_s,
            startup=self._startup,
        )

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """Answer after `after_s` with the served version and the tokens of each request.

        A worker whose engine has died exits instead; one whose engine is frozen does not answer.
        """
        deadline = time.monotonic() + after_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._engine.is_dead:
                end_process(f"worker {self._worker_id} ends: its engine has died")
            await asyncio.sleep(min(left_s, ENGINE_POLL_INTERVAL_S))
        return await self._pulse_of_engine()

    async def _pulse_of_engine(self) -> Pulse:
        """The engine's answer, or this worker's while the engine sleeps or loads weights."""
        if self._is_asleep:
            return Pulse(str(self._version or "none"))
        if self._answering is None:
            self._answering = asyncio.create_task(
                self._alive(self._engine.pulse(self._decode)), name="pulse-of-engine"
            )
        answering, spent_s = self._answering, self._engine.cpu_seconds()
        while not (await asyncio.wait({answering}, timeout=ENGINE_POLL_INTERVAL_S))[0]:
            # A frozen engine spends no CPU time; the deadlines of loading are too long to wait for.
            if self._loading.locked() and self._engine.cpu_seconds() > spent_s:
                return Pulse(str(self._version or "none"))
        if self._answering is answering:  # what it tells of sequences is told once, and never lost
            self._answering = None
        return answering.result()

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        """Sample one group.

        Raises:
            ConfigError: its temperature is not the one that the worker serves.
            WorkerError: the request cannot be served, or its answer cannot be trained on.
        """
        wanted = request.sampling.temperature
        if self._temperature is not None and wanted != self._temperature:
            raise ConfigError(
                f"worker {self._worker_id} serves the temperature {self._temperature} only, got "
                f"{wanted}: give worker and trainer the same --temperature"
            )
        completions = await self._alive(self._engine.generate(request))
        texts = self._tokenizer.batch_decode(
            [completion.token_ids for completion in completions], skip_special_tokens=True
        )
        pairs = zip(completions, texts, strict=True)
        return tuple(
            replace(completion, text=text, worker_id=self._worker_id) for completion, text in pairs
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        """Serve a snapshot, while requests run; a snapshot that is not newer changes nothing.

        Raises:
            WeightSyncError: refused or incomplete; the old weights serve on.
        """
        return await self._serve(snapshot, lambda: self._engine.load(snapshot, self._fetch))

    async def sleep(self) -> None:
        """Give back what the engine holds of its devices, until the next weights wake it."""
        async with self._loading:
            if self._is_asleep:
                return
            self._is_asleep = True  # pings no longer ask the engine
            if self._answering is not None:
                await asyncio.wait({self._answering})
            await self._alive(self._engine.sleep())

    async def _wake(self) -> bool:
        """Wake the engine if it sleeps; whether it has the weights that it served before."""
        if not self._is_asleep:
            return True
        kept = await self._alive(self._engine.wake()) or not self._has_loaded
        self._is_asleep = False
        return kept

    async def open_route(self, init_info: dict[str, object], timeout_s: float) -> None:
        """Meet the trainer over NCCL.

        Raises:
            WeightSyncError: the two cannot meet.
        """
        async with self._loading:
            await self._alive(self._engine.open_route(init_info, timeout_s=timeout_s))

    async def expect_weights(self, snapshot: WeightsSnapshot) -> None:
        """Raise `WeightSyncError` unless `receive_weights` of these could be served."""
        if self._version is not None and snapshot.version <= self._version:
            raise WeightSyncError(
                "weights must be newer than those that are served: send later ones"
            )
        if snapshot.adapter:
            raise WeightSyncError("an adapter is fetched, not received: publish it by load_weights")
        await self._alive(self._engine.expect(snapshot))

    async def receive_weights(
        self, snapshot: WeightsSnapshot, update_info: dict[str, object], timeout_s: float
    ) -> None:
        """Take a snapshot over NCCL; unless all of it arrives in time, this process ends."""
        await self._serve(
            snapshot,
            lambda: self._engine.apply(snapshot, update_info=update_info, timeout_s=timeout_s),
            transport="nccl",
        )

    async def _serve(
        self,
        snapshot: WeightsSnapshot,
        load: Callable[[], Coroutine[object, object, Loaded]],
        *,
        transport: str = "object_store",
    ) -> WeightsAck:
        started_at = time.monotonic()
        async with self._loading:
            served, dtype, kept = self._version, self._engine.dtype, await self._wake()
            if self._ack is not None and snapshot.version == served and kept:
                return self._ack  # a device transport has sent these weights before
            if served is not None and snapshot.version < served and kept:
                return WeightsAck(self._worker_id, served, 0.0, 0.0, dtype=dtype)
            ack = WeightsAck(
                self._worker_id, snapshot.version, 0.0, 0.0, dtype=dtype, transport=transport
            )
            if snapshot.is_of_folder and served is not None:
                raise WeightSyncError(
                    f"weights of the folder must come before all others, {served} are served: "
                    "start another worker"
                )
            if snapshot.is_of_folder or (kept and served is not None and snapshot.equals(served)):
                await self._alive(self._engine.rename(snapshot.version))
            else:
                ack = replace(ack, **asdict(await self._alive(load())))
                self._has_loaded = True
                if complaint := ack.canary_problem or canary_complaint(
                    snapshot.canary, ack.canary, dtype=dtype
                ):
                    logger.warning("worker %s: %s", self._worker_id, complaint)
            self._version = snapshot.version
            self._ack = replace(ack, seconds=time.monotonic() - started_at)
            logger.info("serves weights %s after %.2f s", self._version, self._ack.seconds)
            return self._ack

    async def abort_all(self) -> None:
        """End every running request, when the caller is gone."""
        await self._engine.abort()

    async def _alive(self, call: Coroutine[object, object, T]) -> T:
        """The result of an engine call; a broken engine ends this process, which Ray notices."""
        from async_grpo.rollout.engine import EngineBrokenError

        try:
            return await call
        except EngineBrokenError as error:
            end_process(f"worker {self._worker_id} ends: {error}")


def end_process(reason: str) -> NoReturn:
    """End a worker whose engine has died; its dispatcher starts another."""
    logger.critical(reason)
    os._exit(1)
