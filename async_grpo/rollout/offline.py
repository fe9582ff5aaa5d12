"""A model that samples a list of prompts, in this process and without Ray: vLLM's own `LLM`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.v1.engine.exceptions import EngineDeadError

from async_grpo.config.worker import WorkerConfig
from async_grpo.rollout.engine_args import engine_args
from async_grpo.rollout.sampling import sampling_params
from async_grpo.types import GenerationRequest, Turn
from async_grpo.util.errors import WorkerError

# What only workers of a run need: scheduler and extension for weights that change, and scores.
OF_WORKERS = ("scheduler_cls", "worker_extension_cls", "weight_transfer_config", "logprobs_mode")


class OfflineEngine:
    """The model of a folder with a worker's arguments, so that it samples what a worker would."""

    def __init__(self, config: WorkerConfig) -> None:
        args = engine_args(config)
        values: dict[str, Any] = {
            field.name: getattr(args, field.name)
            for field in dataclasses.fields(EngineArgs)
            if field.name not in OF_WORKERS
        }
        self._llm = LLM(**values)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Turn, ...]]:
        """The outputs of each request; without texts, log-probabilities and versions.

        Raises `WorkerError` when the engine dies.
        """
        params = []
        for request in requests:
            params.append(sampling_params(request))
            params[-1].logprobs, params[-1].flat_logprobs = None, False
        prompts = [tokens_input(request.input_token_ids.tolist()) for request in requests]
        try:
            answers = self._llm.generate(prompts, params, use_tqdm=False)
        except EngineDeadError as error:
            raise WorkerError(f"the engine died: {error}") from error
        return [tuple(map(_turn, answer.outputs)) for answer in answers]


def _turn(output: Any) -> Turn:
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    return Turn(token_ids, np.zeros(0, np.float32), (), output.finish_reason, text="")
