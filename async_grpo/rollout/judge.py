"""Judges: a model that is never trained, or a service at an address; both answer messages.

consumes:     messages
produces:     the model's next message, and its cost in tokens
waits for:    the engine, or the service
unblocked by: the answer's end, or the deadline
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.environments.causes import HTTP_AWAY
from async_grpo.environments.service import Service
from async_grpo.rollout.generation_worker import GenerationWorker
from async_grpo.types import (
    GenerationRequest,
    JudgeAnswer,
    JudgeRequest,
    SamplingContract,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.deadlines import JUDGE_ANSWER_S
from async_grpo.util.errors import ServerAway, WorkerError

TRIES_AGAIN = 3  # after a rate limit, an error of the service, a lost connection
OWN = WeightsVersion(0, 0)  # of the weights with which the engine was started


class JudgeWorker(GenerationWorker):
    """Wrap as `GenerationWorker`."""

    def __init__(self, config: WorkerConfig, *, worker_id: str) -> None:
        super().__init__(config, worker_id=worker_id)
        from async_grpo.environments.chat.find import find_renderer
        from async_grpo.model.model_folder import hash_model

        self._renderer = find_renderer(config.model_path)
        self._model_hash = hash_model(config.model_path)

    async def info(self) -> WorkerInfo:
        """See `GenerationWorker`; no trainer gives these weights a version."""
        if self._version is None:
            await self._alive(self._engine.rename(OWN))
            self._version = OWN
        return replace(await super().info(), role=self._config.role, model_hash=self._model_hash)

    async def answer(self, request: JudgeRequest) -> JudgeAnswer:
        """One answer; raises `WorkerError` or `MessagesError` for a request without one."""
        prompt = self._renderer.render(request.messages)
        sampling = SamplingContract(
            request.temperature, self._renderer.stop_token_ids, request.max_tokens
        )
        asked = GenerationRequest(
            0, 0, np.array(prompt, np.int32), 1, sampling, lease_id=request.lease_id
        )
        (turn,) = await self.generate(asked)
        reply = self._renderer.parse(turn.token_ids.tolist(), prompt_ids=prompt)
        return JudgeAnswer(reply.content, len(prompt) + len(turn.token_ids))


class RemoteJudge(Service):
    """A judge at an OpenAI-compatible address; only the process of its worker has the key."""

    def __init__(
        self, config: WorkerConfig, *, key: str, timeout_s: float = JUDGE_ANSWER_S
    ) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._client = AsyncOpenAI(
            base_url=config.judge_url, api_key=key, timeout=None, max_retries=TRIES_AGAIN
        )

    async def answer(self, request: JudgeRequest) -> JudgeAnswer:
        """One answer; raises `WorkerError`, or `ServerAway` if none comes in time."""
        who, messages = f"the judge at {self._config.judge_url}", list[Any](request.messages)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.chat.completions.create(
                    model=self._config.model_path,
                    messages=messages,
                    temperature=request.temperature,
                    max_completion_tokens=request.max_tokens,
                )
        except TimeoutError:
            raise ServerAway(f"{who} gave no answer within {self._timeout_s:g} s") from None
        except OpenAIError as error:
            is_away = isinstance(error, APIConnectionError) or (
                isinstance(error, APIStatusError) and error.status_code in HTTP_AWAY
            )
            raise (ServerAway if is_away else WorkerError)(f"{who}: {error}") from error
        text = answer.choices[0].message.content if answer.choices else None
        return JudgeAnswer(text or "", answer.usage.total_tokens if answer.usage else 0)
