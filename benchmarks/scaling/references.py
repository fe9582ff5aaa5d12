"""The reference model's workers: real balancer and coalescer, simulated forwards.

Their registry is another actor with less to do than the generation's; it is not simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.reference.coalescer import Coalescer
from async_grpo.routing.balancer import Balancer
from async_grpo.types import WeightsVersion
from benchmarks.scaling.clock import Action, Clock, Runner

FIRST = WeightsVersion(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRates:
    """Workers that keep the first weights for ever."""

    workers: int
    tokens_per_second: float  # of one worker
    max_tokens: int = 32_768  # of a packed forward
    forward_overhead_s: float = 0.05


class References:
    """Groups are scored as wholes: a lease each, their samples packed with others'."""

    def __init__(self, clock: Clock, rates: ReferenceRates) -> None:
        self._rates = rates
        self._balancer = Balancer()
        self._line: deque[tuple[Sequence[int], Action]] = deque()
        self._forwards = [Runner(clock) for _ in range(rates.workers)]
        self._waiting = [Coalescer(rates.max_tokens) for _ in range(rates.workers)]
        self._group_of: dict[int, list[int]] = {}  # request -> [samples left], shared by its group
        self._tokens_of: dict[int, int] = {}
        self._done_of: dict[int, Action] = {}
        self._num_requests = 0
        for number in range(rates.workers):
            self._balancer.add_worker(
                str(number), capacity=rates.max_tokens, overhead=0, version=FIRST
            )

    @property
    def worked_s(self) -> float:
        return sum(runner.worked_s for runner in self._forwards)

    def score(self, num_tokens: Sequence[int], done: Action) -> None:
        """The samples of one group, by their tokens."""
        self._line.append((num_tokens, done))
        self._serve()

    def _serve(self) -> None:
        while self._line:
            num_tokens, done = self._line[0]
            grant = self._balancer.try_acquire(sum(num_tokens), FIRST)
            if grant is None:
                return
            self._line.popleft()
            lease_id, number = grant.lease_id, int(grant.worker_id)
            left = [len(num_tokens)]

            def scored(lease_id: int = lease_id, done: Action = done) -> None:
                self._balancer.release(lease_id)
                done()
                self._serve()

            for tokens in num_tokens:
                request, self._num_requests = self._num_requests, self._num_requests + 1
                self._waiting[number].add(request, num_tokens=tokens, version=FIRST)
                self._group_of[request], self._tokens_of[request] = left, tokens
                self._done_of[request] = scored
            self._forward(number)

    def _forward(self, number: int) -> None:
        batch = self._waiting[number].next_batch(idle=not self._forwards[number].is_busy)
        if not batch:
            return
        tokens = sum(self._tokens_of.pop(request) for request in batch)
        seconds = self._rates.forward_overhead_s + tokens / self._rates.tokens_per_second

        def ended() -> None:
            finished = []
            for request in batch:
                left, done = self._group_of.pop(request), self._done_of.pop(request)
                left[0] -= 1
                if not left[0]:
                    finished.append(done)
            self._forward(number)
            for done in finished:
                done()

        self._forwards[number].start(seconds, ended)
