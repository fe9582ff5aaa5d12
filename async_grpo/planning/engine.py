"""An engine that decodes its running sequences in lock step, one token each a step.

A step takes `step_s + per_sequence_s * running + per_kv_token_s * tokens in the cache`. Progress is
counted in steps: a sequence of L tokens that starts at step v ends at step v + L, whatever the
speed was. How long a step takes is worked out when a sequence starts or ends, not at every token.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """How fast one engine, on however many devices, decodes and reads."""

    step_s: float  # of a step whatever it does: weights read once, launches, all-reduces
    per_sequence_s: float = 0.0  # matrix products of one token
    per_kv_token_s: float = 0.0  # its keys and values, read once a step
    per_prefill_token_s: float = 0.0  # of a prompt, or of a cache that is made anew
    capacity: int = 256  # sequences at a time
    keeps_caches: bool = False  # over new weights: --keep-kv-cache

    def seconds_a_step(self, running: int, kv_tokens: float) -> float:
        """
        >>> EngineRates(step_s=0.01, per_sequence_s=0.001).seconds_a_step(10, 0)
        0.02
        """
        return self.step_s + self.per_sequence_s * running + self.per_kv_token_s * kv_tokens


@dataclass(slots=True)
class _Group:
    """A question's sequences, which are answered together."""

    left: int
    ended: asyncio.Future[None]


class Engine:
    """Continuous batching: a sequence that ends makes room for the next one in line."""

    def __init__(self, rates: EngineRates) -> None:
        self._rates = rates
        self._loop = asyncio.get_running_loop()
        self._steps = 0.0
        self._kv_tokens = 0.0
        self._known_s = 0.0  # up to when the above is worked out
        self._stalled_until_s = 0.0
        self._step_s = rates.step_s
        self._next_end: asyncio.TimerHandle | None = None
        # (step of the end, tie, tokens of the whole, its group)
        self._running: list[tuple[float, int, int, _Group]] = []
        self._waiting: deque[tuple[int, int, _Group]] = deque()  # prompt, output
        self._ties = 0
        self.sequence_s = 0.0  # seconds in a slot, over all sequences
        self.busy_s = 0.0
        self.recomputed_tokens = 0.0
        self.stalled_s = 0.0

    async def generate(self, prompt_tokens: int, lengths: Sequence[int]) -> None:
        """Sequences of one question, which read their prompt once, until the last one ends."""
        self.catch_up()
        group = _Group(len(lengths), self._loop.create_future())
        self._waiting.extend((prompt_tokens, length, group) for length in lengths)
        self._stall(prompt_tokens * self._rates.per_prefill_token_s)
        self._fill()
        self._replan()
        await group.ended

    def update(self, seconds: float) -> None:
        """New weights: nothing runs while they are loaded and running sequences are read again."""
        self.catch_up()
        again = 0.0 if self._rates.keeps_caches else self._kv_tokens
        self.recomputed_tokens += again
        self._stall(seconds + again * self._rates.per_prefill_token_s)
        self._replan()

    def _stall(self, seconds: float) -> None:
        self._stalled_until_s = max(self._stalled_until_s, self._loop.time()) + seconds
        self.stalled_s += seconds

    def catch_up(self) -> None:
        """Bring tokens and seconds up to this moment."""
        now_s, running = self._loop.time(), len(self._running)
        if running:
            self.sequence_s += running * (now_s - self._known_s)
            self.busy_s += now_s - self._known_s
            decoding_s = now_s - max(self._known_s, self._stalled_until_s)
            if decoding_s > 0:
                self._steps += decoding_s / self._step_s
                self._kv_tokens += running * decoding_s / self._step_s
        self._known_s = now_s

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._rates.capacity:
            prompt_tokens, length, group = self._waiting.popleft()
            self._ties += 1
            end = self._steps + length
            heapq.heappush(self._running, (end, self._ties, prompt_tokens + length, group))
            self._kv_tokens += prompt_tokens

    def _replan(self) -> None:
        if self._next_end is not None:
            self._next_end.cancel()
        if not self._running:
            return
        self._step_s = self._rates.seconds_a_step(len(self._running), self._kv_tokens)
        steps = max(self._running[0][0] - self._steps, 0.0)
        start_s = max(self._loop.time(), self._stalled_until_s)
        self._next_end = self._loop.call_at(start_s + steps * self._step_s, self._end_sequences)

    def _end_sequences(self) -> None:
        self.catch_up()
        self._steps = max(self._steps, self._running[0][0])  # against rounding
        while self._running and self._running[0][0] <= self._steps + EPSILON:
            _, _, num_tokens, group = heapq.heappop(self._running)
            self._kv_tokens -= num_tokens
            group.left -= 1
            if not group.left:
                group.ended.set_result(None)
        self._fill()
        if not self._running:
            self._kv_tokens = 0.0
        self._replan()
