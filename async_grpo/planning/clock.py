"""An event loop whose clock jumps to the next event, and simulated processes and engines on it.

An engine decodes its running sequences in lock step, one token each a step. A step takes `step_s +
per_sequence_s * running + per_kv_token_s * tokens in the cache`. Progress is counted in steps: a
sequence of L tokens that starts at step v ends at step v + L, whatever the speed was. The engine
computes how long a step takes when a sequence starts or ends, not at every token.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import selectors
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeVar

from async_grpo.planning.rates import EngineRates

EPSILON = 1e-9
T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Moves the time to the next timer instead of waiting for it."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits and nothing is scheduled")
        self.now_s += max(timeout, 0.0)
        return []  # there is no input or output


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run(scenario: Coroutine[object, object, T]) -> T:
    """Run the coroutine on a virtual clock, on which sleeping costs no time; return its result.

    >>> async def scenario():
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(scenario())
    3600.0
    """
    gc.disable()  # like the controller of a run: collecting takes a seventh of the time
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            return runner.run(scenario)
    finally:
        gc.enable()


class Process:
    """A process that serves one call after the other, like an actor's event loop."""

    def __init__(self) -> None:
        self.free_at_s = 0.0
        self.worked_s = 0.0

    async def work(self, seconds: float) -> None:
        """Wait for the calls before this one, then for `seconds` of work."""
        now_s = asyncio.get_running_loop().time()
        self.free_at_s = max(self.free_at_s, now_s) + seconds
        self.worked_s += seconds
        if self.free_at_s > now_s:
            await asyncio.sleep(self.free_at_s - now_s)


@dataclass(slots=True)
class _Group:
    """A question's sequences, whose caller waits for all of them."""

    left: int  # sequences that have not ended
    ended: asyncio.Future[None]


class Engine:
    """Continuous batching: a sequence that ends makes room for the next waiting one."""

    def __init__(self, rates: EngineRates) -> None:
        self._rates = rates
        self._loop = asyncio.get_running_loop()
        self._steps = 0.0
        self._kv_tokens = 0.0
        self._known_s = 0.0  # the time at which `_steps` and `_kv_tokens` were computed
        self._stalled_until_s = 0.0
        self._step_s = rates.step_s
        self._next_end: asyncio.TimerHandle | None = None
        # (step of the end, tie-breaker, tokens of prompt and output, group)
        self._running: list[tuple[float, int, int, _Group]] = []
        self._waiting: deque[tuple[int, int, _Group]] = deque()  # (prompt, output, group)
        self._ties = 0
        self.sequence_s = 0.0  # seconds of running, summed over sequences
        self.busy_s = 0.0
        self.recomputed_tokens = 0.0
        self.stalled_s = 0.0

    async def generate(self, prompt_tokens: int, lengths: Sequence[int]) -> None:
        """Run the sequences of a question, which share one prefill, until the last one ends."""
        self.catch_up()
        group = _Group(len(lengths), self._loop.create_future())
        self._waiting.extend((prompt_tokens, length, group) for length in lengths)
        self._stall(prompt_tokens * self._rates.per_prefill_token_s)
        self._fill()
        self._replan()
        await group.ended

    def update(self, seconds: float) -> None:
        """Load new weights in `seconds`, then rebuild the caches of running sequences."""
        self.catch_up()
        again = 0.0 if self._rates.keeps_caches else self._kv_tokens
        self.recomputed_tokens += again
        self._stall(seconds + again * self._rates.per_prefill_token_s)
        self._replan()

    def _stall(self, seconds: float) -> None:
        self._stalled_until_s = max(self._stalled_until_s, self._loop.time()) + seconds
        self.stalled_s += seconds

    def catch_up(self) -> None:
        """Compute tokens and seconds up to now."""
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
        self._steps = max(self._steps, self._running[0][0])  # rounding may leave it below
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


class Local:
    """Gives an object of this process the interface of an actor's handle."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._actor, method))
