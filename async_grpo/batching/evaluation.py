"""One set of held-out questions, through the same workers and verifiers as training.

consumes:     the questions of a set, and the weights version that its samples are to come from
produces:     what came of each question: graded samples, or the stage that lost them
waits for:    leases, generation, verdicts; as long as they move
unblocked by: the lane's worker, or whoever serves such weights; verifiers
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from async_grpo.batching.admission import StepKey
from async_grpo.batching.grading import nothing_graded
from async_grpo.batching.lanes import LAST, Lane
from async_grpo.batching.leased_work import SlotFailed
from async_grpo.batching.ledger import Ledger
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import SetPlan
from async_grpo.batching.slot_books import SlotBooks
from async_grpo.types import (
    Episode,
    EvaluationResult,
    GenerationRequest,
    QuestionOutcome,
    Verdict,
    WeightsVersion,
)
from async_grpo.util.errors import NoWorkerError, WorkerError
from async_grpo.util.together import together

logger = logging.getLogger(__name__)


class SetEvaluation:
    """One pass over one set."""

    def __init__(
        self,
        plan: SetPlan,
        pipeline: SlotPipeline,
        lane: Lane,
        *,
        version: WeightsVersion,
        num_together: Callable[[], int],
    ) -> None:
        """`num_together`: questions in work at a time, which may become fewer on the way."""
        self._plan = plan
        self._pipeline = pipeline
        self._lane = lane
        self._version = version
        self._sampled: list[WeightsVersion] = []  # the oldest and the newest of any token
        self._num_together = num_together
        self._ledger = Ledger()  # its own: nothing of it is trained
        self._outcomes: dict[int, QuestionOutcome] = {}
        self._failure: SlotFailed | None = None

    async def run(self) -> EvaluationResult:
        """Sample and grade every question; raises `WorkerError` where nothing of all that works.

        That is when nothing could be graded before anything was trained.
        """
        started, questions = time.monotonic(), self._plan.questions
        numbers = iter(range(len(questions)))
        players = min(self._num_together(), len(questions))
        await together((self._play(n, numbers) for n in range(players)), name="held-out")
        outcomes = tuple(self._outcomes[number] for number in range(len(questions)))
        if self._failure and all(each.failure for each in outcomes) and not self._version.batches:
            whose = f" of {self._plan.config.name}" if self._plan.config.name else ""
            raise WorkerError(nothing_graded(f"the held-out questions{whose}", self._failure))
        return EvaluationResult(
            name=self._plan.config.name,
            version=self._version,
            oldest=min(self._sampled, default=self._version),
            newest=max(self._sampled, default=self._version),
            samples_per_question=self._plan.config.samples,
            questions=outcomes,
            seconds=time.monotonic() - started,
        )

    async def _play(self, player: int, numbers: Iterator[int]) -> None:
        """One question after the other, as long as there is room for so many players."""
        while not player or player < self._num_together():
            if (number := next(numbers, None)) is None:
                return
            self._outcomes[number] = await self._grade(number)

    async def _grade(self, number: int) -> QuestionOutcome:
        config, question = self._plan.config, self._plan.questions[number]
        self._ledger.admit(number, num_samples=config.samples, step=StepKey(0, 0))
        request = GenerationRequest(
            number,
            0,
            question.input_token_ids,
            config.samples,
            self._plan.sampling,
            seed=first_seed(config.seed) + number * config.samples,  # an engine adds the index
            priority=LAST,
        )
        try:
            episodes, verdicts = await self._pipeline.play(
                question,
                request,
                oldest=self._version,
                slot=("held out", config.name, number),
                books=SlotBooks(self._ledger, number),
                lane=self._lane,
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
