"""The evaluations of a run, beside its training, which never waits for them.

consumes:     the news of published weights
produces:     a result of every set that is due with them, or why there is none
waits for:    the sets of one evaluation, one after the other
unblocked by: their last questions

While it samples, one generation worker keeps the weights that are evaluated, where there are
several; with one alone the samples come of the weights that it has, few at a time, and the result
says which. After the last batch nobody trains: all workers sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from async_grpo.batching.evaluation import SetEvaluation
from async_grpo.batching.lanes import Lane
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan, SetPlan
from async_grpo.types import EvaluationResult, WeightsVersion
from async_grpo.types.roles import ENVIRONMENT, GENERATION

if TYPE_CHECKING:
    from async_grpo.controller.holds import Hold
    from async_grpo.controller.registry import WorkerRegistry

logger = logging.getLogger(__name__)
Begin = Callable[..., asyncio.Task[None]]
STILL_RUNNING = "the evaluation before it was still running"


class Evaluations:
    """One at a time; of those that become due meanwhile only the last of the run is waited for."""

    def __init__(
        self,
        plan: BatcherPlan,
        pipeline: SlotPipeline,
        registry_of: Callable[[str], WorkerRegistry],
        *,
        begin: Begin,
    ) -> None:
        """`begin(work, name=…)` makes a task, whose failure ends the run."""
        self._plan = plan
        self._sets = plan.sets
        self._pipeline = pipeline
        self._registry_of = registry_of
        self._begin = begin
        self._running: asyncio.Task[None] | None = None
        self._results: list[EvaluationResult] = []  # that nobody has taken
        self._asked: set[int] = set()  # batches in weights that somebody wants evaluated

    def ask(self, batches: int) -> None:
        """The weights after so many batches are to be evaluated, on all sets."""
        self._asked.add(batches)

    def published(self, version: WeightsVersion) -> None:
        """Weights are out: begin what is due with them."""
        is_due = self._plan.config.evaluates
        is_asked = version.batches in self._asked
        due = [each for each in self._sets if is_asked or is_due(each.config, version.batches)]
        if not due:
            return
        is_last = version.batches == self._plan.config.num_training_batches
        before = self._running if self._running and not self._running.done() else None
        if before and not is_last:
            logger.warning("nothing is evaluated of weights %s: %s", version, STILL_RUNNING)
            self._results += [_skipped(each, version) for each in due]
            return
        work = self._run(due, version, after=before, is_last=is_last)
        self._running = self._begin(work, name=f"evaluate-{version}")

    def take(self) -> tuple[EvaluationResult, ...]:
        """Those of sets that have ended since the last call."""
        results, self._results = tuple(self._results), []
        return results

    async def finished(self) -> tuple[EvaluationResult, ...]:
        """As `take`, once all that has begun has ended; raises what has ended the run."""
        if self._running:
            await asyncio.wait({self._running})
            self._running.result()
        return self.take()

    async def _run(
        self,
        due: Sequence[SetPlan],
        version: WeightsVersion,
        *,
        after: asyncio.Task[None] | None,
        is_last: bool,
    ) -> None:
        if after:
            await asyncio.wait({after})
        generation = self._registry_of(GENERATION)
        held = contextlib.nullcontext(None) if is_last else generation.held(version)
        with held as hold:
            for each in due:
                result = await self._evaluated(each, version, hold)
                self._results.append(result)  # the list of now, of which others have taken

    async def _evaluated(
        self, found: SetPlan, version: WeightsVersion, hold: Hold | None
    ) -> EvaluationResult:
        config = found.config
        lane = Lane(config.name, version, config.rewards, hold)
        evaluation = SetEvaluation(
            found,
            self._pipeline,
            lane,
            version=version,
            num_together=lambda: self._num_together(config.samples, hold),
        )
        result = await evaluation.run()
        logger.info("evaluated %s of weights %s", config.name or "held-out questions", version)
        return result

    def _num_together(self, samples: int, hold: Hold | None) -> int:
        """Questions in work at a time."""
        rooms = [self._registry_of(GENERATION).room(hold)]
        if (environments := self._registry_of(ENVIRONMENT)).members:
            rooms.append(environments.room(hold))
        return max(1, int(min(rooms) // samples))


def _skipped(found: SetPlan, version: WeightsVersion) -> EvaluationResult:
    return EvaluationResult(
        name=found.config.name,
        version=version,
        oldest=version,
        newest=version,
        samples_per_question=found.config.samples,
        questions=(),
        seconds=0.0,
        skipped=STILL_RUNNING,
    )
