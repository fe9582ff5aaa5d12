"""The queue of finished samples to the run's recorder: their texts, rewards and fates.

consumes:     groups whose samples have a fate; the minibatches of each round, by rank
produces:     lines for the dump (`run.companions` writes them), in one call at a time
waits for:    the recorder, in a separate task; a step's end waits a little for the queue
unblocked by: the recorder's answer, or its deadline
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from async_grpo.cluster import handles
from async_grpo.types import (
    EndOfStep,
    Episode,
    Group,
    Minibatch,
    Question,
    RowKey,
    Sample,
    Verdict,
    VersionSpan,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ProcessLostError

if TYPE_CHECKING:
    from async_grpo.batching.failures import SlotFailed
    from async_grpo.cluster.handles import RecorderHandle
    from async_grpo.config.sampling_options import BatchingOptions

Answers = Iterable[tuple[Episode, Verdict]]
MAX_QUEUED_BYTES = 64 * 2**20


class SampleLog:
    """Sends samples to a recorder that may be slow or dead; counts the samples that are lost."""

    def __init__(
        self,
        recorder: RecorderHandle | None,
        *,
        next_ordinal: int = 0,
        has_tokens: bool = False,
        batch_size: int = 1,
    ) -> None:
        """`recorder`: None dumps nothing. It cuts the dump back to `next_ordinal` first."""
        self._recorder = recorder
        self._writer = uuid.uuid4().hex
        self._next_ordinal = next_ordinal
        self._has_tokens = has_tokens
        self._batch_size = batch_size
        self._queue: list[tuple[int, bytes]] = []  # (number of samples, their pickled lines)
        self._queued_bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self._notices: list[str] = []
        self._rounds: list[list[list[RowKey]]] = []  # of the current step: keys by round and rank
        self._has_told = False  # a notice says that samples are missing
        self._is_away = False  # the recorder has died, and is being started again
        self._num_unsent = 0  # samples
        self._num_refused = 0  # samples that the recorder's disk did not take

    @property
    def num_lost(self) -> int:
        """Samples that are not in the dump."""
        return self._num_unsent + self._num_refused

    def take_notices(self) -> tuple[str, ...]:
        """Sentences for the user since the last call."""
        notices = tuple(self._notices)
        self._notices.clear()
        return notices

    def write(self, group: Group, *, batch: int, fates: tuple[str, ...]) -> None:
        """Queue the lines of a group; `fates` has the fate of each sample."""
        if self._recorder is None:
            return
        lines = [
            _line(sample, group.attempt, batch, fate, has_tokens=self._has_tokens)
            for sample, fate in zip(group.samples, fates, strict=True)
        ]
        self._queue_up(lines, num_samples=len(lines))

    def held_out(
        self, question: Question, answers: Answers, number: int, evaluated: tuple[str, int]
    ) -> None:
        """Queue a held-out question's lines; `evaluated`: its set, and the weights' batches.

        The ordinal is the last slot of the batch that begins with these weights: a run that goes on
        from there evaluates them again, so that the dump is cut back to the evaluations before.
        """
        if self._recorder is None:
            return
        name, batch = evaluated
        own: dict[str, object] = {"ordinal": (batch + 1) * self._batch_size - 1, "advantage": None}
        own |= {"set": name, "question": number}
        samples = (Sample(number, k, question, *each, 0.0) for k, each in enumerate(answers))
        lines = [_line(sample, 0, batch, "held_out") | own for sample in samples]
        self._queue_up(lines, num_samples=len(lines))

    def failed(
        self, question: Question, failure: SlotFailed, *, batch: int, slot: tuple[int, int]
    ) -> None:
        """Queue one line for a group that was dropped; `slot`: its ordinal and attempt."""
        if self._recorder is None:
            return
        verdict = Verdict("error", 0.0, None, "", str(failure), 0.0)
        ordinal, attempt = slot
        lost = Sample(ordinal, 0, question, Episode(()), verdict, advantage=0.0)
        line = _line(lost, attempt, batch, "failed", has_tokens=self._has_tokens)
        line |= {"given": False, "verdict": "error", "finish_reason": None, "stage": failure.stage}
        self._queue_up([line], num_samples=1)

    def sent(self, minibatches: Sequence[Minibatch]) -> None:
        """Remember a round of the current step: a minibatch for each rank."""
        if self._recorder is not None:
            self._rounds.append([[part.key for part in each.samples] for each in minibatches])

    async def end_step(self, end: EndOfStep, batching: BatchingOptions, *, ratio_mode: str) -> None:
        """Queue the step's line with its rounds, and wait a moment for the queue."""
        if self._recorder is None:
            return
        first = end.batch * batching.batch_size + end.step_in_batch * batching.questions_per_step
        line = {
            "batch": end.batch,
            "ordinal": first,
            "step_in_batch": end.step_in_batch,
            "step": end.batch * batching.steps_per_batch + end.step_in_batch + 1,
            "num_samples": end.num_samples,
            "num_tokens": end.num_tokens,
            "ratio_mode": ratio_mode,
            "rounds": self._rounds,
        }
        self._rounds = []
        self._queue_up(line, num_samples=0)
        await self.flush()

    def _queue_up(self, lines: object, *, num_samples: int) -> None:
        content = pickle.dumps(lines)  # the recorder writes JSON, which takes many times longer
        if self._queued_bytes + len(content) > MAX_QUEUED_BYTES:
            self._count_unsent(num_samples, "the run's recorder is slower than the run")
            return
        self._queue.append((num_samples, content))
        self._queued_bytes += len(content)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="sample-log")

    async def flush(self) -> None:
        """Wait until the queue is empty, but only a moment: no step is delayed by the dump."""
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=deadlines.RECORDER_FLUSH_S)

    async def _send(self) -> None:
        while self._queue and self._recorder is not None:
            groups: list[tuple[int, bytes]] = []  # empty: ask whether it is there again
            if not self._is_away:
                groups, self._queue, self._queued_bytes = self._queue, [], 0
            number = sum(number for number, _ in groups)
            contents = [content for _, content in groups]
            call = self._recorder.write.remote(self._writer, self._next_ordinal, contents)
            try:
                self._num_refused, notices = await handles.call(
                    call, timeout_s=deadlines.RECORDER_WRITE_S, who="the run's recorder"
                )
            except ProcessLostError as error:
                self._has_died(number, str(error))
                await asyncio.sleep(deadlines.RECORDER_AGAIN_S)
            except AsyncGrpoError as error:
                self._count_unsent(number, str(error))
            else:
                self._is_away, self._next_ordinal = False, sys.maxsize  # the dump is cut back
                self._notices += notices

    def _has_died(self, number: int, reason: str) -> None:
        """Count what it was sent and what it had refused: the next recorder starts from zero."""
        self._num_unsent, self._num_refused = self._num_unsent + self._num_refused + number, 0
        if not self._is_away:
            self._notices.append(
                f"{reason}: it is started again, the run goes on, and {number} samples that it was "
                "sent are missing from the dump"
            )
        self._is_away = True

    def _count_unsent(self, number: int, reason: str) -> None:
        if not self._has_told:
            self._notices.append(
                f"{reason}: the run goes on, and counts the samples that are missing from the dump"
            )
        self._has_told = True
        self._num_unsent += number


