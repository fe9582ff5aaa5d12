"""The plan of a run, which the trainer hands the controller at its start, and its later changes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from async_grpo.batching.admission import FIRST_STEP, AdmissionWindow, StepKey
from async_grpo.batching.packing import DEFAULT_ATTENTION_RATIO
from async_grpo.config.evaluation_sets import UNNAMED, EvaluationSet
from async_grpo.config.train_config import LIVE, TrainConfig, with_settings
from async_grpo.types import (
    AT_ONCE,
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
from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode

if TYPE_CHECKING:
    from async_grpo.algorithms.base import GroupRules
    from async_grpo.controller.registry import WorkerRegistry

RegistryOf = Callable[[str], "WorkerRegistry"]  # of a role, by its name
NUM_CONTROLS_SHOWN = 100  # the latest requests, in the status of the run


class ReplacementOf(Protocol):
    """Index of the question that `slot` draws at its `attempt`-th replacement, from 1."""

    def __call__(self, slot: int, *, attempt: int) -> int: ...


class SeedOf(Protocol):
    """The engine's seed for the samples of a slot at one attempt, from 0."""

    def __call__(self, *, ordinal: int, attempt: int) -> int: ...


class Begin(Protocol):
    """Makes a task whose failure ends the run."""

    def __call__(self, work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]: ...


def no_pairs(ordinal: int) -> tuple[int, ...]:
    """`pairs_of` in a run whose slots all ask a question."""
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
    questions: Sequence[Question]  # of `data.table` or `data.shards`: read by index
    held_out: Sequence[Question]  # the unnamed evaluation set; may be empty
    order: Callable[[int], int]  # ordinal -> index of its question
    replacement: ReplacementOf  # called with dynamic sampling only
    seed_of: SeedOf | None  # None: engines draw their own seeds
    sampling: SamplingContract
    num_ranks: int
    incarnation: int
    rules: GroupRules  # of the algorithm: they finish groups
    attention_ratio: float = DEFAULT_ATTENTION_RATIO  # tokens, see packing.attention_ratio
    shares_prefixes: bool = False  # ranks compute what rows of a minibatch have in common once
    resume: ResumePoint | None = None  # None: from the first question
    # The environment of questions whose type has none of its own; None: they get one answer.
    environment: UserCode | None = None
    environments: Mapping[str, UserCode | None] = field(default_factory=dict)  # by type
    services: tuple[str, ...] = ()  # user-defined roles that environments ask
    max_positions: int = sys.maxsize  # of the model, in tokens
    pairs: Sequence[GivenPair] = ()  # a `data.table.GivenTable`
    # ordinal -> indices of the pairs of its slot; empty if the slot asks a question
    pairs_of: Callable[[int], tuple[int, ...]] = no_pairs
    vocab_size: int = sys.maxsize  # of the model
    object_store_bytes: int = 0  # of the cluster
    take_refused: Callable[[], int] = int  # lines that were left out since the last call
    epoch: int = 0  # of the run: the controller sets it when the run begins
    settings: Mapping[str, object] = field(default_factory=dict)  # options set since the start
    pending: tuple[Control, ...] = ()  # requests that wait for the end of a batch
    named_sets: Mapping[str, Sequence[Question]] = field(default_factory=dict)  # of --eval
    # Environments of named sets that have their own; None: their questions get one answer.
    set_environments: Mapping[str, UserCode | None] = field(default_factory=dict)

    @property
    def sets(self) -> tuple[SetPlan, ...]:
        """All sets of held-out questions that are not empty, and how each is sampled."""
        unnamed = ((EvaluationSet(name=UNNAMED), self.held_out),)
        named = ((each, self.named_sets.get(each.name, ())) for each in self.config.evaluation.eval)
        return tuple(
            SetPlan(config, questions, sampling_of(config, self.sampling))
            for config, questions in (*unnamed, *named)
            if len(questions)
        )

    @property
    def first_step(self) -> StepKey:
        """The step with which the run begins or resumes."""
        return StepKey(self.resume.batch, self.resume.step_in_batch) if self.resume else FIRST_STEP

    def window(self, *, max_staleness: int) -> AdmissionWindow:
        """The window that admits slots from `first_step` on."""
        batching = self.config.batching
        return AdmissionWindow(
            batching.batch_size,
            questions_per_step=batching.questions_per_step,
            max_staleness=max_staleness,
            num_batches=batching.num_training_batches,
            incarnation=self.incarnation,
            first=self.first_step,
        )

    def reference_of(self, step: StepKey) -> WeightsVersion:
        """The version of the moving reference that scores a step."""
        return WeightsVersion(self.incarnation, self.config.sampling.reference_of(step.batch))

    def index(self, ordinal: int, *, attempt: int) -> int:
        """The index of the question that a slot asks at one attempt, from 0."""
        return self.replacement(ordinal, attempt=attempt) if attempt else self.order(ordinal)

    def type_of(self, ordinal: int) -> str:
        """The type of the question that a slot asks; empty if it has given pairs."""
        return "" if self.pairs_of(ordinal) else self.questions[self.order(ordinal)].dataset_type

    def given(self, ordinal: int) -> tuple[GivenPair, ...]:
        """The given pairs of a slot; empty if it asks a question."""
        return tuple(self.pairs[index] for index in self.pairs_of(ordinal))

    def draw(self, ordinal: int, *, attempt: int) -> tuple[Question, GenerationRequest]:
        """The question of a slot at one attempt, from 0, and the request to an engine."""
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
        """The request to an environment worker; None: the question is answered by an engine.

        `of_set`: the evaluation set of the question, which may have its own environment.
        """
        of_type = self.environments.get(question.dataset_type, self.environment)
        environment = self.set_environments.get(of_set, of_type)
        if environment is None:
            return None
        config = self.config
        return EpisodesRequest(
            request.ordinal,
            request.attempt,
            question,
            request.num_samples,
            request.sampling,
            oldest,
            environment,
            min(config.batching.max_tokens_per_gpu, self.max_positions),
            config.places.stall_timeout_s / 2,  # the worker reports before its lease ends
            RunId(self.incarnation, self.epoch),
            config.places.model_name_or_path,
            config.data.renderer,
            config.data.judge_names,
            request.seed,
            config.sampling.turn_timeout_s,
            config.sampling.episode_timeout_s,
            config.sampling.constrained_outputs,
        )


