"""Samples outputs with a vLLM engine, one worker a Ray actor.

consumes:     questions as token ids with their sampling contract, snapshots of weights
produces:     groups of completions with behaviour log-probabilities and weight versions per token
waits for:    the engine, which decodes every running sequence of all requests together
unblocked by: the end of a group's last sequence; new weights never end a request
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import ray

from async_grpo import cluster
from async_grpo.errors import WorkerError
from async_grpo.rollout.settings import EngineConfig, worker_environment
from async_grpo.types import (
    Completion,
    GenerationRequest,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)

__all__ = ["EngineConfig", "GenerationWorker", "worker_environment"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class GenerationWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; every request is a coroutine of its own."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        worker_id: str,
        overhead_seqs: int = 0,
        temperature: float | None = None,
    ) -> None:
        # Not at the top: whoever starts workers imports this file, and these take seconds.
        from transformers import AutoTokenizer

        from async_grpo.rollout.engine import Engine

        self._config = config
        self._worker_id = worker_id
        self._overhead_seqs = overhead_seqs
        self._temperature = temperature
        self._tokenizer = AutoTokenizer.from_pretrained(config.model_path)
        self._engine = Engine(config)
        self._version: WeightsVersion | None = None
        self._loading = asyncio.Lock()

    async def info(self) -> WorkerInfo:
        """Who this worker is; answers once its engine runs."""
        return WorkerInfo(
            worker_id=self._worker_id,
            role="generation",
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            model_path=self._config.model_path,
            vocab_size=self._engine.vocab_size,
            capacity=float(self._config.max_num_seqs),
            overhead=float(self._overhead_seqs),
            max_model_len=self._engine.max_model_len,
            temperature=self._temperature,
        )

    async def ping(self) -> str:
        """The version served, or `none`; a worker whose engine died ends itself instead."""
        return str(await self._alive(self._engine.version()) or "none")

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Sample one group.

        Raises:
            WorkerError: the request cannot be served, or its answer cannot be trained on.
        """
        self._check(request)
        completions = await self._alive(self._engine.generate(request))
        texts = self._tokenizer.batch_decode(
            [completion.token_ids for completion in completions], skip_special_tokens=True
        )
        pairs = zip(completions, texts, strict=True)
        return tuple(replace(completion, text=text) for completion, text in pairs)

    def _check(self, request: GenerationRequest) -> None:
        if self._version is None:
            raise WorkerError(
                f"worker {self._worker_id} must not generate before it serves published weights: "
                "register it first"
            )
        wanted = request.sampling.temperature
        if self._temperature is not None and wanted != self._temperature:
            raise WorkerError(
                f"worker {self._worker_id} serves the temperature {self._temperature} only, got "
                f"{wanted}: give worker and trainer the same --temperature"
            )

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        """Serve a snapshot, while requests are running; one that is not newer changes nothing.

        Raises:
            WeightSyncError: refused or incomplete; the old weights serve on.
        """
        started_at, pause_seconds = time.monotonic(), 0.0
        async with self._loading:
            if self._version is None or snapshot.version > self._version:
                pause_seconds = await self._alive(self._engine.load(snapshot, cluster.fetch_bytes))
                self._version = snapshot.version
            seconds = time.monotonic() - started_at
            logger.info("serves weights %s after %.2f s", self._version, seconds)
            return WeightsAck(self._worker_id, self._version, seconds, pause_seconds)

    async def abort_all(self) -> None:
        """End every running request, for a caller that is gone."""
        await self._engine.abort()

    async def shutdown(self) -> None:
        """End the engine's processes; the actor itself is ended by its owner."""
        self._engine.shutdown()

    async def _alive(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of an engine call; a broken engine ends this process, so that Ray sees it."""
        from async_grpo.rollout.engine import EngineBrokenError

        try:
            return await call
        except EngineBrokenError as error:
            _end_process(f"worker {self._worker_id} ends: {error}")


def _end_process(reason: str) -> NoReturn:
    logger.critical(reason)
    os._exit(1)
