"""Which options of the learning rate go together; `training/schedule.py` computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_grpo.config.option import require

if TYPE_CHECKING:
    from async_grpo.config.train import TrainConfig


def check_schedule(config: TrainConfig) -> None:
    """Raise `ConfigError` for a warm-up or an end that the schedule does not have."""
    require(
        config.schedule_clock == "samples" or config.num_warmup_samples == 0,
        "num_warmup_samples",
        "goes with --schedule-clock samples",
        config.num_warmup_samples,
        "set the clock, or use --num-warmup-steps",
    )
    require(
        config.schedule_clock == "steps" or config.num_warmup_steps == 0,
        "num_warmup_steps",
        "goes with --schedule-clock steps",
        config.num_warmup_steps,
        "set the clock, or use --num-warmup-samples",
    )
    require(
        config.warmup_ratio == 0 or not (config.num_warmup_steps or config.num_warmup_samples),
        "warmup_ratio",
        "must not stand beside --num-warmup-steps or --num-warmup-samples",
        config.warmup_ratio,
        "give the share or the number",
    )
    require(
        config.warmup_ratio == 0 or config.lr_scheduler != "constant",
        "warmup_ratio",
        "needs a --lr-scheduler that warms up",
        config.warmup_ratio,
        "constant_with_warmup is one",
    )
    require(
        config.min_learning_rate_ratio == 0 or config.lr_scheduler in ("linear", "cosine"),
        "min_learning_rate_ratio",
        f"needs --lr-scheduler linear or cosine ({config.lr_scheduler} never falls)",
        config.min_learning_rate_ratio,
        "choose one of these, or leave it out",
    )
    for name in ("warmup_ratio", "min_learning_rate_ratio"):
        value = getattr(config, name)
        require(value <= 1, name, "must be in [0, 1]", value, "0.1 is usual")
