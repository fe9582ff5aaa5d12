"""Writes requests for vLLM, and reads its answers: a sampled output becomes a `Turn`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from async_grpo.rollout.expert_choices import WANTED
from async_grpo.rollout.scheduler import FIRST_IN_QUEUE
from async_grpo.types import (
    CanaryRow,
    Experts,
    GenerationRequest,
    RequestPulse,
    Turn,
    VersionSpan,
    WeightsVersion,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, WorkerError

MAX_SEED = 2**63 - 1


def sampling_params(request: GenerationRequest, index: int | None = None) -> SamplingParams:
    """Sampling by temperature, which the trainer can score; evaluations may add top-p.

    `index`: of one output that is begun, and goes on; None: of all outputs.
    """
    sampling, seed = request.sampling, request.seed
    num_begun = 0 if index is None else len(request.begun[index].token_ids)
    grammar = StructuredOutputsParams(**json.loads(sampling.grammar)) if sampling.grammar else None
    if seed is not None:  # vLLM gives output i the seed + i
        seed += num_begun * request.num_samples + (index or 0)  # the first numbers have been used
        seed %= MAX_SEED - request.num_samples
    return SamplingParams(
        n=request.num_samples if index is None else 1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens - num_begun,
        stop_token_ids=list(sampling.stop_token_ids),
        # Only the contract's stop ids end an output; a grammar ends with any that vLLM knows.
        ignore_eos=grammar is None,
        seed=seed,
        logprobs=0,  # that of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=grammar,
        extra_args={WANTED: True} if sampling.with_experts else None,
    )


def no_grammar(error: BaseException) -> ConfigError:
    """The error for a request whose grammar vLLM refuses; the first of its attempts says why."""
    while error.__context__ is not None:
        error = error.__context__
    return ConfigError(f"a schema must be one that vLLM can make a grammar of, got: {error}")


def read_completion(output: CompletionOutput, version: WeightsVersion | None = None) -> Turn:
    """The output with an empty text; raises `WorkerError` when it cannot be trained on.

    `version`: that of the adapter that it was sampled with from the first token to the last.
    """
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    logprobs = read_logprobs(output)
    if version is None:
        versions = _version_spans(output)
    else:
        versions = (VersionSpan(version, 0, len(token_ids)),) if len(token_ids) else ()
    experts = output.routed_experts
    if experts is not None:  # [P+L-1, layers, chosen]
        experts = experts.reshape(len(experts), -1)
    return Turn(token_ids, logprobs, versions, output.finish_reason, text="", experts=experts)


def read_logprobs(output: CompletionOutput) -> NDArray[np.float32]:
    """[L] of the sampled tokens; raises `WorkerError` when one is missing or not finite."""
    flat = output.logprobs
    if flat is None or list(flat.token_ids) != list(output.token_ids):
        raise WorkerError(
            "vLLM must report the log-probability of every sampled token, and did not"
        )
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        bad = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise WorkerError(
            f"log-probabilities must be finite, got {logprobs[bad]} at output token {bad}: "
            "the weights may have diverged"
        )
    return logprobs


def _version_spans(output: CompletionOutput) -> tuple[VersionSpan, ...]:
    """Spans over [0, L); raises `WorkerError` for tokens sampled before any published weights."""
    if output.weight_versions is None:
        raise WorkerError("vLLM must report the weights of every output token, and did not")
    try:
        return tuple(
            VersionSpan(WeightsVersion.parse(span.version), span.start, span.end)
            for span in output.weight_versions
        )
    except ValueError:
        raise WorkerError(
            "a worker must not generate before it serves published weights: register it first"
        ) from None


class CanaryPass:
    """One forward pass over the canary's rows, with the weights that the engine has just loaded.

    vLLM computes prompt log-probabilities from raw logits whatever the temperature, and never reads
    its prefix cache for them, so the scores depend on these weights alone.

    A failure is stored in `problem`, and the new weights serve nevertheless; only the death of
    the engine is raised.
    """

    def __init__(
        self, llm: AsyncLLM, rows: Sequence[CanaryRow], *, adapter: LoRARequest | None = None
    ) -> None:
        self._llm = llm
        self._adapter = adapter
        self._rows = rows
        self._answers: list[RequestOutputCollector] = []
        self.problem = ""
        self.experts: tuple[Experts, ...] = ()  # see `WeightsAck`

    async def queue(self) -> None:
        """Put the rows at the front of the engine's queue; the engine may be paused."""
        parameters = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # those of the prompt's tokens only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={WANTED: True},
        )
        with self._problem("vLLM refused the canary"):
            for index, row in enumerate(self._rows):
                answer = await self._llm.add_request(
                    f"canary-{index}",
                    tokens_input(row.token_ids.tolist()),
                    parameters,
                    lora_request=self._adapter,
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
                found = [output.outputs[0].routed_experts for output in outputs]
                if all(experts is not None for experts in found):
                    self.experts = tuple(np.asarray(experts)[:-1] for experts in found)
                pairs = zip(self._rows, outputs, strict=True)
                return tuple(_read_row(row, output) for row, output in pairs)
        return ()

    @contextlib.contextmanager
    def _problem(self, what: str) -> Iterator[None]:
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:  # of vLLM, which may raise any: the update itself succeeded
            self.problem = f"{what}: {error!r}"


def _read_row(row: CanaryRow, output: RequestOutput) -> NDArray[np.float32]:
    scored = output.prompt_logprobs
    if scored is None or list(scored.token_ids) != row.token_ids[1:].tolist():
        raise WorkerError("vLLM must score every token of a canary row but the first, and did not")
    return np.asarray(scored.logprobs, dtype=np.float32)


def request_pulses(
    sequences: Iterable[tuple[int, Collection[str]]],
    *,
    num_tokens: Mapping[str, int],
    running: Collection[str],
) -> dict[int, RequestPulse]:
    """The progress of each request, by lease, from what vLLM's scheduler reports of sequences.

    Args:
        sequences: the lease of each request, and its sequences that have not ended.
        num_tokens: sampled so far, of each sequence that the engine has.
        running: the sequences that run; the others wait for a place or for memory.

    >>> sequences = [(3, ["a", "b"]), (4, ["c"]), (5, ["lost"])]
    >>> for pulse in request_pulses(
    ...     sequences, num_tokens={"a": 7, "b": 0, "c": 9}, running=["a"]
    ... ).items():
    ...     print(*pulse)
    3 RequestPulse(num_tokens=7, is_waiting=False, cut=None)
    4 RequestPulse(num_tokens=9, is_waiting=True, cut=None)
    5 RequestPulse(num_tokens=0, is_waiting=False, cut=None)
    """
    pulses = {}
    for lease_id, names in sequences:
        known = [name for name in names if name in num_tokens]
        pulses[lease_id] = RequestPulse(
            num_tokens=sum(num_tokens[name] for name in known),
            is_waiting=bool(known) and not any(name in running for name in known),
        )
    return pulses
