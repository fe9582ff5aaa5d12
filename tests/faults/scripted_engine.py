"""Stands in for `async_grpo.rollout.engine`: the same surface, tokens from a seed, no vLLM.

Around it everything is real, the worker's actor included. What is measured with it is the rest of
the system, thousands of batches of it, or a start that takes seconds less.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.types import (
    GenerationRequest,
    Pulse,
    Turn,
    VersionSpan,
    WeightsBucket,
    WeightsSnapshot,
    WeightsVersion,
)
from async_grpo.util.errors import WorkerError

ANSWER_S = 0.02
LOGPROB = -1.0
FIRST_ORDINARY_TOKEN = 2  # the tiny model's padding and end come first
Fetch = Callable[[WeightsBucket], Awaitable[NDArray[np.uint8]]]


class EngineBrokenError(WorkerError):
    """Never raised here; the worker looks for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What an update cost: nothing."""

    pause_seconds: float = 0.0
    recomputed_tokens: int = 0
    kept_tokens: int = 0
    canary: tuple[NDArray[np.float32], ...] = ()
    canary_problem: str = ""
    received_bytes: int = 0


class Engine:
    """Answers anything after a moment, with the version that it served when it was asked."""

    dtype = "float32"
    is_dead = False

    def __init__(self, config: WorkerConfig) -> None:
        facts = json.loads((Path(config.model_path) / "config.json").read_text())
        self.vocab_size: int = facts["vocab_size"]
        self.max_model_len: int = config.max_model_len or facts["max_position_embeddings"]
        self.max_num_seqs: int = config.capacity
        self.max_lora_rank = 0
        self._random = np.random.default_rng(os.getpid())
        self._version: WeightsVersion | None = None

    def cpu_seconds(self) -> float:
        """Of the worker's own process: there is no other."""
        return time.process_time()

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        """Outputs of random lengths and tokens, the same ones for the same seed."""
        assert self._version is not None
        version = self._version
        await asyncio.sleep(ANSWER_S)
        seed = request.seed
        random = self._random if seed is None else np.random.default_rng(seed)
        return tuple(self._completion(request, version, random) for _ in range(request.num_samples))

    def _completion(
        self, request: GenerationRequest, version: WeightsVersion, random: np.random.Generator
    ) -> Turn:
        sampling = request.sampling
        length = int(random.integers(1, sampling.max_tokens + 1))
        token_ids = random.integers(FIRST_ORDINARY_TOKEN, self.vocab_size, length, dtype=np.int32)
        is_finished = length < sampling.max_tokens
        if is_finished:
            token_ids[-1] = sampling.stop_token_ids[0]
        return Turn(
            token_ids=token_ids,
            logprobs=np.full(length, LOGPROB, np.float32),
            weights_versions=(VersionSpan(version, 0, length),),
            finish_reason="stop" if is_finished else "length",
            text="",
        )

    async def load(self, snapshot: WeightsSnapshot, fetch: Fetch) -> Loaded:
        """Fetch all bytes as an engine does, and forget them."""
        for bucket in snapshot.buckets:
            await fetch(bucket)
        self._version = snapshot.version
        return Loaded(canary=tuple(row.logprobs for row in snapshot.canary))

    async def rename(self, version: WeightsVersion) -> None:
        self._version = version

    async def pulse(self, decode: Callable[[list[int]], str]) -> Pulse:
        return Pulse(str(self._version or "none"))

    async def devices(self) -> tuple[str, ...]:
        return ()

    async def abort(self) -> None:
        """Every answer is a moment away."""
