"""A generation worker that notes when its engine made tokens, and what each part of a load took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout.generation_worker import GenerationWorker
from async_grpo.rollout.weights_update import fetch_bytes
from async_grpo.types import GenerationRequest, SamplingContract, WeightsAck, WeightsSnapshot

PROMPT = np.arange(3, 35, dtype=np.int32)
CALLS = {  # of vLLM's engine, by what they are in an update
    "start_weight_update": "begin",
    "update_weights": "map",
    "pause_generation": "pause",
    "finish_weight_update": "load",
    "resume_generation": "resume",
}
SETTLE_TOKENS = 8  # of every running sequence, before an update and after it
LOOK_S = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """One update, as the worker saw it."""

    ack: WeightsAck
    phases: dict[str, float]  # seconds
    gaps: NDArray[np.float64]  # [K, 2] of a step: when it was made, longest wait for its tokens
    began_at: float  # by time.monotonic, as all of them
    ended_at: float


class TimedWorker(GenerationWorker):
    """Calls are timed where the worker makes them; what it does stays the same."""

    def __init__(self, config: WorkerConfig) -> None:
        from async_grpo.rollout import engine_args  # imports vLLM, in this process alone

        engine_args.SCHEDULER = None  # vLLM's own, which tells of every step
        super().__init__(config, worker_id="timed")
        self._phases: dict[str, float] = {}
        self._gaps: list[tuple[float, float]] = []
        self._last: dict[str, float] = {}  # when each request got a token, by its id
        self._traffic: asyncio.Task[None] | None = None
        engine: Any = self._engine
        take = engine._staging.take
        engine._staging.take = lambda *arguments: self._timed_here(take, "stage", *arguments)
        for name, phase in CALLS.items():
            setattr(engine._llm, name, self._timed(getattr(engine._llm, name), phase))
        self._process = engine._llm.output_processor.process_outputs
        engine._llm.output_processor.process_outputs = self._note_step

    async def start_traffic(self, num_requests: int, *, max_tokens: int) -> None:
        """From now on so many requests run, each followed by another."""

        async def one_after_the_other() -> None:
            contract = SamplingContract(1.0, (), max_tokens)
            while True:
                await self.generate(GenerationRequest(0, 0, PROMPT, 1, contract, None))

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for index in range(num_requests):
                    group.create_task(one_after_the_other(), name=f"traffic-{index}")

        self._traffic = asyncio.create_task(all_of_them(), name="traffic")

    async def publish(self, snapshot: WeightsSnapshot, timeout_s: float) -> Load:
        """`load_weights`, in the midst of the traffic; called as a registry would be."""
        await self._move_on()
        self._phases.clear()
        began_at = time.monotonic()
        fetch = self._timed(fetch_bytes, "fetch")
        ack = await self._serve(snapshot, lambda: self._engine.load(snapshot, fetch))
        ended_at = time.monotonic()
        await asyncio.wait_for(self._move_on(), timeout_s)
        return Load(ack, dict(self._phases), np.array(self._gaps), began_at, ended_at)

    async def _move_on(self) -> None:
        """Until the engine has made some more steps, if it has anything to do."""
        goal = len(self._gaps) + SETTLE_TOKENS
        while self._traffic is not None and len(self._gaps) < goal:
            if self._traffic.done():
                self._traffic.result()
            await asyncio.sleep(LOOK_S)

    def _timed(self, call: Callable[..., Awaitable[Any]], phase: str) -> Callable[..., Any]:
        async def timed(*args: Any, **options: Any) -> Any:
            started = time.monotonic()
            try:
                return await call(*args, **options)
            finally:
                spent = time.monotonic() - started
                self._phases[phase] = self._phases.get(phase, 0.0) + spent

        return timed

    def _timed_here(self, call: Callable[..., Any], phase: str, *arguments: Any) -> None:
        """In the thread that stages."""
        started = time.monotonic()
        call(*arguments)
        self._phases[phase] = self._phases.get(phase, 0.0) + time.monotonic() - started

    def _note_step(self, outputs: Any, made_at: Any, *rest: Any, **options: Any) -> Any:
        """`made_at`: by the engine's process, on the same clock."""
        ids = [output.request_id for output in outputs if output.new_token_ids]
        waits = [made_at - self._last[name] for name in ids if name in self._last]
        if waits:
            self._gaps.append((made_at, max(waits)))
        self._last |= dict.fromkeys(ids, made_at)
        return self._process(outputs, made_at, *rest, **options)
