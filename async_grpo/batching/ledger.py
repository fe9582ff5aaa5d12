"""Nothing is lost: every sample of every admitted slot ends in exactly one fate. Pure.

    admitted = in flight + trained + zero_contribution + replaced + failed + discarded

holds at all times, for slots and for samples. Memory is that of the open slots and open steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from async_grpo.batching.admission import StepKey

Fate = Literal["trained", "zero_contribution", "failed", "discarded", "replaced"]
# Also the order in which a slot takes its fate from its samples: one trained sample makes it
# trained, and attempts that were replaced or done again matter only when nothing else came of it.
FATES: tuple[Fate, ...] = get_args(Fate)
FATES_WITH_REASON: tuple[Fate, ...] = ("failed", "discarded")


class LedgerError(RuntimeError):
    """Work was lost, counted twice, or never admitted: a bug, so the run must not go on."""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Totals since the start of the run, across resumes."""

    admitted_slots: int
    admitted_samples: int
    in_flight_slots: int
    in_flight_samples: int
    slots: Mapping[str, int]  # by fate
    samples: Mapping[str, int]  # by fate
    reasons: Mapping[str, int]  # samples by "fate: reason"
    output_tokens: int  # received from workers, whatever became of them


@dataclass(slots=True)
class _Slot:
    step: StepKey
    in_flight: int  # samples without a fate yet
    best_fate: int | None = None  # index into FATES of the strongest fate so far


