"""Questions that kill workers, told from those that only stood beside them. Pure.

A worker that dies takes all its requests along, and says not which of them did it. A slot that was
there at two deaths is on probation: slots on probation are sampled one at a time, so that the next
death tells. A further one there, and its question is quarantined for the rest of the run.

    deaths   0, 1: ordinary   2: on probation   3: quarantined

With one such question, exactly that one is quarantined: it was there at every death that its
neighbours saw, so that none of them is on probation before it, and none beside it. Deaths of
another cause count too: a slot must meet three of them to be quarantined for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

PROBATION_DEATHS = 2
QUARANTINE_DEATHS = 3


class Quarantine:
    """Deaths by slot, kept while the slot is open; and the questions excluded by their index."""

    def __init__(self, questions: Iterable[int] = ()) -> None:
        self._deaths: dict[Hashable, int] = {}
        self._questions = set(questions)

    def __contains__(self, question: int) -> bool:
        return question in self._questions

    @property
    def questions(self) -> tuple[int, ...]:
        """Indices of the questions that are not asked any more, in order."""
        return tuple(sorted(self._questions))

    def died(self, slot: Hashable, *, weight: int = 1) -> bool:
        """A worker died while it had `slot`'s request; whether that was once too often.

        `weight`: 2 for episodes, which are played again once: alone, so that a neighbour's death
        is not theirs.

        >>> quarantine = Quarantine()
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, False)
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, True)
        >>> quarantine.died("a")
        True
        """
        self._deaths[slot] = self._deaths.get(slot, 0) + weight
        return self._deaths[slot] >= QUARANTINE_DEATHS

    def is_on_probation(self, slot: Hashable) -> bool:
        """Whether the slot must be sampled while no other suspect is."""
        return self._deaths.get(slot, 0) >= PROBATION_DEATHS

    def forget(self, slot: Hashable) -> None:
        """The slot is finished, or failed."""
        self._deaths.pop(slot, None)

    def exclude(self, question: int) -> None:
        """This question is asked no more."""
        self._questions.add(question)
