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

# Where a process looks at strangers' files: what makes an algorithm of one without importing it.
import_elsewhere: Callable[[TrainConfig, UserCode], Algorithm] | None = None
SHIPPED: dict[str, type[Algorithm]] = {"grpo": Grpo, "sft": Sft}


def users_algorithm(config: TrainConfig) -> UserCode | None:
    """The file of the run's algorithm as it is now; None for a shipped one.

    Raises `ConfigError` for a name that is none.
    """
    if config.objective.algorithm in SHIPPED:
        return None
    return UserCode.read(config.objective.algorithm, option="--algorithm", shipped=SHIPPED)


def find_algorithm(config: TrainConfig, code: UserCode | None = None) -> Algorithm:
    """The run's algorithm, made of its options; `code` where its file was read before.

    Raises `ConfigError` for what is no algorithm, and for options that the algorithm refuses.
    """
    read = code or users_algorithm(config)
    if read and not code and import_elsewhere:
        return import_elsewhere(config, read)
    code = read
    found = code.load(Algorithm) if code else _shipped(config)
    if not found.learns_from_pairs:
        config.check_sampling()
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
    return found(config)


def _shipped(config: TrainConfig) -> type[Algorithm]:
    check_distillation(config.teaching, config.objective, config.data)
    found = SHIPPED[config.objective.algorithm]
    return Distillation if found is Grpo and config.teaching.has_teacher_terms else found
