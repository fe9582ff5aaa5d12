"""One piece of work on leased workers: which answers are good, and how often it is tried. Pure.

A worker that dies takes all its requests along, and says not which of them did it. A slot that was
there at two deaths is on probation: slots on probation are sampled one at a time, so that the next
death tells. A further one there, and its question is quarantined for the rest of the run.

    deaths   0, 1: ordinary   2: on probation   3: quarantined

With one such question, exactly that one is quarantined: it was there at every death that its
neighbours saw, so that none of them is on probation before it, and none beside it. Deaths of
another cause count too: a slot must meet three of them to be quarantined for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.roles import ENVIRONMENT
from async_grpo.types import (
    Episode,
    EpisodesRequest,
    GenerationRequest,
    LogprobRequest,
    Problem,
    Turn,
    VersionSpan,
    WeightsVersion,
)
from async_grpo.util.errors import (
    AsyncGrpoError,
    LeaseLost,
    LossCause,
    StaleAnswerError,
    WorkerError,
)

Scores = NDArray[np.float32]  # [L]
Reason = Literal["worker died", "lease revoked", "stalled", "stale answer", "worker error"]
QUARANTINE = "quarantine"  # the stage that loses a question which kills workers
# Seconds before each try that the worker's answer was to blame for the one before.
TRIES_AFTER_S = (0.0, 1.0, 8.0)
# Workers that are lost are no fault of the work: deaths are bounded by the quarantine, these here.
MAX_REVOCATIONS = 16
AFTER_LOSS_S = 1.0
PROBATION_DEATHS = 2
QUARANTINE_DEATHS = 3
MAX_KINDS = 50  # told; what fails in ever new ways is told often enough by then


class SlotFailed(WorkerError):
    """A group that could not be finished; `stage` says where it was lost."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage

    def __reduce__(self) -> tuple[type[SlotFailed], tuple[str, str]]:
        return type(self), (self.stage, str(self))


class WorkProgress:
    """What has moved, and what is in the way: shared by the stages of a pipeline."""

    def __init__(self) -> None:
        self.answers = 0  # good ones, of workers
        self.failures: dict[str, str] = {}  # why groups were dropped: the first of each kind
        self.problem: Problem | None = None  # why work is being tried again; empty when all is well

    @property
    def reason(self) -> str:
        """Of the problem, for people."""
        return self.problem.reason if self.problem else ""

    def failed(self, kind: str, sentence: str) -> None:
        if len(self.failures) < MAX_KINDS:
            self.failures.setdefault(kind, sentence)

    def moved(self) -> None:
        self.answers += 1
        self.problem = None


class Attempts:
    """Of one piece of work: its own faults, lost workers and deaths count apart."""

    def __init__(self, stage: str, slot: Hashable, quarantine: Quarantine | None) -> None:
        """`quarantine` counts the slot's deaths; None: they are no fault of this kind of work."""
        self._stage = stage
        self._slot = slot
        self._quarantine = quarantine
        self._num_faults = 0
        self._num_losses = 0

    def pause_after(self, error: AsyncGrpoError) -> tuple[Reason, float]:
        """What a try was lost to, and the seconds before the next one.

        Raises `SlotFailed` when there is none, or when workers keep dying of the work.
        """
        reason = _reason(error)
        if reason == "worker died" and self._quarantine is not None:
            if self._quarantine.died(self._slot, weight=2 if self._stage == ENVIRONMENT else 1):
                raise SlotFailed(QUARANTINE, f"workers keep dying of it: {error}")
            return reason, AFTER_LOSS_S
        is_loss = reason in ("worker died", "lease revoked")
        self._num_losses += is_loss
        self._num_faults += not is_loss
        if self._num_faults >= len(TRIES_AFTER_S) or self._num_losses >= MAX_REVOCATIONS:
            number = self._num_losses if is_loss else self._num_faults
            raise SlotFailed(
                self._stage, f"{self._stage} failed {number} times, the last time: {error}"
            )
        return reason, AFTER_LOSS_S if is_loss else TRIES_AFTER_S[self._num_faults]


def _reason(error: AsyncGrpoError) -> Reason:
    if isinstance(error, LeaseLost):
        if error.cause is LossCause.DIED:
            return "worker died"
        return "stalled" if error.cause is LossCause.STALLED else "lease revoked"
    return "stale answer" if isinstance(error, StaleAnswerError) else "worker error"


