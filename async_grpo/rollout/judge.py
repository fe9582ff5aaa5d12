"""A judge with a model of its own, which is asked in messages and never trained.

consumes:     messages
produces:     what the model says next, and what it cost
waits for:    the engine, as every worker that generates
unblocked by: the answer's end
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout.generation_worker import GenerationWorker
from async_grpo.types import (
    GenerationRequest,
    JudgeAnswer,
    JudgeRequest,
    SamplingContract,
    WeightsVersion,
    WorkerInfo,
)

OWN = WeightsVersion(0, 0)  # what the engine calls the weights that it was started with


class JudgeWorker(GenerationWorker):
    """Wrap as `GenerationWorker`."""

    def __init__(self, config: WorkerConfig, *, worker_id: str) -> None:
        super().__init__(config, worker_id=worker_id)
        from async_grpo.environments.chat.find import find_renderer
        from async_grpo.model.model_folder import hash_model

        self._role = config.role
        self._renderer = find_renderer(config.model_path)
        self._model_hash = hash_model(config.model_path)

    async def info(self) -> WorkerInfo:
        """See `GenerationWorker`; no trainer gives these weights a version."""
        if self._version is None:
            await self._alive(self._engine.rename(OWN))
            self._version = OWN
        return replace(await super().info(), role=self._role, model_hash=self._model_hash)

    async def judge(self, request: JudgeRequest) -> JudgeAnswer:
        """One answer; raises `WorkerError` and `MessagesError` for what cannot be answered."""
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
