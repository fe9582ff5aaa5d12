"""The options of AdamW and of its learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.option import POSITIVE, Change, Options, option

MAX_LEARNING_RATE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions(Options):
    """What a gradient step does to the weights."""

    learning_rate: float = option(1e-6, change=Change.LIVE, group="Learning rate and optimizer")
    """peak learning rate of AdamW"""
    lr_scheduler: str = option(
        "constant_with_warmup",
        choices=("constant", "constant_with_warmup", "linear", "cosine"),
    )
    """learning-rate schedule"""
    schedule_clock: str = option("steps", choices=("steps", "samples"))
    """what the schedule counts: gradient steps taken, or the samples trained in them"""
    num_warmup_steps: int = option(0)
    """gradient steps of linear warm-up"""
    num_warmup_samples: int = option(0)
    """samples of linear warm-up, for --schedule-clock samples"""
    warmup_ratio: float = option(0.0)
    """linear warm-up as a share of the planned steps or samples, instead of a number"""
    min_learning_rate_ratio: float = option(0.0)
    """share of --learning-rate at which linear and cosine end"""
    adam_beta1: float = option(0.9)
    """first moment decay of AdamW"""
    adam_beta2: float = option(0.95)
    """second moment decay of AdamW"""
    adam_epsilon: float = option(1e-8, must=POSITIVE)
    """epsilon of AdamW"""
    weight_decay: float = option(0.0)
    """decoupled weight decay of AdamW"""
    max_grad_norm: float = option(1.0)
    """clip of the global gradient norm; 0: no clipping"""
    allow_high_learning_rate: bool = option(False, change=Change.INCIDENTAL)
    """take a --learning-rate above 0.01 as meant"""

    def check(self) -> None:
        """See `Options`."""
        if self.learning_rate > MAX_LEARNING_RATE and not self.allow_high_learning_rate:
            raise self.refusal(
                "learning_rate",
                f"must be at most {MAX_LEARNING_RATE:g}, "
                "3 was seen to destroy the policy in one step",
                "1e-6 to 1e-5 is usual (1e-6, not 1); "
                "--allow-high-learning-rate takes it all the same",
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Raise `ConfigError` for a warm-up or an end that the schedule does not have."""
        if self.num_warmup_samples and self.schedule_clock != "samples":
            raise self.refusal(
                "num_warmup_samples",
                "goes with --schedule-clock samples",
                "set the clock, or use --num-warmup-steps",
            )
        if self.num_warmup_steps and self.schedule_clock != "steps":
            raise self.refusal(
                "num_warmup_steps",
                "goes with --schedule-clock steps",
                "set the clock, or use --num-warmup-samples",
            )
        if self.warmup_ratio and (self.num_warmup_steps or self.num_warmup_samples):
            raise self.refusal(
                "warmup_ratio",
                "must not stand beside --num-warmup-steps or --num-warmup-samples",
                "give the share or the number",
            )
        if self.warmup_ratio and self.lr_scheduler == "constant":
            raise self.refusal(
                "warmup_ratio",
                "needs a --lr-scheduler that warms up",
                "constant_with_warmup is one",
            )
        if self.min_learning_rate_ratio and self.lr_scheduler not in ("linear", "cosine"):
            raise self.refusal(
                "min_learning_rate_ratio",
                f"needs --lr-scheduler linear or cosine ({self.lr_scheduler} never falls)",
                "choose one of these, or leave it out",
            )
        for name in ("warmup_ratio", "min_learning_rate_ratio"):
            if getattr(self, name) > 1:
                raise self.refusal(name, "must be in [0, 1]", "0.1 is usual")
