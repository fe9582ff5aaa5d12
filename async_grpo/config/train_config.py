"""Every option of `trainer_core.py`, validated before torch or Ray is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from async_grpo.config.data_files import DataOptions, DataSource, parse_columns
from async_grpo.config.evaluation_sets import UNNAMED, EvaluationOptions, EvaluationSet, check_best
from async_grpo.config.objective import ObjectiveOptions, with_preset
from async_grpo.config.option import (
    Change,
    flag,
    option_fields,
    option_types,
    options_of_change,
    parts_of,
    require,
)
from async_grpo.config.run_options import PlaceOptions, RecordingOptions
from async_grpo.config.sampling_options import BatchingOptions, SamplingOptions
from async_grpo.config.teaching import EVERY_TYPE, TeachingOptions
from async_grpo.config.training_options import AdapterOptions, MemoryOptions, OptimizerOptions
from async_grpo.util.errors import ConfigError


@dataclass(frozen=True, slots=True, init=False)
class TrainConfig:
    """All options of a run, grouped in parts; most functions take only the parts that they read.

    The constructor takes options by name, as typed on the command line and as `options` and
    `training_params.json` name them: `TrainConfig(model_name_or_path=..., learning_rate=1e-6)`.
    Raises `ConfigError` for an illegal value, or for options that contradict each other.
    """

    data: DataOptions
    batching: BatchingOptions
    optimizer: OptimizerOptions
    adapter: AdapterOptions
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
        """The given options, which override those of the preset that they name."""
        longest = cls(**given).sampling.max_generation_tokens
        return cls(**with_preset(given, max_generation_tokens=longest))

    def but(self, **changes: Any) -> Self:
        """A copy with these options changed."""
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
        """Raise `ConfigError` for options under which sampled outputs could not be trained on."""
        sampling, batching = self.sampling, self.batching
        for name in ("turn_timeout_s", "episode_timeout_s"):
            if getattr(sampling, name) and self.environments == {"single_turn"}:
                raise sampling.refusal(
                    name, "needs an --environment of turns", "--generation-timeout-s limits outputs"
                )
        if sampling.constrained_outputs and self.environments == {"single_turn"}:
            raise sampling.refusal(
                "constrained_outputs", "needs an --environment that asks for JSON", "leave it out"
            )
        if batching.num_passes > 1 and self.mode == "on_policy":
            raise self.refusal(
                "ratio_mode",
                "must not be on_policy with --num-passes above 1: later passes train samples of a "
                "policy that the passes before have left",
                "decoupled and behaviour compare with it",
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
        if self.memory.colocated and sampling.max_staleness > 1:
            rule = "must be at most 1 with --colocated: nothing is sampled while a batch is trained"
            raise sampling.refusal("max_staleness", rule, "1 or 0 do the same work")
        if batching.deterministic and sampling.max_staleness:
            raise sampling.refusal(
                "max_staleness", "must be 0 with --deterministic", "drop one of the two"
            )

    def check_devices(self, *, on_cpu: bool) -> None:
        """Raise `ConfigError` for options that need a device, or others than beside them."""
        memory, rule = self.memory, "needs trainer ranks on devices, these compute on a CPU"
        if self.adapter.base_quantization != "none":
            if on_cpu:
                raise self.refusal("base_quantization", rule, "leave it out")
            if memory.use_torch_compile or memory.offload == "parameters":
                rule = "goes neither with --use-torch-compile nor with --offload parameters"
                raise self.refusal("base_quantization", rule, "leave one of them out")
        if self.optimizer.optim != "adamw":
            if on_cpu:
                raise self.refusal("optim", rule, "use adamw")
            if memory.offload != "none" or memory.fsdp_sharding_strategy == "ZERO1":
                rule = "goes neither with --offload nor with ZERO1, which move adamw's moments"
                raise self.refusal("optim", rule, "leave one of them out")

    @property
    def environments(self) -> set[str]:
        """Names of the environments that play training or held-out questions."""
        of_sets = {each.environment for each in self.evaluation.eval if each.environment}
        return of_sets | self.data.environments

    @property
    def teacher_routes(self) -> dict[str, str]:
        """{dataset_type: name of its teacher}; `EVERY_TYPE` stands for those not named."""
        return self.teaching.routes | self.data.file_teachers

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Names of the teachers, without repeats, in the order that `teacher.index` counts."""
        return tuple(dict.fromkeys(self.teacher_routes.values()))

    def teacher_of(self, dataset_type: str) -> str | None:
        """The name of the teacher for a dataset type; None without one."""
        routes = self.teacher_routes
        return routes.get(dataset_type, routes.get(EVERY_TYPE))

    @property
    def held_out(self) -> DataSource | None:
        """The source of --eval-data-path; None without one."""
        data, held_out = self.data, self.evaluation
        if not held_out.eval_data_path:
            return None
        is_same = held_out.eval_data_path == data.data_path
        config = held_out.eval_data_config or (data.data_config if is_same else "")
        split, types = held_out.eval_data_split or data.data_split, parse_columns(data.columns)
        return DataSource(held_out.eval_data_path, split, config, types)

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """Every set that the run evaluates, in order."""
        of_files = any(file.held_out for file in self.data.data_files)
        is_unnamed = self.evaluation.eval_data_path or of_files
        unnamed = (EvaluationSet(name=UNNAMED),) if is_unnamed else ()
        return (*unnamed, *self.evaluation.eval)

    @property
    def best_set(self) -> EvaluationSet | None:
        """The set whose metric chooses the best checkpoint; None without --keep-best-checkpoint."""
        name = self.evaluation.keep_best_checkpoint
        return check_best(name, self.evaluation_sets) if name else None

    def evaluates(self, found: EvaluationSet, num_batches: int) -> bool:
        """Whether a set is due after `num_batches` batches: by its interval, first and last."""
        interval = self.evaluation.eval_every_batches if found.every is None else found.every
        is_end = num_batches in (0, self.batching.num_training_batches)
        return is_end or bool(interval and num_batches % interval == 0)

    @property
    def pairs(self) -> DataSource | None:
        """The source of --pairs-path, trained beside sampled outputs; None without one."""
        path = self.teaching.pairs_path
        return DataSource(path, self.data.data_split) if path else None

    @property
    def asks_questions(self) -> bool:
        """Whether the run samples at all: with --gkd-lambda 0 only held-out questions."""
        return self.teaching.gkd_lambda > 0 or bool(self.evaluation_sets)

    @property
    def samples_per_slot(self) -> int:
        """Samples that a slot trains if none is dropped."""
        return self.sampling.samples_per_question + (self.objective.ref_answer_coefficient > 0)

    @property
    def chunk_size(self) -> int:
        """Tokens whose logits are in memory at a time."""
        return self.memory.chunk_size(self.batching.max_tokens_per_gpu)

    @property
    def trainer_scores_reference(self) -> bool:
        """Whether the trainer itself scores samples with the run's first policy, by its adapter.

        KL in the reward is needed before samples reach it, and a reference that moves is served.
        """
        never_moves = (
            self.sampling.num_batches_per_ref_model_update >= self.batching.num_training_batches
        )
        in_trainer = self.adapter.trains_adapter and self.adapter.adapter_reference == "trainer"
        in_loss = self.objective.kl_coefficient > 0 and self.objective.kl_in_loss
        return in_trainer and in_loss and never_moves

    @property
    def mode(self) -> str:
        """`on_policy`, `behaviour` or `decoupled`: the ratio's denominator (design, section 4).

        It depends on the options alone: a measured lag never changes the objective.
        """
        if self.objective.ratio_mode != "auto":
            return self.objective.ratio_mode
        if self.batching.num_passes > 1:
            return "decoupled"
        on_policy = self.sampling.max_staleness == 0 and self.batching.steps_per_batch == 1
        return "on_policy" if on_policy else "behaviour"


