"""A judge at an OpenAI-compatible address; this process alone knows its key.

consumes:     messages
produces:     what the service answers, and what it says that it cost
waits for:    the service, whose client tries again what may pass
unblocked by: its answer, or the deadline
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

import ray
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.types import JudgeAnswer, JudgeRequest, Pulse, WorkerInfo
from async_grpo.util.deadlines import JUDGE_ANSWER_S
from async_grpo.util.errors import ServerAway, WorkerError

AWAY = (429, 502, 503, 504)  # of HTTP: what has not answered may answer later
TRIES_AGAIN = 3  # after a rate limit, an error of the service, a lost connection


class RemoteJudge:
    """Wrap with `ray.remote(max_concurrency=1000)`; every request is a coroutine of its own."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        key: str,
        worker_id: str,
        timeout_s: float = JUDGE_ANSWER_S,
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._client = AsyncOpenAI(
            base_url=config.judge_url, api_key=key, timeout=None, max_retries=TRIES_AGAIN
        )
        self._asking: set[asyncio.Task[object]] = set()

    async def info(self) -> WorkerInfo:
        """Who this worker is."""
        model = f"{self._config.model_path} at {self._config.judge_url}"
        return WorkerInfo(
            worker_id=self._worker_id,
            role=self._config.role,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            model_path=model,
            vocab_size=0,
            capacity=float(self._config.capacity),
            overhead=0.0,
            max_model_len=0,
            model_hash=hashlib.sha256(model.encode()).hexdigest(),
            lease_s=self._config.worker_lease_s,
        )

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """This process lives; nobody knows how far the service is."""
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self) -> None:
        """End every running request, for a caller that is gone."""
        for asking in self._asking:
            asking.cancel()

    async def judge(self, request: JudgeRequest) -> JudgeAnswer:
        """One answer; raises `WorkerError`, or `ServerAway` where there is none in time."""
        asking = asyncio.create_task(self._ask(request), name="ask-the-service")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            return await asyncio.wait_for(asking, self._timeout_s)
        except TimeoutError:
            who = f"the judge at {self._config.judge_url}"
            raise ServerAway(f"{who} gave no answer within {self._timeout_s:g} s") from None

    async def _ask(self, request: JudgeRequest) -> JudgeAnswer:
        messages: Any = list(request.messages)
        try:
            answer = await self._client.chat.completions.create(
                model=self._config.model_path,
                messages=messages,
                temperature=request.temperature,
                max_completion_tokens=request.max_tokens,
            )
        except OpenAIError as error:
            is_away = isinstance(error, APIConnectionError) or (
                isinstance(error, APIStatusError) and error.status_code in AWAY
            )
            kind = ServerAway if is_away else WorkerError
            raise kind(f"the judge at {self._config.judge_url}: {error}") from error
        text = answer.choices[0].message.content if answer.choices else None
        return JudgeAnswer(text or "", answer.usage.total_tokens if answer.usage else 0)
