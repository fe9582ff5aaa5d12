"""The canary inside the engine: it scores fixed tokens with the weights that it has just loaded.

vLLM computes prompt log-probabilities from raw logits whatever the temperature, and never reads its
prefix cache for them, so the scores depend on these weights alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from async_grpo.types import CanaryRow
from async_grpo.util import deadlines
from async_grpo.util.errors import WorkerError

FIRST_IN_QUEUE = -1  # every other request has the priority 0


class CanaryPass:
    """One forward pass over the canary's rows.

    A failure is stored in `problem` and the new weights serve all the same; only the engine's death
    is raised.
    """

    def __init__(self, llm: AsyncLLM, rows: Sequence[CanaryRow]) -> None:
        self._llm = llm
        self._rows = rows
        self._answers: list[RequestOutputCollector] = []
        self.problem = ""

    async def queue(self) -> None:
        """Put the rows at the front of the engine's queue; the engine may be paused."""
        parameters = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # of the prompt's own tokens only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        with self._problem("vLLM refused the canary"):
            for index, row in enumerate(self._rows):
                answer = await self._llm.add_request(
                    f"canary-{index}",
                    tokens_input(row.token_ids.tolist()),
                    parameters,
                    priority=FIRST_IN_QUEUE,
                )
                self._answers.append(answer)

    async def scores(self) -> tuple[NDArray[np.float32], ...]:
        """Each row's log-probabilities from its second token on; empty if any row failed."""
        outputs: list[RequestOutput] = []
        with self._problem("the canary could not be scored"):
            try:
                async with asyncio.timeout(deadlines.CANARY_S):
                    for answer in self._answers:
                        outputs.append(await answer.get())
            finally:
                unanswered = [answer.request_id for answer in self._answers[len(outputs) :]]
                if unanswered:
                    await self._llm.abort(unanswered, internal=True)
            if not self.problem:
                pairs = zip(self._rows, outputs, strict=True)
                return tuple(_read(row, output) for row, output in pairs)
        return ()

    @contextlib.contextmanager
    def _problem(self, what: str) -> Iterator[None]:
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's boundary: the update itself is fine
            self.problem = f"{what}: {error!r}"


def _read(row: CanaryRow, output: RequestOutput) -> NDArray[np.float32]:
    scored = output.prompt_logprobs
    if scored is None or list(scored.token_ids) != row.token_ids[1:].tolist():
        raise WorkerError("vLLM must score every token of a canary row but the first, and did not")
    return np.asarray(scored.logprobs, dtype=np.float32)
