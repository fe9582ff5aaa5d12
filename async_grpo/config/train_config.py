"""Every option of `trainer_core.py`, validated before torch or Ray is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from async_grpo.config.data_files import DataSource, parse_columns
from async_grpo.config.data_options import DataOptions
from async_grpo.config.evaluation_sets import (
    UNNAMED,
    EvaluationOptions,
    EvaluationSet,
    check_best,
)
from async_grpo.config.memory_options import MemoryOptions
from async_grpo.config.objective import ObjectiveOptions, with_preset
from async_grpo.config.optimizer_options import OptimizerOptions
from async_grpo.config.option import Change, flag, options_of_change, parts_of, require
from async_grpo.config.run_options import PlaceOptions, RecordingOptions
from async_grpo.config.sampling_options import BatchingOptions, SamplingOptions
from async_grpo.config.teaching import EVERY_TYPE, TeachingOptions
from async_grpo.util.errors import ConfigError


@dataclass(frozen=True, slots=True, init=False)
class TrainConfig:
    """All options of a run, in the parts that its rooms are handed.

    It is made of options by their names, as they are typed, which is also how `options` and
    `training_params.json` name them: `TrainConfig(model_name_or_path=..., learning_rate=1e-6)`.
    Raises `ConfigError` for an option, or several of them, that cannot be meant.
    """

    data: DataOptions
    batching: BatchingOptions
    optimizer: OptimizerOptions
    sampling: SamplingOptions
    memory: MemoryOptions
    recording: RecordingOptions
    places: PlaceOptions
    evaluation: EvaluationOptions
    teaching: TeachingOptions
    objective: ObjectiveOptions

    USUAL: ClassVar[tuple[str, ...]] = (
        "model_name_or_path",
        "data_path",
        "eval_data_path",
        "output_dir",
        "num_training_batches",
        "batch_size",
        "samples_per_question",
        "max_generation_tokens",
        "learning_rate",
        "max_tokens_per_gpu",
    )

    def __init__(self, **given: Any) -> None:
        for name, part in parts_of(type(self)).items():
            own = {each.name: given.pop(each.name) for each in fields(part) if each.name in given}
            object.__setattr__(self, name, part(**own))
        if given:
            raise TypeError(f"TrainConfig has no option {next(iter(given))!r}")
        self._check()

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """The options that were given, over those of the preset that they name."""
        longest = cls(**given).sampling.max_generation_tokens
        return cls(**with_preset(given, max_generation_tokens=longest))

    def but(self, **changes: Any) -> Self:
        """The same options with others in the place of some."""
        return type(self)(**self.options() | changes)

    def options(self) -> dict[str, Any]:
        """{option: its value}, part by part."""
        parts = (getattr(self, name).options() for name in parts_of(type(self)))
        return {name: value for part in parts for name, value in part.items()}

    def refusal(self, name: str, rule: str, remedy: str) -> ConfigError:
        """The error of an option that breaks a rule."""
        return ConfigError(f"{flag(name)} {rule}, got {self.options()[name]!r}: {remedy}")

    def _check(self) -> None:
        data, sets = self.data, self.evaluation.eval
        if parse_columns(data.columns) and not (data.data_path or self.evaluation.eval_data_path):
            rule = "must be said in each --data"
            raise self.refusal("columns", rule, "write --data NAME=PATH,columns='level=int'")
        for found in sets:
            rule, remedy = "must not name a set as a type of --data", "name it otherwise"
            require(found.name not in data.types, "eval", rule, found.name, remedy)
            rule, remedy = f"of {found.name} must have a type of --data", ", ".join(data.types)
            is_known = not found.type or not data.types or found.type in data.types
            require(is_known, "eval", rule, found.type, f"choose from {remedy}")
        if self.best_set and not self.recording.checkpoint_every_batches:
            raise self.refusal(
                "checkpoint_every_batches", "must be positive with --keep-best-checkpoint",
                "leave it out: what is evaluated is saved anyway",
            )  # fmt: skip

    def check_sampling(self) -> None:
        """Raise `ConfigError` for options with which questions cannot be sampled to learn."""
        sampling, batching = self.sampling, self.batching
        for name in ("turn_timeout_s", "episode_timeout_s"):
            if getattr(sampling, name) and self.environments == {"single_turn"}:
                raise sampling.refusal(
                    name, "needs an --environment of turns", "--generation-timeout-s limits outputs"
                )
        if not sampling.temperature:
            raise sampling.refusal(
                "temperature",
                "must be positive for training",
                "at 0 every sample of a group is the same and nothing is learnt; 1.0 is usual",
            )
        if sampling.samples_per_question < 2 and self.teaching.reward_coefficient:
            raise sampling.refusal(
                "samples_per_question", "must be at least 2, a group needs a baseline", "8 is usual"
            )
        if sampling.max_generation_tokens >= batching.max_tokens_per_gpu:
            raise batching.refusal(
                "max_tokens_per_gpu",
                "must exceed --max-generation-tokens "
                f"({sampling.max_generation_tokens}) plus a prompt",
                "raise it or lower --max-generation-tokens",
            )
        if batching.deterministic and sampling.max_staleness:
            raise sampling.refusal(
                "max_staleness", "must be 0 with --deterministic", "drop one of the two"
            )

    @property
    def environments(self) -> set[str]:
        """Names of those that play any question."""
        of_sets = {each.environment for each in self.evaluation.eval if each.environment}
        of_files = {each.environment or self.data.environment for each in self.data.data_files}
        return of_sets | of_files

    @property
    def teacher_routes(self) -> dict[str, str]:
        """{dataset_type: name of its teacher}; `EVERY_TYPE` stands for those not named."""
        return self.teaching.routes | self.data.file_teachers

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Each teacher once, in the order given: `teacher.index` counts them."""
        return tuple(dict.fromkeys(self.teacher_routes.values()))

    def teacher_of(self, dataset_type: str) -> str | None:
        """The name of the teacher of a line's type; None: it has none."""
        routes = self.teacher_routes
        return routes.get(dataset_type, routes.get(EVERY_TYPE))

    @property
    def held_out(self) -> DataSource | None:
        """What is evaluated on, beside the held-out file of each type."""
        data, held_out = self.data, self.evaluation
        if not held_out.eval_data_path:
            return None
        is_same = held_out.eval_data_path == data.data_path
        config = held_out.eval_data_config or (data.data_config if is_same else "")
        split, types = held_out.eval_data_split or data.data_split, parse_columns(data.columns)
        return DataSource(held_out.eval_data_path, split, config, types)

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """All that is evaluated on, in the order in which it is."""
        of_files = any(file.held_out for file in self.data.data_files)
        is_unnamed = self.evaluation.eval_data_path or of_files
        unnamed = (EvaluationSet(name=UNNAMED),) if is_unnamed else ()
        return (*unnamed, *self.evaluation.eval)

    @property
    def best_set(self) -> EvaluationSet | None:
        """The set that tells which checkpoint is the best."""
        name = self.evaluation.keep_best_checkpoint
        return check_best(name, self.evaluation_sets) if name else None

    def evaluates(self, found: EvaluationSet, num_batches: int) -> bool:
        """Whether a set is due after `num_batches` batches: by its interval, first and last."""
        interval = self.evaluation.eval_every_batches if found.every is None else found.every
        is_end = num_batches in (0, self.batching.num_training_batches)
        return is_end or bool(interval and num_batches % interval == 0)

    @property
    def pairs(self) -> DataSource | None:
        """What is trained beside sampled outputs, of the split that is trained on."""
        path = self.teaching.pairs_path
        return DataSource(path, self.data.data_split) if path else None

    @property
    def asks_questions(self) -> bool:
        """Whether anything is sampled: with --gkd-lambda 0 only held-out questions are."""
        return self.teaching.gkd_lambda > 0 or bool(self.evaluation_sets)

    @property
    def chunk_size(self) -> int:
        """Tokens whose logits exist at a time."""
        return self.memory.chunk_size(self.batching.max_tokens_per_gpu)

    @property
    def mode(self) -> str:
        """`on_policy`, `behaviour` or `decoupled`: the ratio's denominator (design, section 4).

        A matter of configuration alone: a measured lag never changes the objective.
        """
        if self.objective.ratio_mode != "auto":
            return self.objective.ratio_mode
        on_policy = self.sampling.max_staleness == 0 and self.batching.steps_per_batch == 1
        return "on_policy" if on_policy else "behaviour"


FIXED = options_of_change(TrainConfig, Change.FIXED)
PLACES = options_of_change(TrainConfig, Change.PLACE)
INCIDENTAL = options_of_change(TrainConfig, Change.INCIDENTAL)
LIVE = options_of_change(TrainConfig, Change.LIVE)