def _line(
    sample: Sample, attempt: int, batch: int, fate: str, *, has_tokens: bool = False
) -> dict[str, object]:
    """The line of a sample; `SampleDump.cut_back` reads its first two columns."""
    question, verdict, episode = sample.question, sample.verdict, sample.episode
    is_graded = not episode.is_given or verdict.adapter  # a reference answer is, a pair is not
    return {
        "batch": batch,
        "ordinal": sample.ordinal,
        "attempt": attempt,
        "index": sample.index,
        "fate": fate,
        "given": episode.is_given,
        "dataset_type": question.dataset_type,
        "input": question.input,
        "output": episode.text,
        "answer": question.answer,
        "reward": verdict.reward if is_graded else None,
        "format_reward": verdict.format_reward,
        "overlong_penalty": sample.overlong_penalty,
        "kl_penalty": sample.kl_penalty,
        "advantage": None if episode.is_given else sample.advantage,
        "verdict": verdict.status if is_graded else None,
        "adapter": verdict.adapter,
        "reason": verdict.reason,
        "finish_reason": episode.finish_reason,
        "num_input_tokens": len(question.input_token_ids),
        "num_output_tokens": episode.num_sampled_tokens,
        "num_trained_tokens": sample.num_trained_tokens,
        "workers": list(dict.fromkeys(turn.worker_id for turn in episode.turns)),
        "weights_versions": [_spans(row.weights_versions) for row in episode.rows],
        **({"turns": _turns(episode)} if len(episode.turns) > 1 else {}),
        **(_token_columns(sample) if has_tokens else {}),
    }


def _turns(episode: Episode) -> list[dict[str, object]]:
    """What the model read and what it wrote, in order; the recorder decodes the ids it read."""
    lines: list[dict[str, object]] = []
    ends: dict[int, int] = {}  # by row: the end of its turns so far, in tokens
    for turn, (number, start) in zip(episode.turns, episode.places, strict=False):
        row = episode.rows[number]
        is_new = number not in ends
        read = row.prompt_token_ids if is_new else row.token_ids[ends[number] : start]
        lines.append({"role": "environment", "row": number, "token_ids": read})
        lines.append(
            {
                "role": "model",
                "row": number,
                "text": turn.text,
                "num_tokens": len(turn.token_ids),
                "weights_versions": _spans(turn.weights_versions),
                "finish_reason": turn.finish_reason,
                "worker": turn.worker_id,
            }
        )
        ends[number] = start + len(turn.token_ids)
    return lines


def _spans(spans: Iterable[VersionSpan]) -> list[list[object]]:
    return [[str(span.version), span.start, span.stop] for span in spans]


def _token_columns(sample: Sample) -> dict[str, object]:
    """Columns with a list entry for each row; about 90 bytes for an output token, as JSON."""
    parts, rows = sample.parts(), sample.episode.rows
    return {
        "input_token_ids": [row.prompt_token_ids for row in rows],
        "output_token_ids": [row.token_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "behaviour_logprobs": [row.logprobs for row in rows],
        "reference_logprobs": [part.scores.get("reference") for part in parts],
        "scores": {
            name: [part.scores[name] for part in parts]
            for name in sample.scores
            if name != "reference"
        },
    }