@dataclass(slots=True)
class _Step:
    """What is known of a step until it is closed, so that it can be rolled back."""

    sizes: dict[int, int] = field(default_factory=dict)  # samples of each slot, by ordinal
    num_open: int = 0  # slots
    closed: Counter[str] = field(default_factory=Counter)  # slots by fate
    samples: Counter[str] = field(default_factory=Counter)  # by fate
    reasons: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Double entry of slots and samples."""

    def __init__(self) -> None:
        self._last_ordinal = -1
        self._open: dict[int, _Slot] = {}
        self._in_flight = 0  # samples of the open slots
        self._steps: dict[StepKey, _Step] = {}
        self._admitted_slots = 0
        self._admitted_samples = 0
        self._slots: Counter[str] = Counter()
        self._samples: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._output_tokens = 0

    @property
    def in_flight(self) -> int:
        """Samples that were admitted and have no fate yet."""
        return self._in_flight

    @property
    def open_slots(self) -> Collection[int]:
        """Slots with samples in flight, in order: what a resumed run issues again."""
        return self._open.keys()

    def admit(self, ordinal: int, *, num_samples: int, step: StepKey) -> None:
        """A slot starts; slots are admitted in ordinal order, each once."""
        _require(num_samples >= 1, f"slot {ordinal} must have at least 1 sample, got {num_samples}")
        _require(
            ordinal > self._last_ordinal,
            f"slots must be admitted in order and once, got {ordinal} after {self._last_ordinal}",
        )
        self._last_ordinal = ordinal
        self._open[ordinal] = _Slot(StepKey(*step), num_samples)
        opened = self._steps.setdefault(StepKey(*step), _Step())
        opened.sizes[ordinal] = num_samples
        opened.num_open += 1
        self._in_flight += num_samples
        self._admitted_slots += 1
        self._admitted_samples += num_samples

    def settle(self, ordinal: int, *, fate: Fate, num_samples: int, reason: str = "") -> None:
        """Some or all samples of an open slot reach their fate; the last ones close the slot.

        `reason` is a short fixed phrase, given exactly when the fate is failed or discarded.
        """
        slot = self._settle(ordinal, fate=fate, num_samples=num_samples, reason=reason)
        if slot.in_flight == 0 and slot.best_fate is not None:
            self._slots[FATES[slot.best_fate]] += 1
            self._steps[slot.step].closed[FATES[slot.best_fate]] += 1
            self._steps[slot.step].num_open -= 1
            del self._open[ordinal]

    def reissue(
        self,
        ordinal: int,
        *,
        fate: Literal["replaced", "discarded"],
        num_samples: int,
        reason: str = "",
    ) -> None:
        """All samples in flight of an open slot are given up, `num_samples` new ones admitted.

        `replaced` when dynamic sampling draws another question (no reason), `discarded` when the
        same work is done again.
        """
        _require(num_samples >= 1, f"slot {ordinal} must have at least 1 sample, got {num_samples}")
        in_flight = self._slot(ordinal).in_flight
        slot = self._settle(ordinal, fate=fate, num_samples=in_flight, reason=reason)
        slot.in_flight = num_samples
        self._in_flight += num_samples
        self._steps[slot.step].sizes[ordinal] = num_samples
        self._admitted_samples += num_samples

    def rolled_back(self, *, first: StepKey, reason: str) -> Ledger:
        """A copy in which nothing of step `first` and of later ones has been done yet.

        All that was admitted of them is discarded for `reason`, whatever its fate, and as much is
        in flight again.

        >>> ledger = Ledger()
        >>> for ordinal in (0, 1):
        ...     ledger.admit(ordinal, num_samples=4, step=StepKey(ordinal, 0))
        ...     ledger.settle(ordinal, fate="zero_contribution", num_samples=4)
        >>> counts = ledger.rolled_back(first=StepKey(1, 0), reason="restart").counts()
        >>> counts.admitted_samples, counts.in_flight_samples, counts.samples["discarded"]
        (12, 4, 4)
        """
        ledger = Ledger.restore(self.state())
        for key in sorted(key for key in ledger._steps if key >= first):
            ledger._roll_back(key, reason)
        ledger._open = dict(sorted(ledger._open.items()))
        ledger.check()
        return ledger

    def _roll_back(self, key: StepKey, reason: str) -> None:
        step = self._steps[key]
        in_flight = sum(
            self._open[ordinal].in_flight for ordinal in step.sizes if ordinal in self._open
        )
        discarded = Counter({"discarded": step.samples.total() + in_flight})
        reasons = Counter({f"discarded: {reason}": discarded.total()})
        self._samples = self._samples - step.samples + discarded
        self._reasons = self._reasons - step.reasons + reasons
        self._slots -= step.closed
        self._admitted_samples += sum(step.sizes.values())
        for ordinal, size in step.sizes.items():
            self._open[ordinal] = _Slot(key, size, FATES.index("discarded"))
        self._in_flight += sum(step.sizes.values()) - in_flight
        self._steps[key] = _Step(step.sizes, len(step.sizes), Counter(), discarded, reasons)

    def receive_tokens(self, num_tokens: int) -> None:
        """Output tokens arrived from a worker."""
        self._output_tokens += num_tokens

    def step_counts(self, step: StepKey) -> dict[str, int]:
        """Samples of one open step by fate, all fates named."""
        _require(step in self._steps, f"step {tuple(step)} is not open: never admitted, or closed")
        return {fate: self._steps[step].samples[fate] for fate in FATES}

    def step_reasons(self, step: StepKey) -> dict[str, int]:
        """Samples of one open step by "fate: reason", where there is one."""
        _require(step in self._steps, f"step {tuple(step)} is not open: never admitted, or closed")
        return dict(self._steps[step].reasons)

    def close_step(self, step: StepKey) -> dict[str, int]:
        """The final counts of a step; forgets it, and refuses while its samples are in flight."""
        counts = self.step_counts(step)
        if self._steps[step].num_open:
            waiting = [ordinal for ordinal in self._steps[step].sizes if ordinal in self._open]
            raise LedgerError(f"step {tuple(step)} has samples in flight in slots {waiting}")
        del self._steps[step]
        return counts

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted_slots=self._admitted_slots,
            admitted_samples=self._admitted_samples,
            in_flight_slots=len(self._open),
            in_flight_samples=self.in_flight,
            slots={fate: self._slots[fate] for fate in FATES},
            samples={fate: self._samples[fate] for fate in FATES},
            reasons=dict(self._reasons),
            output_tokens=self._output_tokens,
        )

    def check(self) -> None:
        """Raise `LedgerError` with the numbers unless everything admitted is accounted for."""
        c = self.counts()
        for what, admitted, in_flight, fates in (
            ("slots", c.admitted_slots, c.in_flight_slots, c.slots),
            ("samples", c.admitted_samples, c.in_flight_samples, c.samples),
        ):
            total = in_flight + sum(fates.values())
            _require(
                admitted == total,
                f"{what} admitted must equal in flight + fates, got {admitted} != "
                f"{in_flight} + {dict(fates)} (= {total})",
            )

    def state(self) -> dict[str, Any]:
        """Everything, as plain JSON values for a checkpoint."""
        return {
            "last_ordinal": self._last_ordinal,
            "open": [[o, *s.step, s.in_flight, s.best_fate] for o, s in self._open.items()],
            "steps": [
                [*key, list(step.sizes.items()), *map(dict, _counters(step))]
                for key, step in self._steps.items()
            ],
            "admitted_slots": self._admitted_slots,
            "admitted_samples": self._admitted_samples,
            "slots": dict(self._slots),
            "samples": dict(self._samples),
            "reasons": dict(self._reasons),
            "output_tokens": self._output_tokens,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Ledger:
        """The inverse of `state`; raises `LedgerError` if it does not balance."""
        ledger = cls()
        ledger._last_ordinal = state["last_ordinal"]
        for ordinal, batch, step_in_batch, in_flight, best_fate in state["open"]:
            ledger._open[ordinal] = _Slot(StepKey(batch, step_in_batch), in_flight, best_fate)
            ledger._in_flight += in_flight
        for batch, step_in_batch, sizes, *counters in state["steps"]:
            by_ordinal: dict[int, int] = dict(sizes)
            num_open = sum(ordinal in ledger._open for ordinal in by_ordinal)
            ledger._steps[StepKey(batch, step_in_batch)] = _Step(
                by_ordinal, num_open, *(Counter[str](counts) for counts in counters)
            )
        ledger._admitted_slots = state["admitted_slots"]
        ledger._admitted_samples = state["admitted_samples"]
        ledger._slots = Counter(state["slots"])
        ledger._samples = Counter(state["samples"])
        ledger._reasons = Counter(state["reasons"])
        ledger._output_tokens = state["output_tokens"]
        ledger.check()
        return ledger

    def _slot(self, ordinal: int) -> _Slot:
        slot = self._open.get(ordinal)
        if slot is None:
            raise LedgerError(f"slot {ordinal} is not open: never admitted, or already settled")
        return slot

    def _settle(self, ordinal: int, *, fate: Fate, num_samples: int, reason: str) -> _Slot:
        slot = self._slot(ordinal)
        _require(fate in FATES, f"a fate must be one of {FATES}, got {fate!r}")
        _require(
            1 <= num_samples <= slot.in_flight,
            f"slot {ordinal} has {slot.in_flight} samples in flight, got {num_samples} as {fate}",
        )
        _require(
            (fate in FATES_WITH_REASON) == bool(reason),
            f"a reason belongs to {FATES_WITH_REASON} and only to them, got {fate!r}: {reason!r}",
        )
        slot.in_flight -= num_samples
        self._in_flight -= num_samples
        index = FATES.index(fate)
        slot.best_fate = index if slot.best_fate is None else min(index, slot.best_fate)
        self._samples[fate] += num_samples
        self._steps[slot.step].samples[fate] += num_samples
        if reason:
            self._reasons[f"{fate}: {reason}"] += num_samples
            self._steps[slot.step].reasons[f"{fate}: {reason}"] += num_samples
        return slot


def _counters(step: _Step) -> tuple[Counter[str], ...]:
    return step.closed, step.samples, step.reasons


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LedgerError(message)
