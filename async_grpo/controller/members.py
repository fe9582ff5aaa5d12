"""Workers that are admitted: who they are, which leases have died, who came and went. Pure.

A deadline on an answer would drop the long outputs and keep the short ones. So a lease lives as
long as tokens come for it, however many; and while its request stands in the worker's line, as long
as tokens come for others, behind whom it waits. Its worker's pulses tell of the tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.types import Pulse, RequestPulse, WorkerInfo

if TYPE_CHECKING:
    from async_grpo.cluster.handles import WorkerHandle
    from async_grpo.controller.heartbeat import Loss
    from async_grpo.controller.leases import Lease

NUM_EXCLUSIONS_KEPT = 256
UNKNOWN = RequestPulse(0, is_waiting=False)  # on its way to the worker, or lost on the way


@dataclass(slots=True)
class _Silence:
    """Of one lease."""

    limit_s: float
    num_tokens: int = 0  # at the latest pulse
    seconds: float = 0.0
    num_others: int = 0  # tokens that the worker has made meanwhile


class TokenWatch:
    """Counts, from the pulses of one worker, which of its leases have died.

    Silence is counted in pulses, not by the clock: a controller that is frozen accuses no worker. A
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


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A worker that is admitted."""

    info: WorkerInfo
    handle: WorkerHandle
    heartbeat: asyncio.Task[Loss]
    leases: dict[int, Lease] = field(default_factory=dict)  # those that are valid, by id
    watch: TokenWatch = field(default_factory=TokenWatch)


class History:
    """What a registry remembers of its workers' comings and goings.

    It counts events for ever, and knows the newest exclusions.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by `kind` or `kind: cause`
        self.exclusions: dict[str, str] = {}  # the latest workers that were fenced, with the reason

    def note(
        self, kind: str, worker_id: str = "", cause: str = "", reason: str = "", *, num: int = 1
    ) -> None:
        """Something has happened to a worker, or to `num` of its leases.

        `cause` is a word or two, such as "died", `reason` a sentence.

        >>> history = History()
        >>> history.note("registered", "w0")
        >>> history.note("fenced", "w0", "died", "its process has ended")
        >>> history.note("revoked", "w0", "died", num=3)
        >>> dict(history.counts)
        {'registered': 1, 'fenced: died': 1, 'revoked: died': 3}
        """
        if not num:
            return
        self.counts[f"{kind}: {cause}" if cause else kind] += num
        if kind == "fenced":
            self.exclusions[worker_id] = reason
            if len(self.exclusions) > NUM_EXCLUSIONS_KEPT:
                del self.exclusions[next(iter(self.exclusions))]
