"""Which leases of a worker have died, by the tokens that its pulses tell of. Pure.

A deadline on an answer would drop the long outputs and keep the short ones. So a lease lives as
long as tokens come for it, however many; and while its request stands in the worker's line, as long
as tokens come for others, behind whom it waits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from async_grpo.types import Pulse, RequestPulse

UNKNOWN = RequestPulse(0, is_waiting=False)  # on its way to the worker, or lost on the way


@dataclass(slots=True)
class _Silence:
    """Of one lease."""

    limit_s: float
    num_tokens: int = 0  # at the latest pulse
    seconds: float = 0.0
    num_others: int = 0  # tokens that the worker has made meanwhile


class TokenWatch:
    """Hears the pulses of one worker.

    Silence is counted in pulses, not by the clock: whoever is frozen itself accuses nobody. A
    worker that sends none is not judged here.
    """

    def __init__(self) -> None:
        self._num_tokens = 0  # of the worker, at the latest pulse
        self._silences: dict[int, _Silence] = {}

    def granted(self, lease_id: int, *, limit_s: float) -> None:
        """The lease is given up when it has been silent for `limit_s`."""
        self._silences[lease_id] = _Silence(limit_s)

    def heard(self, pulse: Pulse, *, seconds: float) -> int:
        """Take in a pulse that came `seconds` after the one before; the tokens made meanwhile.

        >>> watch = TokenWatch()
        >>> watch.granted(7, limit_s=10)
        >>> watch.granted(8, limit_s=10)
        >>> for num_tokens in (100, 200):
        ...     running = {7: RequestPulse(num_tokens, False), 8: RequestPulse(5, False)}
        ...     _ = watch.heard(Pulse("0.1", 2 * num_tokens, running), seconds=10)
        >>> watch.dead()
        {8: 'no token has come for 10 s, while its worker made 200 for others'}
        """
        if pulse.requests is None:
            return 0
        num_made, self._num_tokens = pulse.num_tokens - self._num_tokens, pulse.num_tokens
        for lease_id, silence in self._silences.items():
            request = pulse.requests.get(lease_id, UNKNOWN)
            # A sequence that ends takes its tokens along: fewer are a sign of life too.
            came = request.num_tokens != silence.num_tokens
            silence.num_tokens = request.num_tokens
            if came or (request.is_waiting and num_made):
                silence.seconds, silence.num_others = 0.0, 0
            else:
                silence.seconds += seconds
                silence.num_others += num_made
        return num_made

    def keep(self, leases: Collection[int]) -> None:
        """All others have ended."""
        self._silences = {name: self._silences[name] for name in self._silences if name in leases}

    def dead(self) -> dict[int, str]:
        """The leases that have been silent for too long, and how."""
        return {
            lease_id: _describe(silence)
            for lease_id, silence in self._silences.items()
            if silence.seconds >= silence.limit_s
        }


def _describe(silence: _Silence) -> str:
    if silence.num_others:
        return (
            f"no token has come for {silence.seconds:g} s, while its worker made "
            f"{silence.num_others} for others"
        )
    return f"its worker has made no token for {silence.seconds:g} s"
