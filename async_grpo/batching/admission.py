"""Which slots may start, and whose turn it is on devices that engines and ranks share. Pure.

The staleness window lies over the endless order of ordinals.

Batch b is the slots [b*B, (b+1)*B); gradient step j of it is M of them. With `max_staleness` S,
slots of batch b may start when b - S batches have been completed and their weights published.

    S = 1, B = 4, 2 batches published:  batches 0..3 may have started, ordinals 0..15
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from async_grpo.types import WeightsVersion


class StepKey(NamedTuple):
    """One gradient step of the run; keys compare in training order."""

    batch: int
    step_in_batch: int


FIRST_STEP = StepKey(0, 0)


@dataclass(eq=False, kw_only=True)
class AdmissionWindow:
    """Hands out ordinals in order, never further ahead than the staleness window allows."""

    batch_size: int = field(kw_only=False)  # slots
    questions_per_step: int
    max_staleness: int  # of batches that start from now on
    num_batches: int  # of the whole run
    incarnation: int = 0
    first: StepKey = FIRST_STEP  # with which the run begins or resumes
    _started: dict[int, int] = field(default_factory=dict)  # by batch: its staleness at its start

    def __post_init__(self) -> None:
        self.batches_published = self.first.batch  # completed batches whose weights are published
        self.next_ordinal = self.ordinals_of(self.first).start  # of the first slot not yet started

    def start(self) -> range:
        """The ordinals that may start now, in order; each is returned once.

        >>> window = AdmissionWindow(4, questions_per_step=2, max_staleness=1, num_batches=9)
        >>> window.start(), window.start()
        (range(0, 8), range(8, 8))
        >>> window.batch_published(1)
        >>> window.start(), window.step_of(9), window.oldest_weights(9)
        (range(8, 12), StepKey(batch=2, step_in_batch=0), WeightsVersion(incarnation=0, batches=1))
        """
        num_open = min(self.batches_published + self.max_staleness + 1, self.num_batches)
        first = self.next_ordinal
        self.next_ordinal = max(first, num_open * self.batch_size)
        for batch in range(first // self.batch_size, num_open):
            self._started.setdefault(batch, self.max_staleness)
        return range(first, self.next_ordinal)

    def batch_published(self, batches_completed: int) -> None:
        """Weights after `batches_completed` batches are published: the window moves."""
        most = self.next_ordinal // self.batch_size
        if not self.batches_published <= batches_completed <= most:
            raise ValueError(
                f"completed batches must be in {self.batches_published}..{most} (those already "
                f"published, those fully started), got {batches_completed}"
            )
        self.batches_published = batches_completed
        for batch in [batch for batch in self._started if batch < batches_completed]:
            del self._started[batch]

    def step_of(self, ordinal: int) -> StepKey:
        """The gradient step that a slot belongs to."""
        batch, slot = divmod(ordinal, self.batch_size)
        return StepKey(batch, slot // self.questions_per_step)

    def ordinals_of(self, step: StepKey) -> range:
        """The slots of one gradient step."""
        first = step.batch * self.batch_size + step.step_in_batch * self.questions_per_step
        return range(first, first + self.questions_per_step)

    def oldest_weights(self, ordinal: int) -> WeightsVersion:
        """The oldest weights that may sample this slot."""
        batch = ordinal // self.batch_size
        return WeightsVersion(self.incarnation, max(0, batch - self.staleness_of(batch)))

    def staleness_of(self, batch: int) -> int:
        """The largest lag of a batch's samples: --max-staleness when the batch started."""
        return self._started.get(batch, self.max_staleness)


@dataclass(slots=True, kw_only=True)
class Turns:
    """Whose turn it is with --colocated: engines sample whole batches, then ranks train one.

    The window decides how many batches are admitted: with max_staleness 1 the engines have finished
    batch b + 1 before the ranks train b.

    >>> turns = Turns(num_batches=2, num_ended=0)
    >>> turns.published(0)  # by ranks that have left the devices: the engines wake
    >>> turns.engines_are_done(num_unsettled=3), turns.engines_are_done(num_unsettled=0)
    (False, True)
    >>> turns.slept()
    >>> turns.is_of_ranks
    True
    >>> turns.batch_ended()  # its last round is sent: the ranks get no other
    >>> turns.is_of_ranks, turns.engines_are_done(num_unsettled=0)  # until they have published
    (False, False)
    """

    num_batches: int  # of the whole run
    num_ended: int  # batches whose rounds have all been sent
    is_of_ranks: bool = False  # they may get rounds: the engines sleep
    _num_published: int = -1

    def published(self, num_batches: int) -> None:
        """The weights after so many batches are published, which wakes the engines."""
        self._num_published = num_batches

    def engines_are_done(self, *, num_unsettled: int) -> bool:
        """Whether the engines may sleep; `num_unsettled`: admitted slots that are in work.

        After the last batch they stay awake, for evaluations.
        """
        is_theirs = self._num_published == self.num_ended < self.num_batches
        return is_theirs and not self.is_of_ranks and not num_unsettled

    def slept(self) -> None:
        """The engines sleep."""
        self.is_of_ranks = True

    def batch_ended(self) -> None:
        """The last round of a batch is sent."""
        self.num_ended += 1
        self.is_of_ranks = False
