"""Options that may be set while a run trains, held to the rules that they had at its start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from async_grpo.config.option import (
    flag,
    option_fields,
    option_types,
)
from async_grpo.config.train_config import LIVE, TrainConfig
from async_grpo.util.errors import ConfigError

Settings = Mapping[str, Any]


def parse_settings(texts: Iterable[str]) -> dict[str, object]:
    """Values by option, of `name=value` as a user types it; raises `ConfigError`.

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
    """The options of a run, of its `training_params.json`, which holds more."""
    names = option_fields(TrainConfig)
    return TrainConfig(**{name: value for name, value in parameters.items() if name in names})


def with_settings(config: TrainConfig, settings: Settings) -> TrainConfig:
    """The options of a run that began with `config`, as they are with these settings.

    Raises `ConfigError` for what the run could not have been started with, and for a staleness
    that would change what is computed.
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
