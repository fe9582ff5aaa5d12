"""From the name that `--algorithm` gives to the algorithm: a shipped one, or a user's."""

from __future__ import annotations

from collections.abc import Callable

from async_grpo.algorithms.base import Algorithm
from async_grpo.algorithms.distillation import Distillation
from async_grpo.algorithms.grpo import Grpo
from async_grpo.algorithms.sft import Sft
from async_grpo.config.teaching import check_distillation
from async_grpo.config.train_config import TrainConfig
from async_grpo.util.user_code import UserCode

# Set by `check`, which does not trust users' files: makes an algorithm of one elsewhere.
import_elsewhere: Callable[[TrainConfig, UserCode], Algorithm] | None = None
SHIPPED: dict[str, type[Algorithm]] = {"grpo": Grpo, "sft": Sft}


def users_algorithm(config: TrainConfig) -> UserCode | None:
    """The current content of the file that defines the run's algorithm; None for a shipped one.

    Raises `ConfigError` for an unknown name.
    """
    if config.objective.algorithm in SHIPPED:
        return None
    return UserCode.read(config.objective.algorithm, option="--algorithm", shipped=SHIPPED)


def find_algorithm(config: TrainConfig, code: UserCode | None = None) -> Algorithm:
    """The run's algorithm, made of its options; `code` if its file has been read before.

    Raises `ConfigError` for a file without an algorithm, and for options that it refuses.
    """
    if code is None and (code := users_algorithm(config)) and import_elsewhere:
        return import_elsewhere(config, code)
    found = code.load(Algorithm) if code else _shipped(config)
    if not found.learns_from_pairs:
        config.check_sampling()
        if config.data.block_size:
            raise config.refusal("block_size", "needs --algorithm sft", "leave it out")
    elif config.batching.num_passes > 1:
        rule, remedy = "needs an algorithm that samples outputs", "raise --num-training-batches"
        raise config.refusal("num_passes", rule, remedy)
    elif config.data.data:
        raise config.refusal(
            "data", "needs an algorithm that samples outputs", "join the files to one --data-path"
        )
    for name in ("eval", "keep_best_checkpoint"):
        if getattr(config.evaluation, name) and found.learns_from_pairs:
            raise config.refusal(
                name, "needs an algorithm that samples outputs",
                "--eval-data-path tells the loss on held-out pairs",
            )  # fmt: skip
    if config.places.gateway and (found.learns_from_pairs or not config.asks_questions):
        raise config.refusal("gateway", "needs a run that samples outputs", "leave it out")
    algorithm = code.make(found, config) if code else found(config)
    _check_ref_answers(config, algorithm)
    return algorithm


def _check_ref_answers(config: TrainConfig, algorithm: Algorithm) -> None:
    """Raise `ConfigError` where no group could have a reference answer as a member."""
    if not config.objective.use_ref_answers:
        return
    if environments := config.data.environments - {"single_turn"}:
        raise config.refusal(
            "use_ref_answers",
            "needs questions that are answered once (--environment single_turn)",
            f"leave it out, or {', '.join(sorted(environments))}",
        )
    if not algorithm.takes_ref_answers:
        raise config.refusal(
            "use_ref_answers", "needs --algorithm grpo without teachers",
            "an algorithm of yours whose loss knows given tokens sets takes_ref_answers = True",
        )  # fmt: skip


def _shipped(config: TrainConfig) -> type[Algorithm]:
    check_distillation(config.teaching, config.objective, config.data)
    found = SHIPPED[config.objective.algorithm]
    return Distillation if found is Grpo and config.teaching.has_teacher_terms else found
