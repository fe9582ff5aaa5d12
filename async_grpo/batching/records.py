"""What the batcher is told once, at the start of a run, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from async_grpo.config.train import TrainConfig
from async_grpo.types import Question, SamplingContract


@dataclass(frozen=True, slots=True, eq=False)
class BatcherPlan:
    """The run as the batcher sees it."""

    config: TrainConfig
    questions: tuple[Question, ...]
    held_out: tuple[Question, ...]  # graded by `evaluate`; may be empty
    order: Callable[[int], int]  # ordinal -> index of its question
    seed_of: Callable[[int], int] | None  # ordinal -> engine seed; None: engines draw their own
    sampling: SamplingContract
    num_ranks: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Held-out questions sampled at the training temperature, with the published weights."""

    num_questions: int
    num_samples: int  # graded; those whose verification failed are in num_failed
    num_failed: int
    reward_sum: float
    num_correct: int  # samples with the full reward of 1
    num_solved: int  # questions with at least one correct sample
    seconds: float
