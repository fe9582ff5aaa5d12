"""A request that an engine works on: its outputs, and what all of them have so far, for cuts.

consumes      a request, and the tokens that lost workers have sampled for it
produces      its outputs; cuts of them, which others can go on from
waits for     the engine
unblocked by  the end of its sequences; of a cut, the engine's next step, which sends it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from async_grpo.rollout.vllm_requests import read_completion, sampling_params
from async_grpo.types import Cut, GenerationRequest, Turn, WeightsVersion
from async_grpo.types.samples import joined
from async_grpo.util.errors import WorkerError
from async_grpo.util.waiting import together

LOOK_INTERVAL_S = 0.05
NUM_LOOKS = 20  # for a cut; a step of the engine that takes longer has none
Sequences = Mapping[int, RequestState]  # by the index of the output
Decode = Callable[[Sequence[int]], str]


class InFlight:
    """One request from its beginning to its answer."""

    def __init__(self, request: GenerationRequest, number: int) -> None:
        self.request = request
        self.began_at = time.monotonic()
        # By index: vLLM's name of a group, or of each output that another worker has begun.
        self.names = {
            index: f"{number}-{index}"
            for index, turn in enumerate(request.begun)
            if not turn.is_finished
        }
        if not request.begun:
            self.names[0] = str(number)
        self.version: WeightsVersion | None = None  # of the adapter that samples all
        self._ended: dict[int, CompletionOutput] = {}  # of those that another worker has begun
        self._group: ParentRequest | None = None
        self._num_cuts = 0
        self._num_told = [0] * request.num_samples
        self._texts: dict[int, str] = {}  # of outputs that have ended

    async def turns(self, llm: AsyncLLM, adapter: LoRARequest | None) -> tuple[Turn, ...]:
        """All outputs: those of a group, which vLLM keeps together, or each that goes on."""
        prompt = self.request.input_token_ids.tolist()

        async def answer(ids: list[int], index: int | None = None) -> list[CompletionOutput]:
            answers = llm.generate(
                tokens_input(ids),
                sampling_params(self.request, index),
                self.names[index or 0],
                lora_request=adapter,
                priority=self.request.priority,
            )
            *_, final = [output async for output in answers]
            return final.outputs

        async def go_on(index: int, turn: Turn) -> Turn:
            if turn.is_finished:
                return turn
            (self._ended[index],) = await answer(prompt + turn.token_ids.tolist(), index)
            return joined([turn, read_completion(self._ended[index], self.version)])

        if self.request.begun:
            going = (go_on(index, turn) for index, turn in enumerate(self.request.begun))
            return tuple(await together(going, name="go-on"))
        return tuple(read_completion(output, self.version) for output in await answer(prompt))

    def sequences(self, vllm: OutputProcessor) -> Sequences:
        """Those that are not finished."""
        found = {}
        for number, name in self.names.items():
            for own in vllm.external_req_ids.get(name, ()):
                state = vllm.request_states[own]
                self._group = state.parent_req
                found[number + state.request_index] = state
        return found

    def has_come(self, sequences: Sequences, num_tokens: Mapping[str, int]) -> bool:
        """Whether all of a cut is here; see `cut`."""
        for index in self._open:
            state = sequences.get(index)
            if state is None or (length := num_tokens.get(state.request_id)) is None:
                if index not in self._finished:
                    return False
            elif state.detokenizer is None or state.detokenizer.num_output_tokens() < length:
                return False
        return True

    def cut(self, sequences: Sequences, num_tokens: Mapping[str, int], decode: Decode) -> Cut:
        """What has come since the last cut.

        Raises `WorkerError` for what cannot be trained on.

        Args:
            sequences: those that were unfinished before the engine's core was asked for the cut.
            num_tokens: sampled of each sequence that the core had then; all of them have come.
            decode: gives the text of an output that has ended.
        """
        parts, num_told = [], []
        for index, told in enumerate(self._num_told):
            if index not in self._open:
                parts.append(_nothing(self.request.begun[index]))
                num_told.append(0)
                continue
            state = sequences.get(index)
            length = num_tokens.get(state.request_id) if state else None
            if state is not None and length is not None:
                # As vLLM does for a sequence that is given up: all that it has, with its versions.
                output = state._new_completion_output([], FinishReason.ABORT, None)
                part = replace(self._part(output, told, length), finish_reason="unfinished")
            else:
                output = self._finished[index]
                length = len(output.token_ids)
                text = self._text(index, output.token_ids, decode)
                part = replace(self._part(output, told, length), text=text)
            parts.append(part)
            num_told.append(length)
        self._num_told = num_told
        self._num_cuts += 1
        return Cut(self._num_cuts - 1, tuple(parts))

    @property
    def _open(self) -> Collection[int]:
        """The outputs that this engine samples."""
        return self.names if self.request.begun else range(self.request.num_samples)

    @property
    def _finished(self) -> Mapping[int, CompletionOutput]:
        """Of these, the ones that have ended."""
        if self._group is None:
            return self._ended
        return {n: each for n, each in enumerate(self._group.output_aggregator) if each}

    def _text(self, index: int, token_ids: Sequence[int], decode: Decode) -> str:
        if index not in self._texts:
            before = self.request.begun[index].token_ids.tolist() if self.request.begun else []
            self._texts[index] = decode([*before, *token_ids])
        return self._texts[index]

    def _part(self, output: CompletionOutput, start: int, stop: int) -> Turn:
        """Tokens [start, stop) of an output, as `read_completion`."""
        spans = output.weight_versions
        if spans is not None:
            inside = (
                replace(span, start=max(span.start, start) - start, end=min(span.end, stop) - start)
                for span in spans
            )
            spans = [span for span in inside if span.start < span.end]
        own = replace(
            output,
            token_ids=output.token_ids[start:stop],
            logprobs=output.logprobs and output.logprobs[start:stop],
            weight_versions=spans,
        )
        return read_completion(own, self.version)


def _nothing(turn: Turn) -> Turn:
    """No more of an output that was finished before."""
    none = slice(0)
    return replace(
        turn, token_ids=turn.token_ids[none], logprobs=turn.logprobs[none], weights_versions=()
    )


async def cuts_of(
    asked: Mapping[InFlight, Sequences], num_tokens: Mapping[str, int], decode: Decode
) -> dict[int, Cut]:
    """By lease, the cuts of requests for which an engine's core was asked; see `InFlight.cut`.

    What the core's next step does not send in time is told by the next cut.
    """
    cuts, waiting = {}, dict(asked)
    for _ in range(NUM_LOOKS):
        for request, sequences in [*waiting.items()]:
            if request.has_come(sequences, num_tokens):
                del waiting[request]
                with suppress(WorkerError):  # its answer will say it
                    cut = request.cut(sequences, num_tokens, decode)
                    cuts[request.request.lease_id] = cut
        if not waiting:
            break
        await asyncio.sleep(LOOK_INTERVAL_S)
    return cuts
