"""What engines answer for one slot, and what becomes of it before its group is finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_grpo.batching.ledger import Ledger
from async_grpo.types import PlayedGroup, Turn
from async_grpo.util.errors import WorkerError

UNUSED = "unused"  # why tokens are discarded that were cut, or asked for and not waited for


@dataclass(frozen=True, slots=True)
class SlotBooks:
    """The ledger, as the work on one of its slots sees it."""

    ledger: Ledger
    ordinal: int
    resampled: Counter[str] = field(default_factory=Counter)  # times, by reason: the whole group

    def received(self, turns: Sequence[Turn]) -> None:
        """An engine has answered."""
        self.ledger.receive(self.ordinal, num_tokens=sum(len(turn.token_ids) for turn in turns))

    def sampled_again(self, reason: str) -> None:
        """All that is in flight is lost."""
        self.resampled[reason] += 1
        self.ledger.reissue(self.ordinal, fate="discarded", reason=reason)

    @property
    def has_sampled(self) -> bool:
        """Whether an engine has answered since the group was begun."""
        return self.ledger.tokens_in_flight(self.ordinal) > 0

    def played_again(self, again: Mapping[str, tuple[int, int]]) -> None:
        """Episodes that an environment worker has played again, see `PlayedGroup`."""
        for reason, (num_episodes, num_tokens) in again.items():
            self._discard(num_episodes, num_tokens, reason)

    def played(self, group: PlayedGroup) -> None:
        """Discard what is not in the episodes that have ended.

        Raises `WorkerError` for more tokens than engines have answered.
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
