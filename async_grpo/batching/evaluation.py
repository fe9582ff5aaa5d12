"""Accuracy on held-out questions, through the same workers and verifiers as training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from async_grpo.batching.admission import StepKey
from async_grpo.batching.grading import nothing_graded
from async_grpo.batching.leased_work import SlotFailed
from async_grpo.batching.ledger import Ledger
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan, EvaluationResult
from async_grpo.batching.slot_books import SlotBooks
from async_grpo.errors import NoWorkerError, WorkerError
from async_grpo.types import GenerationRequest, Question, Verdict, WeightsVersion

logger = logging.getLogger(__name__)
SAMPLES_PER_QUESTION = 4
Outcome = tuple[Verdict, ...] | SlotFailed  # of a question


async def evaluate(
    plan: BatcherPlan, pipeline: SlotPipeline, *, version: WeightsVersion
) -> EvaluationResult:
    """Sample every held-out question at the training temperature, and count.

    Raises `WorkerError` when nothing could be graded before anything was trained.
    """
    started = time.monotonic()
    ledger, tasks = Ledger(), []
    for number, question in enumerate(plan.held_out):
        ledger.admit(number, num_samples=SAMPLES_PER_QUESTION, step=StepKey(0, 0))
        work = _grade(plan, pipeline, question, SlotBooks(ledger, number), version)
        tasks.append(asyncio.create_task(work, name=f"held-out-{number}"))
    try:
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    graded = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, SlotFailed)]
    if failures and not graded and version.batches == 0:
        raise WorkerError(nothing_graded("the held-out questions", failures[0]))
    seconds = time.monotonic() - started
    by_type: dict[str, list[Outcome]] = {}
    for question, outcome in zip(plan.held_out, outcomes, strict=True):
        by_type.setdefault(question.dataset_type, []).append(outcome)
    of_types = {kind: _counted(own, seconds) for kind, own in by_type.items() if plan.config.types}
    return replace(_counted(outcomes, seconds), of_types=of_types)


def _counted(outcomes: Sequence[Outcome], seconds: float) -> EvaluationResult:
    graded = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    verdicts = [verdict for group in graded for verdict in group]
    return EvaluationResult(
        num_questions=len(outcomes),
        num_samples=len(verdicts),
        num_failed=len(outcomes) * SAMPLES_PER_QUESTION - len(verdicts),
        reward_sum=sum(verdict.reward for verdict in verdicts),
        num_correct=sum(_is_correct(verdict) for verdict in verdicts),
        num_solved=sum(any(map(_is_correct, group)) for group in graded),
        seconds=seconds,
    )


async def _grade(
    plan: BatcherPlan,
    pipeline: SlotPipeline,
    question: Question,
    books: SlotBooks,
    version: WeightsVersion,
) -> Outcome:
    number = books.ordinal
    request = GenerationRequest(
        number, 0, question.input_token_ids, SAMPLES_PER_QUESTION, plan.sampling, seed=number
    )
    try:
        _, verdicts = await pipeline.play(
            question, request, oldest=version, slot=("held out", number), books=books
        )
        return verdicts
    except (SlotFailed, NoWorkerError) as error:
        logger.warning("held-out question %d is not counted: %s", number, error)
        return error if isinstance(error, SlotFailed) else SlotFailed("deadline", str(error))


def _is_correct(verdict: Verdict) -> bool:
    return verdict.reward >= 1.0