class Quarantine:
    """Deaths by slot, kept while the slot is open; and the questions excluded by their index."""

    def __init__(self, questions: Iterable[int] = ()) -> None:
        self._deaths: dict[Hashable, int] = {}
        self._questions = set(questions)

    def __contains__(self, question: int) -> bool:
        return question in self._questions

    @property
    def questions(self) -> tuple[int, ...]:
        """Indices of the questions that are not asked any more, in order."""
        return tuple(sorted(self._questions))

    def died(self, slot: Hashable, *, weight: int = 1) -> bool:
        """A worker died while it had `slot`'s request; whether that was once too often.

        `weight`: 2 for episodes, which are played again once: alone, so that a neighbour's death
        is not theirs.

        >>> quarantine = Quarantine()
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, False)
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, True)
        >>> quarantine.died("a")
        True
        """
        self._deaths[slot] = self._deaths.get(slot, 0) + weight
        return self._deaths[slot] >= QUARANTINE_DEATHS

    def is_on_probation(self, slot: Hashable) -> bool:
        """Whether the slot must be sampled while no other suspect is."""
        return self._deaths.get(slot, 0) >= PROBATION_DEATHS

    def forget(self, slot: Hashable) -> None:
        """The slot is finished, or failed."""
        self._deaths.pop(slot, None)

    def exclude(self, question: int) -> None:
        """This question is asked no more."""
        self._questions.add(question)


def check_completions(
    request: GenerationRequest, completions: tuple[Turn, ...], oldest: WeightsVersion
) -> None:
    """Raise unless `completions` are finished, and of `oldest` or later weights, every token."""
    if len(completions) != request.num_samples:
        raise WorkerError(f"{len(completions)} samples came back, {request.num_samples} were asked")
    for completion in completions:
        if completion.finish_reason == "abort":
            raise WorkerError("the worker gave up the request before it was finished")
        is_sampled = np.ones(len(completion.token_ids), np.bool_)
        _check_versions(completion.weights_versions, is_sampled, oldest)


def check_episodes(request: EpisodesRequest, episodes: tuple[Episode, ...]) -> None:
    """Raise unless these are all episodes, every token of weights that the group may have."""
    if len(episodes) != request.num_samples:
        raise WorkerError(f"{len(episodes)} episodes came back, {request.num_samples} were asked")
    for episode in episodes:
        for row in episode.rows:
            is_sampled = row.loss_mask & (row.logprobs is not None)
            _check_versions(row.weights_versions, is_sampled, request.oldest)


def _check_versions(
    spans: Sequence[VersionSpan], is_sampled: NDArray[np.bool_], oldest: WeightsVersion
) -> None:
    if not covers(spans, is_sampled):
        raise WorkerError("the worker did not say of every token which weights sampled it")
    for span in spans:
        if span.version < oldest or span.version.incarnation != oldest.incarnation:
            raise StaleAnswerError(
                f"tokens of weights {span.version} came back, {oldest} or later were asked"
            )


def covers(spans: Sequence[VersionSpan], is_sampled: NDArray[np.bool_]) -> bool:
    """Every token that was sampled has exactly one version, and no other has several."""
    ends = [0, *(span.stop for span in spans)]
    if ends == sorted(ends) and [*(s.start for s in spans), len(is_sampled)] == ends:
        return True  # one after another, as an engine's are
    num_versions = np.zeros(len(is_sampled), np.int64)
    for span in spans:
        if not 0 <= span.start <= span.stop <= len(num_versions):
            return False
        num_versions[span.start : span.stop] += 1
    return bool((num_versions <= 1).all() and (num_versions[is_sampled] == 1).all())


def check_scores(request: LogprobRequest, scores: tuple[Scores, ...]) -> None:
    """Raise unless there is a finite score for every token."""
    lengths = [len(score) for score in scores]
    asked = [len(ids) for ids in request.output_token_ids]
    if lengths != asked:
        raise WorkerError(f"scores of outputs of {lengths} tokens came back, {asked} were asked")
    if not all(np.isfinite(score).all() for score in scores):
        raise WorkerError("reference log-probabilities must be finite, and are not")
