"""Every sample of every admitted slot ends in exactly one fate: none is lost or doubled. Pure.

    admitted = in flight + trained + zero_contribution + replaced + failed + discarded

holds at all times for slots and for samples, which are episodes; and for tokens, where `admitted`
are those that engines have answered. Memory grows with the open slots and open steps alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from async_grpo.batching.admission import StepKey
from async_grpo.types import PlayedGroup, Turn
from async_grpo.util.errors import WorkerError

if TYPE_CHECKING:
    from async_grpo.types import EvaluationTerms

Fate = Literal["trained", "zero_contribution", "failed", "discarded", "replaced"]
# From the strongest to the weakest: a slot has the strongest fate of its samples. One trained
# sample makes it trained; replaced and repeated ones decide only if the slot has no others.
FATES: tuple[Fate, ...] = get_args(Fate)
FATES_WITH_REASON: tuple[Fate, ...] = ("failed", "discarded")
Counts = Counter[str]
UNUSED = "unused"  # reason for tokens that were cut off, or answered after nobody waited for them


class LedgerError(RuntimeError):
    """Work was lost, counted twice, or never admitted: a bug, so the run must not go on."""


@dataclass(slots=True)
class Fates:
    """Numbers of slots, samples and tokens by fate."""

    slots: Counts = field(default_factory=Counter)  # by fate
    samples: Counts = field(default_factory=Counter)  # by fate
    reasons: Counts = field(default_factory=Counter)  # samples by "fate: reason"
    tokens: Counts = field(default_factory=Counter)  # by fate
    token_reasons: Counts = field(default_factory=Counter)  # tokens by "fate: reason"

    def count(self, fate: Fate, num_samples: int, num_tokens: int, reason: str) -> None:
        """Samples and tokens have reached their fate; zeros are not counted."""
        if num_samples:
            self.samples[fate] += num_samples
            if reason:
                self.reasons[f"{fate}: {reason}"] += num_samples
        if num_tokens:
            self.tokens[fate] += num_tokens
            if reason:
                self.token_reasons[f"{fate}: {reason}"] += num_tokens


@dataclass(slots=True)
class _Slot:
    step: StepKey
    in_flight: int  # samples without a fate yet
    best_fate: int | None = None  # index into FATES of the strongest fate so far
    num_tokens: int = 0  # received tokens without a fate yet


@dataclass(slots=True)
class _Step:
    """A step until it is closed, with all that a rollback needs."""

    sizes: dict[int, int] = field(default_factory=dict)  # samples by the ordinal of their slot
    fates: Fates = field(default_factory=Fates)


@dataclass(slots=True, eq=False)
class Ledger:
    """Accounts for slots, samples and tokens since the start of the run, across resumes."""

    admitted_slots: int = 0
    admitted_samples: int = 0
    output_tokens: int = 0  # received from engines, whatever their fate
    fates: Fates = field(default_factory=Fates)
    _last_ordinal: int = -1
    _open: dict[int, _Slot] = field(default_factory=dict)  # by ordinal
    _steps: dict[StepKey, _Step] = field(default_factory=dict)  # open ones

    @property
    def in_flight(self) -> int:
        """Number of admitted samples without a fate yet."""
        return sum(slot.in_flight for slot in self._open.values())

    @property
    def open_slots(self) -> Collection[int]:
        """Ordinals of slots with samples in flight, in order: a resumed run starts them again."""
        return self._open.keys()

    def admit(self, ordinal: int, *, num_samples: int, step: StepKey) -> None:
        """A slot starts. Slots are admitted in the order of their ordinals, each once."""
        _require(
            ordinal > self._last_ordinal,
            f"slots must be admitted in order and once, got {ordinal} after {self._last_ordinal}",
        )
        self._last_ordinal = ordinal
        self._open[ordinal] = _Slot(step, num_samples)
        self._steps.setdefault(step, _Step()).sizes[ordinal] = num_samples
        self.admitted_slots += 1
        self.admitted_samples += num_samples

    def tokens_in_flight(self, ordinal: int) -> int:
        """Number of tokens that an open slot has received, and that have no fate yet."""
        return self._slot(ordinal).num_tokens

    def receive(self, ordinal: int, *, num_tokens: int) -> None:
        """An engine has answered a request of an open slot."""
        self._slot(ordinal).num_tokens += num_tokens
        self.output_tokens += num_tokens

    def settle(
        self,
        ordinal: int,
        *,
        fate: Fate,
        num_samples: int | None = None,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        """Samples and tokens of an open slot reach their fate; the last ones close the slot.

        `num_samples`: None settles all that are in flight, and their tokens. `reason` is a short
        fixed phrase, given exactly if the fate is failed or discarded.
        """
        slot = self._slot(ordinal)
        if num_samples is None:
            num_samples, num_tokens = slot.in_flight, slot.num_tokens
        totals = self._count(ordinal, fate, num_samples, num_tokens, reason)
        if not slot.in_flight and not slot.num_tokens and slot.best_fate is not None:
            for fates in totals:
                fates.slots[FATES[slot.best_fate]] += 1
            del self._open[ordinal]

    def reissue(
        self,
        ordinal: int,
        *,
        fate: Literal["replaced", "discarded"],
        num_samples: int | None = None,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        """Samples and tokens of an open slot are given up, and as many samples admitted again.

        `num_samples`: None gives up all that are in flight, and their tokens. The fate is
        `replaced` if dynamic sampling draws another question, which has no reason, `discarded` if
        the same work is repeated.
        """
        slot = self._slot(ordinal)
        if num_samples is None:
            num_samples, num_tokens = slot.in_flight, slot.num_tokens
        self.admitted_samples += num_samples
        slot.in_flight += num_samples
        # Not by `settle`, which would close a slot whose samples have all been settled.
        self._count(ordinal, fate, num_samples, num_tokens, reason)

    def rolled_back(self, *, first: StepKey, reason: str) -> Ledger:
        """A copy in which step `first` and later ones have only just been admitted.

        All of their samples and tokens are discarded for `reason`, whatever their fate was, and as
        many samples are in flight again.

        >>> ledger = Ledger()
        >>> for ordinal in (0, 1):
        ...     ledger.admit(ordinal, num_samples=4, step=StepKey(ordinal, 0))
        ...     ledger.settle(ordinal, fate="zero_contribution", num_samples=4)
        >>> again = ledger.rolled_back(first=StepKey(1, 0), reason="restart")
        >>> again.admitted_samples, again.in_flight, again.fates.samples["discarded"]
        (12, 4, 4)
        """
        ledger = Ledger.restore(self.state())
        for key in sorted(key for key in ledger._steps if key >= first):
            ledger._roll_back(key, reason)
        ledger._open = dict(sorted(ledger._open.items()))
        ledger.check()
        return ledger

    def _roll_back(self, key: StepKey, reason: str) -> None:
        sizes, done = self._steps[key].sizes, self._steps[key].fates
        waiting = [slot for slot in self._open.values() if slot.step == key]
        again = Fates()
        num_samples = done.samples.total() + sum(slot.in_flight for slot in waiting)
        num_tokens = done.tokens.total() + sum(slot.num_tokens for slot in waiting)
        again.count("discarded", num_samples, num_tokens, reason)
        for name in (each.name for each in fields(Fates)):
            ours, theirs = getattr(self.fates, name), getattr(again, name)
            setattr(self.fates, name, ours - getattr(done, name) + theirs)
        self.admitted_samples += sum(sizes.values())
        for ordinal, size in sizes.items():
            self._open[ordinal] = _Slot(key, size, FATES.index("discarded"))
        self._steps[key] = _Step(sizes, again)

    def close_step(self, step: StepKey) -> Fates:
        """Forget a step, and return its fates; raise `LedgerError` while any of it is in flight."""
        _require(step in self._steps, f"step {tuple(step)} is not open: never admitted, or closed")
        waiting = {
            ordinal: (slot.in_flight, slot.num_tokens)
            for ordinal, slot in self._open.items()
            if slot.step == step
        }
        _require(
            not waiting,
            f"step {tuple(step)} has samples and tokens in flight, by slot: {waiting}",
        )
        return self._steps.pop(step).fates

    def check(self) -> None:
        """Raise `LedgerError` with the numbers unless all that was admitted is accounted for."""
        num_tokens = sum(slot.num_tokens for slot in self._open.values())
        for what, admitted, in_flight, fates in (
            ("slots", self.admitted_slots, len(self._open), self.fates.slots),
            ("samples", self.admitted_samples, self.in_flight, self.fates.samples),
            ("tokens", self.output_tokens, num_tokens, self.fates.tokens),
        ):
            total = in_flight + fates.total()
            _require(
                admitted == total,
                f"{what} admitted must equal in flight + fates, got {admitted} != "
                f"{in_flight} + {dict(fates)} (= {total})",
            )

    def state(self) -> dict[str, object]:
        """The whole ledger as plain JSON values, for a checkpoint."""
        return {
            "last_ordinal": self._last_ordinal,
            "open": [
                [o, *s.step, s.in_flight, s.best_fate, s.num_tokens] for o, s in self._open.items()
            ],
            "steps": [
                [*key, list(step.sizes.items()), *_plain(step.fates).values()]
                for key, step in self._steps.items()
            ],
            "admitted_slots": self.admitted_slots,
            "admitted_samples": self.admitted_samples,
            **_plain(self.fates),
            "output_tokens": self.output_tokens,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Ledger:
        """The inverse of `state`; raises `LedgerError` if the numbers do not balance."""
        # Older checkpoints have the number of tokens, but not their fates.
        known = ({"tokens": {"trained": state["output_tokens"]}} | dict(state)).get
        ledger = cls(
            state["admitted_slots"],
            state["admitted_samples"],
            state["output_tokens"],
            Fates(*(Counter(known(each.name, {})) for each in fields(Fates))),
            state["last_ordinal"],
        )
        for ordinal, batch, step_in_batch, in_flight, best_fate, *num_tokens in state["open"]:
            step = StepKey(batch, step_in_batch)
            ledger._open[ordinal] = _Slot(step, in_flight, best_fate, *num_tokens)
        for batch, step_in_batch, sizes, *counts in state["steps"]:
            fates = Fates(*map(Counts, counts))
            ledger._steps[StepKey(batch, step_in_batch)] = _Step(dict(sizes), fates)
        ledger.check()
        return ledger

    def _count(
        self, ordinal: int, fate: Fate, num_samples: int, num_tokens: int, reason: str
    ) -> tuple[Fates, Fates]:
        """Take samples and tokens of a slot out of flight; return the run's and step's fates."""
        slot = self._slot(ordinal)
        _require(
            0 <= num_samples <= slot.in_flight and 0 <= num_tokens <= slot.num_tokens,
            f"slot {ordinal} has {slot.in_flight} samples and {slot.num_tokens} tokens in flight, "
            f"got {num_samples} and {num_tokens} as {fate}",
        )
        _require(
            (fate in FATES_WITH_REASON) == bool(reason),
            f"a reason belongs to {FATES_WITH_REASON} and only to them, got {fate!r}: {reason!r}",
        )
        slot.in_flight -= num_samples
        slot.num_tokens -= num_tokens
        if num_samples:
            index = FATES.index(fate)
            slot.best_fate = index if slot.best_fate is None else min(index, slot.best_fate)
        totals = self.fates, self._steps[slot.step].fates
        for fates in totals:
            fates.count(fate, num_samples, num_tokens, reason)
        return totals

    def _slot(self, ordinal: int) -> _Slot:
        slot = self._open.get(ordinal)
        if slot is None:
            raise LedgerError(f"slot {ordinal} is not open: never admitted, or already settled")
        return slot


def _plain(fates: Fates) -> dict[str, dict[str, int]]:
    """Copies of the counts, as plain dicts, by name."""
    return {each.name: dict(getattr(fates, each.name)) for each in fields(Fates)}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LedgerError(message)


@dataclass(frozen=True, slots=True)
class SlotAccount:
    """The account of one slot in a ledger, which its work writes to until the group is finished."""

    ledger: Ledger
    ordinal: int
    terms: EvaluationTerms | None = None  # of a held-out question; None: the slot is trained
    resampled: Counts = field(default_factory=Counter)  # whole groups, by reason
    # Losses of workers after which others went on with the group, by reason.
    continued: Counts = field(default_factory=Counter)

    @property
    def slot(self) -> Hashable:
        """Identifies it: the slots of a run and its held-out questions share ordinals."""
        return ("held out", self.terms.name, self.ordinal) if self.terms else self.ordinal

    def received(self, turns: Sequence[Turn]) -> None:
        """An engine has answered with these turns."""
        self.ledger.receive(self.ordinal, num_tokens=sum(len(turn.token_ids) for turn in turns))

    def sampled_again(self, reason: str) -> None:
        """All samples in flight are lost, and sampled again."""
        self.resampled[reason] += 1
        self.ledger.reissue(self.ordinal, fate="discarded", reason=reason)

    def went_on(self, reason: str) -> None:
        """A worker was lost, another goes on with what it had sampled."""
        self.continued[reason] += 1

    @property
    def has_sampled(self) -> bool:
        """Whether an engine has answered since the group was begun."""
        return self.ledger.tokens_in_flight(self.ordinal) > 0

    def played_again(self, again: Mapping[str, tuple[int, int]]) -> None:
        """Discard the episodes that an environment worker has played again, by reason."""
        for reason, (num_episodes, num_tokens) in again.items():
            self._discard(num_episodes, num_tokens, reason)

    def played(self, group: PlayedGroup) -> None:
        """Discard the received tokens that are in no episode of the group.

        Raises `WorkerError` if the episodes have more tokens than engines have answered.
        """
        num_tokens = sum(episode.num_sampled_tokens for episode in group.episodes)
        num_again = sum(tokens for _, tokens in group.again.values())
        num_received = self.ledger.tokens_in_flight(self.ordinal)
        unused = num_received - num_tokens - num_again
        if unused < 0:
            raise WorkerError(
                f"episodes of {num_tokens} tokens came back, and {num_again} of others that were "
                f"played again, but engines have sampled {num_received} for them"
            )
        self.played_again(group.again)
        self._discard(0, unused, UNUSED)

    def _discard(self, num_samples: int, num_tokens: int, reason: str) -> None:
        self.ledger.reissue(
            self.ordinal,
            fate="discarded",
            num_samples=num_samples,
            num_tokens=num_tokens,
            reason=reason,
        )