FIXED = options_of_change(TrainConfig, Change.FIXED)
PLACES = options_of_change(TrainConfig, Change.PLACE)
INCIDENTAL = options_of_change(TrainConfig, Change.INCIDENTAL)
LIVE = options_of_change(TrainConfig, Change.LIVE)


Settings = Mapping[str, Any]


def parse_settings(texts: Iterable[str]) -> dict[str, object]:
    """{option: value} of texts `name=value` as a user types them; raises `ConfigError`.

    >>> parse_settings(["learning_rate=1e-6", "--max-staleness=2"])
    {'learning_rate': 1e-06, 'max_staleness': 2}
    """
    hints, found = option_types(TrainConfig), {}
    for text in texts:
        name, is_there, value = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not is_there:
            raise ConfigError(f"what is set must be NAME=VALUE, got {text!r}: learning_rate=1e-6")
        _check_live(name, value)
        try:
            found[name] = hints[name](value.strip())
        except ValueError as error:
            kind = {int: "a whole number", float: "a number"}[hints[name]]
            raise ConfigError(f"{flag(name)} must be {kind}, got {value!r}: give one") from error
    return found


def saved_config(parameters: Mapping[str, Any]) -> TrainConfig:
    """Read the options out of a run's `training_params.json`, which also holds other keys."""
    names = option_fields(TrainConfig)
    return TrainConfig(**{name: value for name, value in parameters.items() if name in names})


def with_settings(config: TrainConfig, settings: Settings) -> TrainConfig:
    """The options of a run started with `config`, changed by these live settings.

    Raises `ConfigError` for values that a start would refuse, and for a staleness that would
    change the objective.
    """
    sampling = config.sampling
    for name, value in settings.items():
        _check_live(name, value)
    changed = config.but(**settings)
    changed.check_sampling()
    if changed.mode != config.mode:
        raise changed.refusal(
            "max_staleness",
            f"must keep the ratio's denominator, {config.mode}, and would make it {changed.mode}",
            "a run that is started with --ratio-mode keeps its own",
        )
    moves = sampling.num_batches_per_ref_model_update < config.batching.num_training_batches
    if moves and changed.sampling.max_staleness != sampling.max_staleness:
        raise changed.refusal(
            "max_staleness",
            f"must stay {sampling.max_staleness} while the reference moves with the policy "
            f"(--num-batches-per-ref-model-update {sampling.num_batches_per_ref_model_update})",
            "it says which reference scores a batch",
        )
    return changed


def _check_live(name: str, value: object) -> None:
    if name not in LIVE:
        raise ConfigError(
            f"{flag(name)} cannot be set while a run trains, got {value!r}: "
            f"{' and '.join(LIVE)} can, others when the run is resumed"
        )
