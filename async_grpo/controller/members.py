"""The admitted workers of a role, the silence of their leases, and their history. Pure.

A deadline on an answer would drop long outputs and keep short ones. So a lease lives as long as
tokens come for it, however many; and while its request waits in the worker's queue, as long as
tokens come for the requests before it. Pulses of the worker carry the numbers of tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.types import Pulse, RequestPulse, WorkerInfo

if TYPE_CHECKING:
    from async_grpo.cluster.batched_calls import BatchedCalls
    from async_grpo.cluster.handles import WorkerHandle
    from async_grpo.controller.heartbeat import Loss
    from async_grpo.controller.leases import Lease

NUM_EXCLUSIONS_KEPT = 256
UNKNOWN = RequestPulse(0, is_waiting=False)  # not at the worker yet, or lost on the way


@dataclass(slots=True)
class _Silence:
    """How long no token has come for one lease."""

    limit_s: float
    num_tokens: int = 0  # at the latest pulse
    seconds: float = 0.0
    num_others: int = 0  # tokens that the worker has made meanwhile for others


class TokenWatch:
    """Finds dead leases of one worker by its pulses.

    Silence is counted in pulses, not by the clock, so that a frozen controller blames no worker.
    `heartbeat` finds a worker that sends no pulses.
    """

    def __init__(self) -> None:
        self._num_tokens = 0  # made by the worker, at the latest pulse
        self._silences: dict[int, _Silence] = {}  # by lease id

    def granted(self, lease_id: int, *, limit_s: float) -> None:
        """Watch a lease, which is dead after `limit_s` of silence."""
        self._silences[lease_id] = _Silence(limit_s)

    def heard(self, pulse: Pulse, *, seconds: float) -> int:
        """Count a pulse, `seconds` after the last one; return the tokens made meanwhile.

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
            # A sequence that ends is no longer counted: fewer tokens are a sign of life too.
            came = request.num_tokens != silence.num_tokens
            silence.num_tokens = request.num_tokens
            if came or (request.is_waiting and num_made):
                silence.seconds, silence.num_others = 0.0, 0
            else:
                silence.seconds += seconds
                silence.num_others += num_made
        return num_made

    def keep(self, leases: Collection[int]) -> None:
        """Forget all other leases: they have ended."""
        self._silences = {name: self._silences[name] for name in self._silences if name in leases}

    def dead(self) -> dict[int, str]:
        """The leases that have been silent for too long, by id, with a description."""
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
    """An admitted worker."""

    info: WorkerInfo
    handle: WorkerHandle
    heartbeat: asyncio.Task[Loss]
    calls: BatchedCalls  # of its leases
    leases: dict[int, Lease] = field(default_factory=dict)  # valid ones, by id
    watch: TokenWatch = field(default_factory=TokenWatch)


class History:
    """Counts of all events of a role's workers, and the latest exclusions."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by `kind` or `kind: cause`
        self.exclusions: dict[str, str] = {}  # reasons of the latest fenced workers, by id

    def note(
        self, kind: str, worker_id: str = "", cause: str = "", reason: str = "", *, num: int = 1
    ) -> None:
        """Count an event of a worker, or of `num` of its leases.

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
