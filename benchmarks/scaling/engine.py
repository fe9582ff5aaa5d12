"""An engine that decodes its running sequences in lock step, one token each a step.

A step takes `step_s + per_sequence_s * running + per_kv_token_s * tokens in the cache`. Progress is
counted in steps: a sequence of L tokens that starts at step v ends at step v + L, whatever the
speed was. How long a step takes is worked out when a sequence starts or ends, not at every token.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.scaling.clock import Action, Clock

EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """How fast one engine, on however many devices, decodes and reads."""

    step_s: float  # of a step whatever it does: weights read once, launches, all-reduces
    per_sequence_s: float = 0.0  # matrix products of one token
    per_kv_token_s: float = 0.0  # its keys and values, read once a step
    per_prefill_token_s: float = 0.0  # of a prompt, or of a cache that is made anew
    capacity: int = 256  # sequences at a time
    shares_prompts: bool = True  # a question's samples read it once: prefix caching

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
    done: Action


class Engine:
    """Continuous batching: a sequence that ends makes room for the next one in line."""

    def __init__(
        self,
        clock: Clock,
        rates: EngineRates,
        *,
        on_busy: Callable[[bool], None] = lambda busy: None,
    ) -> None:
        self._clock = clock
        self._rates = rates
        self._on_busy = on_busy
        self._speed = 1.0
        self._steps = 0.0
        self._kv_tokens = 0.0
        self._known_s = 0.0  # up to when the above is worked out
        self._stalled_until_s = 0.0
        self._step_s = rates.step_s
        self._plan = 0
        # (step of the end, tie, tokens of the whole, its group)
        self._running: list[tuple[float, int, int, _Group]] = []
        self._waiting: deque[tuple[int, int, _Group]] = deque()  # prompt, output
        self._ties = 0
        self.sequence_s = 0.0  # seconds in a slot, over all sequences
        self.busy_s = 0.0
        self.recomputed_tokens = 0.0
        self.stalled_s = 0.0

    def generate(self, prompt_tokens: int, lengths: Sequence[int], done: Action) -> None:
        """Sequences of one question."""
        self._catch_up()
        group = _Group(len(lengths), done)
        self._waiting.extend((prompt_tokens, length, group) for length in lengths)
        num_prompts = 1 if self._rates.shares_prompts else len(lengths)
        self._stall(num_prompts * prompt_tokens * self._rates.per_prefill_token_s)
        self._fill()
        self._replan()

    def update(self, seconds: float) -> None:
        """New weights: nothing runs while they are loaded and running sequences are read again."""
        self._catch_up()
        self.recomputed_tokens += self._kv_tokens
        self._stall(seconds + self._kv_tokens * self._rates.per_prefill_token_s)
        self._replan()

    def set_speed(self, speed: float) -> None:
        """Share of a core, where cores are shared."""
        if speed == self._speed:
            return
        self._catch_up()
        self._stalled_until_s = (
            self._known_s + max(self._stalled_until_s - self._known_s, 0) * self._speed / speed
        )
        self._speed = speed
        self._replan()

    def settle_books(self) -> None:
        """Bring `sequence_s` and `busy_s` up to this moment."""
        self._catch_up()

    def _stall(self, seconds: float) -> None:
        self._stalled_until_s = (
            max(self._stalled_until_s, self._clock.now_s) + seconds / self._speed
        )
        self.stalled_s += seconds

    def _catch_up(self) -> None:
        now_s, running = self._clock.now_s, len(self._running)
        if running:
            self.sequence_s += running * (now_s - self._known_s)
            self.busy_s += now_s - self._known_s
            decoding_s = now_s - max(self._known_s, self._stalled_until_s)
            if decoding_s > 0:
                steps = decoding_s * self._speed / self._step_s
                self._steps += steps
                self._kv_tokens += steps * running
        self._known_s = now_s

    def _fill(self) -> None:
        was_idle = not self._running
        while self._waiting and len(self._running) < self._rates.capacity:
            prompt_tokens, length, group = self._waiting.popleft()
            self._ties += 1
            end = self._steps + length
            heapq.heappush(self._running, (end, self._ties, prompt_tokens + length, group))
            self._kv_tokens += prompt_tokens
        if was_idle and self._running:
            self._on_busy(True)

    def _replan(self) -> None:
        self._plan += 1
        if not self._running:
            return
        plan = self._plan
        self._step_s = self._rates.seconds_a_step(len(self._running), self._kv_tokens)
        steps = max(self._running[0][0] - self._steps, 0.0)
        start_s = max(self._clock.now_s, self._stalled_until_s)
        self._clock.at(start_s + steps * self._step_s / self._speed, lambda: self._ended(plan))

    def _ended(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._catch_up()
        self._steps = max(self._steps, self._running[0][0])  # against rounding
        finished = []
        while self._running and self._running[0][0] <= self._steps + EPSILON:
            _, _, num_tokens, group = heapq.heappop(self._running)
            self._kv_tokens -= num_tokens
            group.left -= 1
            if not group.left:
                finished.append(group.done)
        self._fill()
        if not self._running:
            self._kv_tokens = 0.0
            self._on_busy(False)
        self._replan()
        for done in finished:
            done()
