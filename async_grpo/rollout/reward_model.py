"""Reward models: a frozen sequence classifier of one label, asked as `services["reward"]`.

consumes:     texts, messages or token ids, as many at a time as the engine takes
produces:     one float each, the label's logit
waits for:    vLLM, which pools them together
unblocked by: the end of its forward pass, or the deadline
"""

from __future__ import annotations

import itertools
from typing import Any

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.environments.service import Service
from async_grpo.rollout.generation_worker import end_process
from async_grpo.util.errors import WorkerError


class RewardModel(Service):
    """The service of `--mode reward`; the worker's options say what classes of users do."""

    def __init__(self, config: WorkerConfig) -> None:
        # Not at the top: dispatchers import this file, and these imports take seconds.
        from transformers import AutoTokenizer
        from vllm.v1.engine.async_llm import AsyncLLM

        from async_grpo.rollout.engine_args import USAGE, engine_args

        self._tokenizer = AutoTokenizer.from_pretrained(config.model_path)
        self._llm = AsyncLLM.from_engine_args(engine_args(config), usage_context=USAGE)
        self._request_ids = itertools.count()

    async def answer(self, request: Any) -> float:
        """The score of a text, of messages (by the chat template), or of token ids.

        Raises `WorkerError` for what the model cannot read; a dead engine ends the process.
        """
        from vllm.inputs import tokens_input
        from vllm.pooling_params import PoolingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        token_ids = self._token_ids(request)
        longest = self._llm.model_config.max_model_len
        if not 0 < len(token_ids) <= longest:
            raise WorkerError(
                f"a reward model must read 1 to {longest} tokens, got {len(token_ids)}: shorten "
                "what it is asked, or raise --max-model-len of its worker"
            )
        params = PoolingParams(task="classify", use_activation=False)  # the logit, no sigmoid
        name = str(next(self._request_ids))
        try:
            *_, last = [it async for it in self._llm.encode(tokens_input(token_ids), params, name)]
        except EngineDeadError as error:
            end_process(f"the reward model's worker ends: {error}")
        return float(last.outputs.data)

    def _token_ids(self, request: Any) -> list[int]:
        if isinstance(request, str):
            return list(self._tokenizer(request)["input_ids"])
        if len(request) and isinstance(request[0], dict):
            found = self._tokenizer.apply_chat_template(list(request), return_dict=False)
            return list(found)
        return [int(each) for each in request]
