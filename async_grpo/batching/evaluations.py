"""The evaluations of a run, beside its training, which never waits for them.

consumes:     the news of published weights; the questions of the sets that are due with them
produces:     a result of every such set, what came of each question, or why there is none
waits for:    the sets of one evaluation, one after the other; leases, generation, verdicts
unblocked by: the worker that keeps the weights, or others that serve them; verifiers

While it samples, one generation worker keeps the weights that are evaluated, where there are
several; with one alone the samples come of the weights that it has, few at a time, and the result
says which. After the last batch no training needs them: all workers sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from async_grpo.batching.admission import StepKey
from async_grpo.batching.failures import SlotFailed, nothing_graded
from async_grpo.batching.leased_work import LAST, EvaluationTerms
from async_grpo.batching.ledger import Ledger, SlotAccount
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan, SetPlan
from async_grpo.config.roles import ENVIRONMENT, GENERATION
from async_grpo.types import (
    Episode,
    EvaluationResult,
    GenerationRequest,
    QuestionOutcome,
    Verdict,
    WeightsVersion,
)
from async_grpo.util.errors import NoWorkerError, WorkerError
from async_grpo.util.waiting import together

if TYPE_CHECKING:
    from async_grpo.controller.balancer import Hold
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
        is_last = version.batches == self._plan.config.batching.num_training_batches
        before = self._running if self._running and not self._running.done() else None
        if before and not is_last:
            logger.warning("nothing is evaluated of weights %s: %s", version, STILL_RUNNING)
            self._results += [
                EvaluationResult.without(
                    each.config.name, version, each.config.samples, why=STILL_RUNNING
                )
                for each in due
            ]
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
        num_at_once = partial(self._num_at_once, found.config.samples, hold)
        evaluation = SetEvaluation(found, self._pipeline, version, hold, num_at_once)
        result = await evaluation.run()
        name = found.config.name or "held-out questions"
        logger.info("evaluated %s of weights %s", name, version)
        return result

    def _num_at_once(self, samples: int, hold: Hold | None) -> int:
        """Questions in work at a time."""
        rooms = [self._registry_of(GENERATION).room(hold)]
        if (environments := self._registry_of(ENVIRONMENT)).members:
            rooms.append(environments.room(hold))
        return max(1, int(min(rooms) // samples))


@dataclass(slots=True, eq=False)
class SetEvaluation:
    """One pass over one set, through the same workers and verifiers as training."""

    plan: SetPlan
    pipeline: SlotPipeline
    version: WeightsVersion  # that is evaluated
    hold: Hold | None  # of the worker that keeps it; None: any worker samples
    num_at_once: Callable[[], int]  # questions, which may become fewer on the way
    _ledger: Ledger = field(default_factory=Ledger)  # its own: nothing of it is trained
    _sampled: list[WeightsVersion] = field(default_factory=list)  # oldest and newest of any token
    _outcomes: dict[int, QuestionOutcome] = field(default_factory=dict)
    _failure: SlotFailed | None = None

    async def run(self) -> EvaluationResult:
        """Sample and grade every question; raises `WorkerError` where nothing of all that works.

        That is when nothing could be graded before anything was trained.
        """
        started, questions = time.monotonic(), self.plan.questions
        numbers = iter(range(len(questions)))
        players = min(self.num_at_once(), len(questions))
        await together((self._play(n, numbers) for n in range(players)), name="held-out")
        outcomes = tuple(self._outcomes[number] for number in range(len(questions)))
        if self._failure and all(each.failure for each in outcomes) and not self.version.batches:
            whose = f" of {self.plan.config.name}" if self.plan.config.name else ""
            raise WorkerError(nothing_graded(f"the held-out questions{whose}", self._failure))
        return EvaluationResult(
            name=self.plan.config.name,
            version=self.version,
            oldest=min(self._sampled, default=self.version),
            newest=max(self._sampled, default=self.version),
            samples_per_question=self.plan.config.samples,
            questions=outcomes,
            seconds=time.monotonic() - started,
        )

    async def _play(self, player: int, numbers: Iterator[int]) -> None:
        """One question after the other, as long as there is room for so many players."""
        while not player or player < self.num_at_once():
            if (number := next(numbers, None)) is None:
                return
            self._outcomes[number] = await self._grade(number)

    async def _grade(self, number: int) -> QuestionOutcome:
        config, question = self.plan.config, self.plan.questions[number]
        self._ledger.admit(number, num_samples=config.samples, step=StepKey(0, 0))
        request = GenerationRequest(
            number,
            0,
            question.input_token_ids,
            config.samples,
            self.plan.sampling,
            seed=first_seed(config.seed) + number * config.samples,  # an engine adds the index
            priority=LAST,
        )
        try:
            terms = EvaluationTerms(config.name, config.rewards, self.hold)
            account = SlotAccount(self._ledger, number, terms)
            episodes, verdicts = await self.pipeline.play(
                question, request, oldest=self.version, account=account
            )
        except (SlotFailed, NoWorkerError) as error:
            whose = f" of {config.name}" if config.name else ""
            logger.warning("held-out question %d%s is not counted: %s", number, whose, error)
            lost_at = error.stage if isinstance(error, SlotFailed) else "deadline"
            self._failure = SlotFailed(lost_at, str(error))
            return QuestionOutcome(question.dataset_type, config.samples, failure=lost_at)
        versions = [*self._sampled, *_versions(episodes)]
        self._sampled = [min(versions), max(versions)] if versions else []
        return _outcome(question.dataset_type, episodes, verdicts)


def _outcome(
    dataset_type: str, episodes: Sequence[Episode], verdicts: Sequence[Verdict]
) -> QuestionOutcome:
    return QuestionOutcome(
        dataset_type,
        len(verdicts),
        num_correct=sum(verdict.reward >= 1.0 for verdict in verdicts),
        reward_sum=sum(verdict.reward for verdict in verdicts),
        num_tokens=sum(episode.num_sampled_tokens for episode in episodes),
        num_truncated=sum(episode.finish_reason == "length" for episode in episodes),
    )


def _versions(episodes: Sequence[Episode]) -> Iterator[WeightsVersion]:
    for episode in episodes:
        for row in episode.rows:
            yield from (span.version for span in row.weights_versions)


def first_seed(seed: int) -> int:
    """Where the seeds of a set's samples begin, below 2^32: torch's CPU generator reads no more.

    Multiplied by an odd number near 2^32 / the golden ratio, so that seeds lie far apart (Knuth,
    TAOCP 3, 6.4).

    >>> first_seed(0), first_seed(1), first_seed(2)
    (0, 2654435769, 1013904242)
    """
    return seed * 0x9E3779B9 % 2**32
