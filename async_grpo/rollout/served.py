"""A model whose weights stay, answering many at a time in this process and without Ray."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import numpy as np
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from async_grpo.config.worker import WorkerConfig
from async_grpo.rollout.completions import read_logprobs
from async_grpo.rollout.engine_args import USAGE, engine_args
from async_grpo.rollout.sampling import sampling_params
from async_grpo.types import GenerationRequest, Turn
from async_grpo.types.samples import FinishReason
from async_grpo.util.errors import WorkerError


class ServedEngine:
    """The model of a folder with a worker's arguments, so that it samples what a worker would."""

    def __init__(self, config: WorkerConfig) -> None:
        self._llm = AsyncLLM.from_engine_args(engine_args(config), usage_context=USAGE)
        self._request_ids = itertools.count()
        self.max_model_len: int = self._llm.model_config.max_model_len

    @property
    def is_dead(self) -> bool:
        """Whether it will answer nobody any more."""
        return bool(self._llm.errored)

    async def pieces(self, request: GenerationRequest) -> AsyncIterator[Turn]:
        """One output as it is sampled, without texts and versions.

        Raises `WorkerError` when the engine dies, or takes no such request.
        """
        params = sampling_params(request)
        params.output_kind = RequestOutputKind.DELTA
        prompt = tokens_input(request.input_token_ids.tolist())
        try:
            async for answer in self._llm.generate(prompt, params, str(next(self._request_ids))):
                (output,) = answer.outputs
                token_ids = np.asarray(output.token_ids, dtype=np.int32)
                ended: FinishReason = output.finish_reason or "length"  # cut, for now
                yield Turn(token_ids, read_logprobs(output), (), ended, text="")
        except EngineDeadError as error:
            raise WorkerError(f"the engine died: {error}") from error
        except (EngineGenerateError, ValueError) as error:
            raise WorkerError(f"vLLM refused a request: {error}") from error

    def close(self) -> None:
        """End its processes."""
        self._llm.shutdown()
