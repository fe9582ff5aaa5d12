"""The options of batches, and of sampling their outputs."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.option import POSITIVE, Change, Options, flag, option


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions(Options):
    """Sizes of batches, gradient steps and minibatches."""

    num_training_batches: int = option(100, must=POSITIVE, group="Batches and sampling")
    """batches to train"""
    batch_size: int = option(32, must=POSITIVE, change=Change.FIXED)
    """questions (sft: pairs) a batch; weights are published once each"""
    max_tokens_per_gpu: int = option(16384, must=POSITIVE)
    """prompt + output tokens of one rank's minibatch"""
    train_minibatch_size: int = option(0, change=Change.FIXED)
    """questions a gradient step, a divisor of --batch-size; 0: the whole batch"""
    num_passes: int = option(1, must=POSITIVE, change=Change.FIXED)
    """times that a batch is trained, in gradient steps of its own each time, before its weights are
    published (the inner loop of GRPO's paper); above 1 --ratio-mode auto is decoupled"""
    deterministic: bool = option(False)
    """form rounds in ordinal order from complete steps; needs --max-staleness 0"""

    def check(self) -> None:
        """See `Options`."""
        if self.batch_size % self.questions_per_step:
            raise self.refusal(
                "train_minibatch_size",
                f"counts questions and must divide --batch-size ({self.batch_size})",
                "choose a divisor, or 0 for one gradient step a batch",
            )

    @property
    def questions_per_step(self) -> int:
        """Questions a gradient step: M of the design."""
        return self.train_minibatch_size or self.batch_size

    @property
    def steps_per_pass(self) -> int:
        """Gradient steps of one pass over a batch."""
        return self.batch_size // self.questions_per_step

    @property
    def steps_per_batch(self) -> int:
        """Gradient steps of all passes; a `step_in_batch` counts through them."""
        return self.num_passes * self.steps_per_pass

    def pass_of(self, step_in_batch: int) -> int:
        """The pass over its batch, from 1, that a gradient step belongs to.

        >>> options = BatchingOptions(batch_size=8, train_minibatch_size=4, num_passes=2)
        >>> [options.pass_of(step) for step in range(options.steps_per_batch)]
        [1, 1, 2, 2]
        """
        return 1 + step_in_batch // self.steps_per_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(Options):
    """How outputs are sampled, how stale the weights may be, and time limits."""

    samples_per_question: int = option(
        8, must=POSITIVE, change=Change.FIXED, group="Batches and sampling"
    )
    """outputs sampled for each question"""
    max_generation_tokens: int = option(512, must=POSITIVE)
    """longest output in tokens"""
    length_limit_policy: str = option("truncate", choices=("truncate", "invalidate", "zero_reward"))
    """what becomes of an output that is cut there: it is graded as it stands; it leaves its group,
    in neither its statistics nor the loss, which favours short ones; or its reward is 0"""
    temperature: float = option(1.0)
    """sampling temperature, also of every log-probability"""
    max_staleness: int = option(1, change=Change.FIXED | Change.LIVE)
    """batches that generation may run ahead of published weights; 0: strictly on-policy"""
    num_batches_per_ref_model_update: int = option(1_000_000, must=POSITIVE, change=Change.FIXED)
    """batches between updates of the reference model with the policy's weights"""
    generation_timeout_s: float = option(0.0)
    """seconds after which a group's outputs are dropped, which favours short ones; 0: never"""
    turn_timeout_s: float = option(0.0)
    """seconds that a turn may take in an environment, with its wait for an engine, before its group
    is dropped, which favours short ones; 0: any number"""
    episode_timeout_s: float = option(0.0)
    """the same of a whole episode"""
    routing_replay: str = option("auto", choices=("auto", "on", "off"))
    """train a mixture of experts with the experts that the engine chose: where engines tell them,
    always (samples without them are refused), or never"""
    constrained_outputs: bool = option(False)
    """let agents ask for JSON by a schema: what a grammar samples is not the policy's own, and not
    trained; without it such answers are sampled freely, and trained"""

    @property
    def timeouts(self) -> str:
        """The time limits that drop outputs, as they were given, for messages."""
        names = ("generation_timeout_s", "turn_timeout_s", "episode_timeout_s")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        return ", ".join(f"{flag(name)} {seconds:g}" for name, seconds in given.items())

    def reference_of(self, batch: int) -> int:
        """Return the weights version, in batches, of the reference that scores a batch."""
        period = self.num_batches_per_ref_model_update
        return max(0, batch - self.max_staleness) // period * period
