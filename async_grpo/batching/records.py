"""The plan of a run, which the trainer hands the controller once, at its start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from async_grpo.batching.admission import FIRST_STEP, AdmissionWindow, StepKey
from async_grpo.batching.packing import DEFAULT_ATTENTION_RATIO
from async_grpo.config.evaluation_sets import UNNAMED, EvaluationSet
from async_grpo.config.train_config import TrainConfig
from async_grpo.types import (
    Control,
    EpisodesRequest,
    GenerationRequest,
    GivenPair,
    Question,
    ResumePoint,
    RunId,
    SamplingContract,
    WeightsVersion,
)
from async_grpo.util.user_code import UserCode

if TYPE_CHECKING:
    from async_grpo.algorithms.base import GroupRules


class ReplacementOf(Protocol):
    """Index of the question that `slot` draws at its `attempt`-th replacement, from 1."""

    def __call__(self, slot: int, *, attempt: int) -> int: ...


class SeedOf(Protocol):
    """The engine's seed for the samples of a slot at one attempt, from 0."""

    def __call__(self, *, ordinal: int, attempt: int) -> int: ...


def no_pairs(ordinal: int) -> tuple[int, ...]:
    """Of a run in which every slot asks a question."""
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class SetPlan:
    """One set of held-out questions, and how they are sampled."""

    config: EvaluationSet
    questions: Sequence[Question]
    sampling: SamplingContract


@dataclass(frozen=True, slots=True, eq=False)
class BatcherPlan:
    """The run as the batcher sees it."""

    config: TrainConfig
    questions: Sequence[Question]  # a `data.table.QuestionTable`: read by index
    held_out: Sequence[Question]  # the unnamed set of evaluations; may be empty
    order: Callable[[int], int]  # ordinal -> index of its question
    replacement: ReplacementOf  # asked with dynamic sampling only
    seed_of: SeedOf | None  # None: engines draw their own
    sampling: SamplingContract
    num_ranks: int
    incarnation: int
    rules: GroupRules  # the algorithm's, which finish groups
    attention_ratio: float = DEFAULT_ATTENTION_RATIO  # tokens, see packing.attention_ratio
    resume: ResumePoint | None = None  # None: from the first question
    environment: UserCode | None = None  # of types without their own; None: one answer
    environments: Mapping[str, UserCode | None] = field(default_factory=dict)  # own ones, by type
    services: tuple[str, ...] = ()  # roles of the user's own that environments ask
    max_positions: int = sys.maxsize  # of the model, in tokens
    pairs: Sequence[GivenPair] = ()  # a `data.table.GivenTable`
    # ordinal -> indices of the pairs of its slot; none where it asks a question
    pairs_of: Callable[[int], tuple[int, ...]] = no_pairs
    vocab_size: int = sys.maxsize  # of the model
    object_store_bytes: int = 0  # of the cluster
    epoch: int = 0  # of the run: the controller says it when the run begins
    settings: Mapping[str, object] = field(default_factory=dict)  # options that were set since
    pending: tuple[Control, ...] = ()  # what was asked, and waits for the end of a batch
    named_sets: Mapping[str, Sequence[Question]] = field(default_factory=dict)  # of --eval
    # Of named sets that have one of their own; None: one answer.
    set_environments: Mapping[str, UserCode | None] = field(default_factory=dict)

    @property
    def sets(self) -> tuple[SetPlan, ...]:
        """All sets of held-out questions that are not empty, as they are sampled."""
        unnamed = ((EvaluationSet(name=UNNAMED), self.held_out),)
        named = ((each, self.named_sets.get(each.name, ())) for each in self.config.evaluation.eval)
        return tuple(
            SetPlan(config, questions, sampling_of(config, self.sampling))
            for config, questions in (*unnamed, *named)
            if len(questions)
        )

    @property
    def first_step(self) -> StepKey:
        """With which the run begins, or goes on."""
        return StepKey(self.resume.batch, self.resume.step_in_batch) if self.resume else FIRST_STEP

    def window(self, *, max_staleness: int) -> AdmissionWindow:
        """Which slots may start."""
        return AdmissionWindow(
            self.config.batching.batch_size,
            questions_per_step=self.config.batching.questions_per_step,
            max_staleness=max_staleness,
            num_batches=self.config.batching.num_training_batches,
            incarnation=self.incarnation,
            first=self.first_step,
        )

    def index(self, ordinal: int, *, attempt: int) -> int:
        """Which question a slot asks at one attempt, from 0."""
        return self.replacement(ordinal, attempt=attempt) if attempt else self.order(ordinal)

    def type_of(self, ordinal: int) -> str:
        """Of the question that a slot asks; empty where it has given pairs."""
        return "" if self.pairs_of(ordinal) else self.questions[self.order(ordinal)].dataset_type

    def given(self, ordinal: int) -> tuple[GivenPair, ...]:
        """The pairs of a slot of given ones; empty where it asks a question."""
        return tuple(self.pairs[index] for index in self.pairs_of(ordinal))

    def draw(self, ordinal: int, *, attempt: int) -> tuple[Question, GenerationRequest]:
        """The question of a slot at one attempt, from 0, and what is asked of an engine."""
        question = self.questions[self.index(ordinal, attempt=attempt)]
        request = GenerationRequest(
            ordinal,
            attempt,
            question.input_token_ids,
            self.config.sampling.samples_per_question,
            self.sampling,
            self.seed_of(ordinal=ordinal, attempt=attempt) if self.seed_of else None,
        )
        return question, request

    def episodes_request(
        self,
        question: Question,
        request: GenerationRequest,
        oldest: WeightsVersion,
        of_set: str = UNNAMED,
    ) -> EpisodesRequest | None:
        """What an environment worker is asked in the place of an engine; None: nothing.

        `of_set`: the evaluation that it is for, which may have an environment of its own.
        """
        of_type = self.environments.get(question.dataset_type, self.environment)
        environment = self.set_environments.get(of_set, of_type)
        if environment is None:
            return None
        return EpisodesRequest(
            request.ordinal,
            request.attempt,
            question,
            request.num_samples,
            request.sampling,
            oldest,
            environment,
            min(self.config.batching.max_tokens_per_gpu, self.max_positions),
            self.config.places.stall_timeout_s / 2,  # before the lease ends, and says less
            RunId(self.incarnation, self.epoch),
            self.config.places.model_name_or_path,
            self.config.data.renderer,
            self.config.data.judge_names,
            request.seed,
            self.config.sampling.turn_timeout_s,
            self.config.sampling.episode_timeout_s,
        )


def sampling_of(found: EvaluationSet, trained: SamplingContract) -> SamplingContract:
    """How a set is sampled: as training is, but for what the set says."""
    return replace(
        trained,
        temperature=trained.temperature if found.temperature is None else found.temperature,
        max_tokens=found.max_tokens or trained.max_tokens,
        top_p=found.top_p,
    )
