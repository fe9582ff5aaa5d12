"""Says what a run's steps spend their time on, and what would make them shorter. Pure.

The shares are means over the last steps. A new cause must lead for several steps in a row before it
is shown, so that the display does not change with every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

Row = Mapping[str, float | int | None]

NUM_AVERAGED = 8  # steps
NUM_BEFORE = 2  # first steps, which are ignored: engines and ranks warm up
NUM_HELD = 3  # steps in a row that a new cause must lead before it is shown
MUCH = 0.15  # share of the wall clock that trainers wait: less is noise
LARGE = 0.2  # share of the wall clock, for every other kind of time
FEW = 0.15  # share of a step's samples in generation at a time: the others have ended


class StepCause(Enum):
    """The stage that limits the steps."""

    GENERATION = "generation"
    STRAGGLERS = "long outputs"
    VERIFICATION = "verification"
    SCORING = "scoring"
    SYNC = "sending weights"
    WINDOW = "the staleness window"
    TRAINING = "training"
    PUBLISHING = "publishing weights"
    CHECKPOINTING = "checkpoints"
    EVALUATION = "evaluation"
    NONE = "nothing"


WAITED = "trainers waited {waiting:.0%} of the time for samples"
IDLE = "generators stood idle {generators_idle:.0%}"
# {cause: (what was measured, what it means and what helps)}
WORDS: Mapping[StepCause, tuple[str, str]] = {
    StepCause.GENERATION: (
        WAITED + ", {generating:.0f} of which were in generation at a time",
        "generation is the bottleneck; add generation workers, or raise --max-staleness",
    ),
    StepCause.STRAGGLERS: (
        WAITED + ", with {generating:.1f} of a step's {num_samples:.0f} in generation at a time",
        "a few long outputs are the bottleneck; raise --max-staleness, and later batches are "
        "generated meanwhile",
    ),
    StepCause.VERIFICATION: (
        WAITED + ", {verifying:.0f} of which were being graded at a time",
        "verification is the bottleneck; add verifier processes, or make the rewards cheaper",
    ),
    StepCause.SCORING: (
        WAITED + ", {scoring:.0f} of which were being scored at a time",
        "the reference or a teacher is the bottleneck; add workers of its mode",
    ),
    StepCause.SYNC: (
        WAITED + " and " + IDLE + ", while new weights were under way {syncing:.0%}",
        "sending weights is the bottleneck; raise --max-staleness, or send less by --weight-delta",
    ),
    StepCause.WINDOW: (
        WAITED + " and " + IDLE,
        "they take turns at the edge of the staleness window; raise --max-staleness",
    ),
    StepCause.TRAINING: (
        IDLE + " of the time while trainers computed {computing:.0%}",
        "training is the bottleneck; add trainer ranks, or raise --max-tokens-per-gpu",
    ),
    StepCause.PUBLISHING: (
        "trainers stood still {publishing:.0%} of the time to publish weights, once a batch",
        "raise --batch-size and leave --train-minibatch-size as it is",
    ),
    StepCause.CHECKPOINTING: (
        "trainers stood still {checkpointing:.0%} of the time for checkpoints",
        "raise --checkpoint-every-batches and --checkpoint-every-minutes",
    ),
    StepCause.EVALUATION: (
        "trainers stood still {evaluating:.0%} of the time for evaluations",
        "raise --eval-every-batches, or hold out fewer questions",
    ),
    StepCause.NONE: (WAITED + ", " + IDLE, "no bottleneck: only more of both makes steps shorter"),
}


@dataclass(frozen=True, slots=True)
class Shares:
    """Means over several steps: shares (0 to 1) of the wall clock, and samples at a time."""

    waiting: float  # rank 0, for samples
    publishing: float  # rank 0
    checkpointing: float  # rank 0
    evaluating: float  # rank 0
    generators_idle: float  # while no sample was in generation or queued for it
    syncing: float  # from the announcement of new weights to the last worker's acknowledgement
    generating: float  # samples at a time, those in a queue included
    verifying: float  # likewise
    scoring: float  # likewise
    num_samples: float  # of a step


def shares_of(rows: Sequence[Row]) -> Shares | None:
    """Means of `rows`, weighted by wall clock; None for rows of an algorithm without a pipeline.

    >>> row = {"seconds": 2.0, "seconds_waiting": 1.0, "generator_idle_fraction": 0.25}
    >>> shares = shares_of([row, row | {"seconds": 6.0}])
    >>> shares.waiting, shares.generators_idle
    (0.25, 0.25)
    """
    rows = [row for row in rows if row.get("generator_idle_fraction") is not None]
    seconds = sum(_of(row, "seconds") for row in rows)
    if not seconds:
        return None

    def share(name: str) -> float:
        return sum(_of(row, name) for row in rows) / seconds

    def mean(name: str) -> float:
        return sum(_of(row, name) * _of(row, "seconds") for row in rows) / seconds

    return Shares(
        waiting=share("seconds_waiting"),
        publishing=share("seconds_publishing"),
        checkpointing=share("seconds_checkpointing"),
        evaluating=share("seconds_evaluating"),
        generators_idle=mean("generator_idle_fraction"),
        syncing=_sync_seconds(rows) / seconds,
        generating=mean("avg_generating_samples"),
        verifying=mean("avg_verifying_samples"),
        scoring=mean("avg_scoring_samples"),
        num_samples=sum(_of(row, "num_samples") for row in rows) / len(rows),
    )


def cause_of(shares: Shares) -> StepCause:
    """The stage that limits the steps.

    A waiting trainer waits for the stage with the most samples in it at a time: by Little's law
    (1961) samples spend most of their time there. Where generators idle too, both wait: for new
    weights, or for each other at the edge of the staleness window.
    """
    if shares.waiting >= MUCH:
        in_all = shares.generating + shares.verifying + shares.scoring
        if shares.verifying > in_all / 2:
            return StepCause.VERIFICATION
        if shares.scoring > in_all / 2:
            return StepCause.SCORING
        if shares.generators_idle >= LARGE:
            return (
                StepCause.SYNC if shares.syncing > shares.generators_idle / 2 else StepCause.WINDOW
            )
        busy = 1 - shares.generators_idle
        if shares.generating < FEW * shares.num_samples * busy:
            return StepCause.STRAGGLERS
        return StepCause.GENERATION
    stalls = {
        StepCause.EVALUATION: shares.evaluating,
        StepCause.CHECKPOINTING: shares.checkpointing,
        StepCause.PUBLISHING: shares.publishing,
    }
    longest = max(stalls, key=lambda cause: stalls[cause])
    if stalls[longest] >= LARGE:
        return longest
    return StepCause.TRAINING if shares.generators_idle >= LARGE else StepCause.NONE


def in_words(cause: StepCause, shares: Shares) -> str:
    """What was measured, what it means, and what helps."""
    stalls = shares.waiting + shares.publishing + shares.checkpointing + shares.evaluating
    return ": ".join(WORDS[cause]).format(**asdict(shares), computing=1 - stalls)


class Bottleneck:
    """The cause that is shown, kept by the metrics of each step."""

    def __init__(self) -> None:
        self.sentence = ""  # of `cause`; empty at first
        self.cause: StepCause | None = None
        self._rows: deque[Row] = deque(maxlen=NUM_AVERAGED)
        self._num_seen = 0
        self._contender: StepCause | None = None
        self._num_led = 0  # steps in a row in which the contender led

    def see_row(self, row: Row) -> bool:
        """Take the metrics of a step; True if another cause is shown from now on."""
        self._num_seen += 1
        if self._num_seen <= NUM_BEFORE:
            return False
        self._rows.append(row)
        shares = shares_of(self._rows)
        if shares is None:
            return False
        leads = cause_of(shares)
        self._num_led = self._num_led + 1 if leads is self._contender else 1
        self._contender = leads
        is_another = leads is not self.cause and self._num_led >= NUM_HELD
        if is_another:
            self.cause = leads
        if self.cause is not None:
            self.sentence = in_words(self.cause, shares)
        return is_another


def _sync_seconds(rows: Sequence[Row]) -> float:
    """Seconds of the syncs in `rows`, each counted once: rows repeat the latest sync.

    >>> lines = [(4, 1.5), (4, 1.5), (5, 2.0)]
    >>> _sync_seconds([{"sync_batches": n, "sync_seconds": s} for n, s in lines])
    3.5
    """
    return sum({row.get("sync_batches"): _of(row, "sync_seconds") for row in rows}.values())


def _of(row: Row, name: str) -> float:
    return float(row.get(name) or 0.0)
