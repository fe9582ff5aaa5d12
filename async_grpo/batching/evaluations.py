"""The evaluations of a run, beside its training, which never waits for them.

consumes:     published weights; the questions of the sets that are due with them
produces:     a result of every such set, with the outcome of each question, or why there is none
waits for:    the sets of one evaluation, one after the other; leases, generation, verdicts
unblocked by: the worker that keeps the weights, or others that serve them; verifiers

If there are several generation workers, one keeps the evaluated weights while it samples. A single
one samples a few questions at a time with the weights that it has, which the result names. After
the last batch, training needs no workers, and all of them sample.
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

from async_grpo.batching.admission import FIRST_STEP
from async_grpo.batching.failures import SlotFailed, nothing_graded
from async_grpo.batching.leased_work import LAST
from async_grpo.batching.ledger import Ledger, SlotAccount
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan, Begin, RegistryOf, SetPlan
from async_grpo.config.roles import ENVIRONMENT, GENERATION
from async_grpo.types import (
    Episode,
    EvaluationResult,
    EvaluationTerms,
    GenerationRequest,
    Hold,
    QuestionOutcome,
    Verdict,
    WeightsVersion,
)
from async_grpo.util.errors import NoWorkerError, WorkerError
from async_grpo.util.waiting import together

if TYPE_CHECKING:
    from async_grpo.batching.sample_log import SampleLog

logger = logging.getLogger(__name__)
STILL_RUNNING = "the evaluation before it was still running"


@dataclass(slots=True, eq=False)
class Evaluations:
    """Runs one evaluation at a time, and skips those due meanwhile, except the run's last."""

    plan: BatcherPlan
    pipeline: SlotPipeline
    registry_of: RegistryOf
    begin: Begin
    log: SampleLog | None = None  # of the run's samples
    _running: asyncio.Task[None] | None = None
    _results: list[EvaluationResult] = field(default_factory=list)  # not taken yet
    _asked: set[int] = field(default_factory=set)  # numbers of batches, by `ask`

    def ask(self, batches: int) -> None:
        """Evaluate the weights after so many batches on all sets."""
        self._asked.add(batches)

    def published(self, version: WeightsVersion) -> None:
        """Weights are published: begin the evaluations that are due with them."""
        is_due = self.plan.config.evaluates
        is_asked = version.batches in self._asked
        due = [each for each in self.plan.sets if is_asked or is_due(each.config, version.batches)]
        if not due:
            return
        is_last = version.batches == self.plan.config.batching.num_training_batches
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
        self._running = self.begin(work, name=f"evaluate-{version}")

    def take(self) -> tuple[EvaluationResult, ...]:
        """The results of sets that have ended since the last call."""
        results, self._results = tuple(self._results), []
        return results

    async def ended(self) -> None:
        """Return once no evaluation is running."""
        if self._running:
            await asyncio.wait({self._running})

    async def finished(self) -> tuple[EvaluationResult, ...]:
        """As `take`, once no evaluation is running; raises the error of one that has failed."""
        await self.ended()
        if self._running:
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
        generation = self.registry_of(GENERATION)
        held = contextlib.nullcontext(None) if is_last else generation.held(version)
        with held as hold:
            for each in due:
                num_at_once = partial(self._num_at_once, each.config.samples, hold)
                own = (each, self.pipeline, version, hold, num_at_once, self.log)
                result = await SetEvaluation(*own).run()
                if self.log:  # whose recorder ends with the run, after the last evaluation
                    await self.log.flush()
                name = each.config.name or "held-out questions"
                logger.info("evaluated %s of weights %s", name, version)
                self._results.append(result)  # after the await: `take` replaces the list

    def _num_at_once(self, samples: int, hold: Hold | None) -> int:
        """The number of questions that may be in work at a time."""
        rooms = [self.registry_of(GENERATION).room(hold)]
        if (environments := self.registry_of(ENVIRONMENT)).members:
            rooms.append(environments.room(hold))
        return max(1, int(min(rooms) // samples))


@dataclass(slots=True, eq=False)
class SetEvaluation:
    """One pass over one set, through the same workers and verifiers as training."""

    plan: SetPlan
    pipeline: SlotPipeline
    version: WeightsVersion  # the evaluated one
    hold: Hold | None  # of the worker that keeps it; None: any worker samples
    num_at_once: Callable[[], int]  # questions in work; may decrease meanwhile
    log: SampleLog | None = None
    _ledger: Ledger = field(default_factory=Ledger)  # apart from the run's: nothing is trained
    _sampled: list[WeightsVersion] = field(default_factory=list)  # oldest and newest of all tokens
    _outcomes: dict[int, QuestionOutcome] = field(default_factory=dict)
    _failure: SlotFailed | None = None

    async def run(self) -> EvaluationResult:
        """Sample and grade every question.

        Raises `WorkerError` if none could be graded, and no batch has been trained yet.
        """
        started, questions, config = time.monotonic(), self.plan.questions, self.plan.config
        numbers = iter(range(len(questions)))
        players = min(self.num_at_once(), len(questions))
        await together((self._play(n, numbers) for n in range(players)), name="held-out")
        outcomes = tuple(self._outcomes[number] for number in range(len(questions)))
        if self._failure and all(each.failure for each in outcomes) and not self.version.batches:
            whose = f" of {config.name}" if config.name else ""
            raise WorkerError(nothing_graded(f"the held-out questions{whose}", self._failure))
        return EvaluationResult(
            name=config.name,
            version=self.version,
            oldest=min(self._sampled, default=self.version),
            newest=max(self._sampled, default=self.version),
            samples_per_question=config.samples,
            questions=outcomes,
            seconds=time.monotonic() - started,
        )

    async def _play(self, player: int, numbers: Iterator[int]) -> None:
        """Grade one question after the other, while there is room for so many players."""
        while not player or player < self.num_at_once():
            if (number := next(numbers, None)) is None:
                return
            self._outcomes[number] = await self._grade(number)

    async def _grade(self, number: int) -> QuestionOutcome:
        config, question = self.plan.config, self.plan.questions[number]
        self._ledger.admit(number, num_samples=config.samples, step=FIRST_STEP)
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
        rows = (row for episode in episodes for row in episode.rows)
        spans = (span.version for row in rows for span in row.weights_versions)
        versions = [*self._sampled, *spans]
        self._sampled = [min(versions), max(versions)] if versions else []
        if self.log:
            answers = zip(episodes, verdicts, strict=True)
            self.log.held_out(question, answers, number, (config.name, self.version.batches))
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


def first_seed(seed: int) -> int:
    """The first seed of a set's samples, below 2^32: torch's CPU generator reads no more bits.

    Multiplied by an odd number near 2^32 / the golden ratio, so that seeds lie far apart (Knuth,
    TAOCP 3, 6.4).

    >>> first_seed(0), first_seed(1), first_seed(2)
    (0, 2654435769, 1013904242)
    """
    return seed * 0x9E3779B9 % 2**32
