"""Which questions may start: the staleness window over the endless order of ordinals. Pure.

Batch b is the slots [b*B, (b+1)*B); gradient step j of it is M of them. With `max_staleness` S,
slots of batch b may start when b - S batches have been completed and their weights published.

    S = 1, B = 4, 2 batches published:  batches 0..3 may have started, ordinals 0..15
"""

from __future__ import annotations

from typing import NamedTuple

from async_grpo.types import WeightsVersion


class StepKey(NamedTuple):
    """One gradient step of the run; keys compare in training order."""

    batch: int
    step_in_batch: int


class AdmissionWindow:
    """Hands out ordinals in order, never further ahead than the staleness window allows."""

    def __init__(
        self,
        batch_size: int,
        *,
        questions_per_step: int,
        max_staleness: int,
        num_batches: int,
        incarnation: int = 0,
        batches_published: int = 0,
        next_ordinal: int | None = None,
    ) -> None:
        """`num_batches` is the length of the run; the last three restore a resumed one.

        `next_ordinal` defaults to the first slot of the first batch that is not completed.
        """
        _check_shape(batch_size, questions_per_step, max_staleness, num_batches)
        self.batch_size = batch_size
        self.questions_per_step = questions_per_step
        self.max_staleness = max_staleness
        self.num_batches = num_batches
        self.incarnation = incarnation
        self._batches_published = batches_published
        self._next_ordinal = (
            batches_published * batch_size if next_ordinal is None else next_ordinal
        )

    @property
    def batches_published(self) -> int:
        """Completed batches whose weights are out."""
        return self._batches_published

    @property
    def next_ordinal(self) -> int:
        """The first slot that has not started: the cursor that a checkpoint keeps."""
        return self._next_ordinal

    @property
    def steps_per_batch(self) -> int:
        return self.batch_size // self.questions_per_step

    def admissible(self) -> range:
        """Ordinals that may start now and have not, in order.

        >>> window = AdmissionWindow(4, questions_per_step=2, max_staleness=1, num_batches=9)
        >>> window.admissible()
        range(0, 8)
        >>> for ordinal in window.admissible():
        ...     window.start(ordinal)
        >>> window.batch_published(1)
        >>> window.admissible(), window.step_of(9), window.oldest_weights(9)
        (range(8, 12), StepKey(batch=2, step_in_batch=0), WeightsVersion(incarnation=0, batches=1))
        """
        num_open = min(self._batches_published + self.max_staleness + 1, self.num_batches)
        return range(self._next_ordinal, max(self._next_ordinal, num_open * self.batch_size))

    def start(self, ordinal: int) -> None:
        """Take the next admissible slot; slots start in ordinal order, each once."""
        if not self.admissible() or ordinal != self._next_ordinal:
            raise ValueError(
                f"slots must start in order and inside the window {self.admissible()}, "
                f"got ordinal {ordinal}: start the ordinals of admissible(), each once"
            )
        self._next_ordinal += 1

    def batch_published(self, batches_completed: int) -> None:
        """Weights with `batches_completed` batches in them are out: the window moves."""
        most = self._next_ordinal // self.batch_size
        if not self._batches_published <= batches_completed <= most:
            raise ValueError(
                f"completed batches must be in {self._batches_published}..{most} (those already "
                f"published, those fully started), got {batches_completed}"
            )
        self._batches_published = batches_completed

    def batch_of(self, ordinal: int) -> int:
        return ordinal // self.batch_size

    def step_of(self, ordinal: int) -> StepKey:
        batch, slot = divmod(ordinal, self.batch_size)
        return StepKey(batch, slot // self.questions_per_step)

    def ordinals_of(self, step: StepKey) -> range:
        """The slots whose samples make up one gradient step."""
        first = step.batch * self.batch_size + step.step_in_batch * self.questions_per_step
        return range(first, first + self.questions_per_step)

    def oldest_weights(self, ordinal: int) -> WeightsVersion:
        """The oldest weights that may sample this slot: what its lease asks for."""
        return WeightsVersion(self.incarnation, max(0, self.batch_of(ordinal) - self.max_staleness))

    def lag(self, ordinal: int, *, version: WeightsVersion) -> int:
        """Batches between the weights that sampled and those that the slot's batch starts from."""
        return self.batch_of(ordinal) - version.batches


def _check_shape(
    batch_size: int, questions_per_step: int, max_staleness: int, num_batches: int
) -> None:
    if min(batch_size, questions_per_step, num_batches) < 1 or max_staleness < 0:
        raise ValueError(
            "batch_size, questions_per_step and num_batches must be at least 1 and max_staleness "
            f"at least 0, got {batch_size}, {questions_per_step}, {num_batches}, {max_staleness}"
        )
    if batch_size % questions_per_step:
        raise ValueError(
            f"questions_per_step must divide batch_size ({batch_size}), got {questions_per_step}"
        )