def sampling_of(found: EvaluationSet, trained: SamplingContract) -> SamplingContract:
    """How a set is sampled: like training, except for what the set overrides."""
    return replace(
        trained,
        temperature=trained.temperature if found.temperature is None else found.temperature,
        max_tokens=found.max_tokens or trained.max_tokens,
        top_p=found.top_p,
        with_experts=False,
    )


class Controls:
    """Requests of `async-grpo control`: taken at any time, in force once the batch has ended."""

    def __init__(self, plan: BatcherPlan) -> None:
        self._config = plan.config  # as the run began
        self.settings: dict[str, object] = dict(plan.settings)  # in force now
        self.waiting: tuple[Control, ...] = ()  # for the end of the batch
        self._asked: dict[str, Control] = {}  # by id
        for control in plan.pending:
            self.ask(control)

    @property
    def asked(self) -> tuple[Control, ...]:
        """The latest requests, the oldest first."""
        return tuple(self._asked.values())[-NUM_CONTROLS_SHOWN:]

    @property
    def options(self) -> dict[str, object]:
        """The options that may be set, with the values in force now."""
        live = with_settings(self._config, self.settings).options()
        return {name: live[name] for name in LIVE}

    @property
    def staleness(self) -> tuple[int, int]:
        """--max-staleness in force now, and from the next batch on."""
        now = with_settings(self._config, self.settings)
        following = with_settings(self._config, self._next())
        return now.sampling.max_staleness, following.sampling.max_staleness

    def ask(self, control: Control) -> None:
        """Take a request; raises `ConfigError` for one that this run cannot fulfil."""
        if control.id in self._asked:
            return
        with_settings(self._config, self._next() | dict(control.settings))
        if control.action == "evaluate" and not self._config.evaluation_sets:
            raise ConfigError(
                "evaluate needs held-out questions, this run has none: start it with "
                "--eval-data-path"
            )
        if control.action == "stop" and not self._config.recording.checkpoint_every_batches:
            raise ConfigError(
                "stop needs a checkpoint to stop at, this run writes none "
                "(--checkpoint-every-batches 0): Ctrl-C ends it"
            )
        self._asked[control.id] = control
        if control.action not in AT_ONCE:
            self.waiting += (control,)

    def take(self) -> tuple[Control, ...]:
        """A batch has ended: return the requests that waited for it, now in force."""
        taken, self.settings, self.waiting = self.waiting, self._next(), ()
        return taken

    def _next(self) -> dict[str, object]:
        """The settings of the next batch."""
        settings = dict(self.settings)
        for control in self.waiting:
            settings |= control.settings
        return settings
