"""Engines without a run: a model whose weights stay, in this process and without Ray.

Each takes a worker's options, so that it samples what a worker would.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence

import numpy as np
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout.engine_args import USAGE, engine_args
from async_grpo.rollout.vllm_requests import no_grammar, read_logprobs, sampling_params
from async_grpo.types import GenerationRequest, Turn
from async_grpo.types.samples import FinishReason
from async_grpo.util.errors import WorkerError

# Arguments that only workers of a run need, for weights that change and for scores.
OF_WORKERS = ("scheduler_cls", "worker_extension_cls", "weight_transfer_config", "logprobs_mode")


class ServedEngine:
    """Answers many requests at a time, each in pieces as it is sampled."""

    def __init__(self, config: WorkerConfig) -> None:
        self._llm = AsyncLLM.from_engine_args(engine_args(config), usage_context=USAGE)
        self._request_ids = itertools.count()
        self.max_model_len: int = self._llm.model_config.max_model_len

    @property
    def is_dead(self) -> bool:
        """Whether the engine has ended, and will answer no request any more."""
        return bool(self._llm.errored)

    async def pieces(self, request: GenerationRequest) -> AsyncIterator[Turn]:
        """One output in pieces as they are sampled, without texts and versions.

        Raises:
            ConfigError: vLLM cannot make a grammar of what the request asks for.
            WorkerError: the engine died, or refused the request.
        """
        params = sampling_params(request)
        params.output_kind = RequestOutputKind.DELTA
        prompt = tokens_input(request.input_token_ids.tolist())
        try:
            async for answer in self._llm.generate(prompt, params, str(next(self._request_ids))):
                (output,) = answer.outputs
                token_ids = np.asarray(output.token_ids, dtype=np.int32)
                ended: FinishReason = output.finish_reason or "length"  # more may come
                yield Turn(token_ids, read_logprobs(output), (), ended, text="")
        except EngineDeadError as error:
            raise WorkerError(f"the engine died: {error}") from error
        except VLLMValidationError as error:
            raise no_grammar(error) from error
        except (EngineGenerateError, ValueError) as error:
            raise WorkerError(f"vLLM refused a request: {error}") from error

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()


class OfflineEngine:
    """Samples a list of prompts at once, by vLLM's `LLM`."""

    def __init__(self, config: WorkerConfig) -> None:
        args = engine_args(config)
        values: dict[str, object] = {
            field.name: getattr(args, field.name)
            for field in dataclasses.fields(EngineArgs)
            if field.name not in OF_WORKERS
        }
        self._llm = LLM(**values)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Turn, ...]]:
        """The outputs of each request, without texts, log-probabilities and versions.

        Raises `WorkerError` when the engine dies.
        """
        params = list(map(sampling_params, requests))
        for each in params:
            each.logprobs, each.flat_logprobs = None, False
        prompts = [tokens_input(request.input_token_ids.tolist()) for request in requests]
        try:
            answers = self._llm.generate(prompts, params, use_tqdm=False)
        except EngineDeadError as error:
            raise WorkerError(f"the engine died: {error}") from error
        return [tuple(map(_turn, answer.outputs)) for answer in answers]


def _turn(output: CompletionOutput) -> Turn:
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    return Turn(token_ids, np.zeros(0, np.float32), (), output.finish_reason, text="")
