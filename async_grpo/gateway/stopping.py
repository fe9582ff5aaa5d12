"""Stop strings: engines know token ids only, so that texts are looked for here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_grpo.types import Turn

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class StopText:
    """The strings that end a turn; a token that holds more than the end of one is kept whole."""

    stops: tuple[str, ...]
    decode: Decode

    def cut(self, turn: Turn) -> Turn:
        """The turn up to the first token whose text completes a stop string; itself without one."""
        token_ids = turn.token_ids.tolist()
        if not self._is_in(token_ids):
            return turn
        counts = range(len(token_ids))
        num = bisect_left(counts, True, key=lambda count: self._is_in(token_ids[:count]))
        return turn.stopped(num, text=self.until(self.decode(token_ids[:num])))

    def until(self, text: str) -> str:
        """The text before the first stop string, which clients do not see."""
        ends = [place for stop in self.stops if stop and (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        text = self.decode(token_ids) if self.stops else ""
        return any(stop in text for stop in self.stops if stop)
