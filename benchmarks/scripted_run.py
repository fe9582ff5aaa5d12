"""A run of scripted durations on a virtual clock, decided by the real admission, rounds and outbox.

What takes time is scripted: a running sequence makes a token every `seconds_per_token`, a rank
trains `tokens_per_second` after an overhead a round, and ranks wait for the slowest of a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.admission import AdmissionWindow, StepKey
from async_grpo.batching.outbox import Outbox
from async_grpo.batching.packing import Item, estimate_cost
from async_grpo.batching.rounds import Round, RoundFormer, StepMarker
from async_grpo.types import EndOfStep, Minibatch, StreamItem
from benchmarks import virtual_clock

POLL_INTERVAL_S = 0.05
Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Who does what how fast."""

    lengths: Lengths  # output tokens of some samples
    seconds_per_token: float  # of one running sequence
    num_batches: int = 4
    batch_size: int = 128
    samples_per_question: int = 8
    max_staleness: int = 0
    capacity_seqs: int = 512  # sequences that run at a time, on all generation workers
    prompt_tokens: int = 200
    verification_s: float = 0.2
    num_ranks: int = 8
    max_tokens: int = 18_432  # of a rank's minibatch
    tokens_per_second: float = 8_000.0  # of one rank, short sequences
    round_overhead_s: float = 0.3
    publish_s: float = 1.0  # in the background
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one gradient step; times in seconds of the run."""

    first_ready_s: float  # its first group was graded
    first_backward_s: float
    start_s: float  # the end of the step before
    end_s: float
    busy_s: float  # in rounds
    generating: tuple[float, float]  # its first sequence began, its last one ended
    num_rounds: int
    fill: float  # tokens by the budget of all ranks and rounds

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def generating_s(self) -> float:
        began, ended = self.generating
        return ended - began


def simulate(script: Script, policy: Callable[[Script], RoundFormer]) -> list[Step]:
    """Every gradient step of the run; `policy` makes what decides when a round goes out."""
    return virtual_clock.run(_Run(script, policy(script)).train())


class _Run:
    def __init__(self, script: Script, rounds: RoundFormer) -> None:
        self._script = script
        self._rounds = rounds
        self._window = AdmissionWindow(
            script.batch_size,
            questions_per_step=script.batch_size,
            max_staleness=script.max_staleness,
            num_batches=script.num_batches,
        )
        self._outbox = Outbox(script.num_ranks)
        self._room = asyncio.Semaphore(script.capacity_seqs)
        self._unsettled: dict[StepKey, int] = {}
        self._items: dict[tuple[int, int], Item] = {}
        self._first_ready: dict[int, float] = {}
        self._generating: dict[int, list[float]] = {}  # batch -> first start, last end
        self._round_of: dict[int, Round | StepMarker] = {}  # by index in the stream
        self._tasks: set[asyncio.Task[None]] = set()

    async def train(self) -> list[Step]:
        """The trainer: every round in turn, each rank as long as the slowest."""
        self._spawn(self._send_rounds())
        self._admit()
        steps: list[Step] = []
        start, index = 0.0, 0
        asked = self._ask(index)
        backward: list[tuple[float, float, int]] = []  # start, seconds, tokens of each round
        while True:
            await asyncio.sleep(0)
            if not asked.done():
                for rank in range(self._script.num_ranks):
                    self._outbox.mark_hungry(rank, index)
            await asked
            formed, index = self._round_of.pop(index), index + 1
            if isinstance(formed, StepMarker):
                steps.append(self._step(formed.step.batch, start, backward))
                start, backward = _now(), []
                if len(steps) == self._script.num_batches:
                    return steps
                self._spawn(self._publish(len(steps)))
            asked = self._ask(index)
            if isinstance(formed, Round):
                began = _now()
                num_tokens = await self._compute(formed)
                backward.append((began, _now() - began, num_tokens))

    def _ask(self, index: int) -> asyncio.Future[list[StreamItem]]:
        return asyncio.gather(
            *(self._outbox.take(rank, index) for rank in range(self._script.num_ranks))
        )

    async def _compute(self, formed: Round) -> int:
        bins = [[self._items.pop(key) for key in keys] for keys in formed.bins]
        slowest = max(sum(item.cost for item in items) for items in bins)
        script = self._script
        await asyncio.sleep(script.round_overhead_s + slowest / script.tokens_per_second)
        return sum(item.num_tokens for items in bins for item in items)

    def _step(self, batch: int, start: float, backward: list[tuple[float, float, int]]) -> Step:
        budget = len(backward) * self._script.num_ranks * self._script.max_tokens
        began, ended = self._generating[batch]
        return Step(
            first_ready_s=self._first_ready[batch],
            first_backward_s=backward[0][0],
            start_s=start,
            end_s=_now(),
            busy_s=sum(seconds for _, seconds, _ in backward),
            generating=(began, ended),
            num_rounds=len(backward),
            fill=sum(tokens for _, _, tokens in backward) / budget,
        )

    async def _publish(self, batches: int) -> None:
        await asyncio.sleep(self._script.publish_s)
        self._window.batch_published(batches)
        self._admit()

    def _admit(self) -> None:
        for ordinal in self._window.admissible():
            self._window.start(ordinal)
            step = self._window.step_of(ordinal)
            self._unsettled.setdefault(step, self._script.batch_size)
            self._spawn(self._run_slot(ordinal, step))

    async def _run_slot(self, ordinal: int, step: StepKey) -> None:
        """Sequences start in order of ordinals; a group is ready when its last one is graded."""
        script = self._script
        rng = np.random.default_rng([script.seed, ordinal])
        lengths = script.lengths(rng, script.samples_per_question)
        await asyncio.gather(*(self._generate(step.batch, int(length)) for length in lengths))
        await asyncio.sleep(script.verification_s)
        self._first_ready.setdefault(step.batch, _now())
        for index, length in enumerate(lengths):
            num_tokens = script.prompt_tokens + int(length)
            item = Item((ordinal, index), num_tokens, estimate_cost(num_tokens))
            self._items[item.key] = item
            self._rounds.offer(step, item=item)
        self._unsettled[step] -= 1
        if not self._unsettled[step]:
            self._rounds.step_complete(step)

    async def _generate(self, batch: int, num_tokens: int) -> None:
        async with self._room:
            span = self._generating.setdefault(batch, [_now(), 0.0])
            await asyncio.sleep(num_tokens * self._script.seconds_per_token)
            span[1] = _now()

    async def _send_rounds(self) -> None:
        """As the batcher's."""
        index, num_ranks = 0, self._script.num_ranks
        while True:
            await self._outbox.wait_for_demand(timeout_s=POLL_INTERVAL_S)
            if not self._outbox.is_wanted:
                continue
            formed = self._rounds.next_round(_now(), hungry=self._outbox.is_hungry)
            if formed is None:
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            self._round_of[index] = formed
            index += 1
            self._outbox.put((_stand_in(formed),) * num_ranks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _stand_in(formed: Round | StepMarker) -> StreamItem:
    if isinstance(formed, Round):
        return Minibatch(formed.index, ())
    return EndOfStep(formed.step.batch, formed.step.step_in_batch, True, 0, 0)


def _now() -> float:
    return asyncio.get_running_loop().time()
