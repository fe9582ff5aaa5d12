"""Which options of the learning rate go together; `training/schedule.py` computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.config.train import TrainConfig


def check_schedule(config: TrainConfig) -> None:
    """Raise `ConfigError` for a warm-up or an end that the schedule does not have."""
    if config.num_warmup_samples and config.schedule_clock != "samples":
        raise config.refusal(
            "num_warmup_samples",
            "goes with --schedule-clock samples",
            "set the clock, or use --num-warmup-steps",
        )
    if config.num_warmup_steps and config.schedule_clock != "steps":
        raise config.refusal(
            "num_warmup_steps",
            "goes with --schedule-clock steps",
            "set the clock, or use --num-warmup-samples",
        )
    if config.warmup_ratio and (config.num_warmup_steps or config.num_warmup_samples):
        raise config.refusal(
            "warmup_ratio",
            "must not stand beside --num-warmup-steps or --num-warmup-samples",
            "give the share or the number",
        )
    if config.warmup_ratio and config.lr_scheduler == "constant":
        raise config.refusal(
            "warmup_ratio", "needs a --lr-scheduler that warms up", "constant_with_warmup is one"
        )
    if config.min_learning_rate_ratio and config.lr_scheduler not in ("linear", "cosine"):
        raise config.refusal(
            "min_learning_rate_ratio",
            f"needs --lr-scheduler linear or cosine ({config.lr_scheduler} never falls)",
            "choose one of these, or leave it out",
        )
    for name in ("warmup_ratio", "min_learning_rate_ratio"):
        if getattr(config, name) > 1:
            raise config.refusal(name, "must be in [0, 1]", "0.1 is usual")
