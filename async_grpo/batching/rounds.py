"""When a round of minibatches goes out to the ranks, what it holds, and how they take it. Pure.

A round goes out as soon as one of these holds:

- the step's samples are complete: all rounds of what is left are planned at once, few and even;
- it is well filled: the ready tokens reach `fill_target` of all ranks' budgets (or more wait than
  fit, which leaves every round more than half full);
- trainers are idle while samples wait: the required fill falls linearly from `fill_target` to zero
  within `patience_s`. The budget is a ceiling, not a target for which trainers stand idle.

Steps go out one after the other, each closed by its key; samples of later steps wait. The cost of
one more sample does not depend on how many wait: before its step is complete, a round is formed
from the oldest two rounds' worth, and leaves small samples to fill the gaps of later rounds.
If advantages need the whole step, `StepGroups` holds its groups until all have come. The
`Outbox` keeps each answer until every rank has taken it: a rank asks for answer i+1 while it
computes answer i, and rank 0 reports when the ranks have nothing left to compute.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.batching.admission import FIRST_STEP, StepKey
from async_grpo.batching.packing import Bins, Item, TokenCount, pack_round, pack_rounds, require_fit
from async_grpo.types import Group, StreamItems

if TYPE_CHECKING:
    from async_grpo.algorithms.base import GroupRules

ROUNDING_S = 1e-3  # added to the time at which a round is due
CHOICE = 2  # a round of an incomplete step is chosen from so many rounds' worth of samples


@dataclass(frozen=True, slots=True)
class Round:
    """One minibatch for each rank; a rank with an empty bin trains an inert filler."""

    step: StepKey
    index: int  # within the step, from 0
    bins: Bins  # one a rank


@dataclass(slots=True)
class _Ready:
    """The samples of one step that wait for a round."""

    items: deque[Item] = field(default_factory=deque)
    planned: deque[Bins] = field(default_factory=deque)  # once complete
    _count: TokenCount = field(default_factory=TokenCount)  # of `items`

    @property
    def num_tokens(self) -> int:
        """Tokens of `items`, each that several share once."""
        return self._count.total

    def add(self, item: Item) -> None:
        self.items.append(item)
        self._count.add(item)

    def take(self, num_tokens: int) -> list[Item]:
        """Remove and return the oldest samples, until they have `num_tokens` tokens."""
        taken, wanted = [], self.num_tokens - num_tokens
        while self.items and self.num_tokens > wanted:
            taken.append(self.items.popleft())
            self._count.remove(taken[-1])
        return taken

    def put_back(self, items: Sequence[Item]) -> None:
        self.items.extendleft(reversed(items))
        for item in items:
            self._count.add(item)


@dataclass(eq=False, kw_only=True)
class RoundFormer:
    """Holds ready samples until their round goes out."""

    num_ranks: int = field(kw_only=False)
    max_tokens: int  # of one rank in one round
    steps_per_batch: int
    fill_target: float = 0.9  # share of all ranks' budgets
    patience_s: float = 2.0
    deterministic: bool = False  # only complete steps go out
    current_step: StepKey = FIRST_STEP  # whose rounds are going out
    num_ready: int = 0  # samples that wait for a round, of all steps
    _round_index: int = 0
    _hungry_since_s: float | None = None
    _ready: dict[StepKey, _Ready] = field(default_factory=dict)
    _complete: set[StepKey] = field(default_factory=set)

    def offer(self, step: StepKey, *, item: Item) -> None:
        """A sample of `step` is ready to train."""
        require_fit(item, self.max_tokens)
        self._ready.setdefault(step, _Ready()).add(item)
        self.num_ready += 1

    def step_complete(self, step: StepKey) -> None:
        """No further sample of `step` will be offered."""
        self._complete.add(step)

    def next_round(self, now_s: float, *, hungry: bool) -> Round | StepKey | None:
        """The round that goes out now, or the key of a step that has ended; call again until None.

        `hungry`: trainers are idle, with nothing left to train. `now_s` is of any monotonic clock.

        >>> former = RoundFormer(2, max_tokens=100, steps_per_batch=1, patience_s=10)
        >>> former.offer(StepKey(0, 0), item=Item((0, 0), 50, 50.0))
        >>> former.next_round(0.0, hungry=True)  # a quarter full, 0.9 required
        >>> former.next_round(8.0, hungry=True)  # required: 0.9 * (1 - 8 / 10) = 0.18
        Round(step=StepKey(batch=0, step_in_batch=0), index=0, bins=(((0, 0),), ()))
        >>> former.step_complete(StepKey(0, 0))
        >>> former.next_round(8.5, hungry=False)
        StepKey(batch=0, step_in_batch=0)
        """
        ready = self._ready.get(self.current_step, _Ready())
        if not (hungry and (ready.items or ready.planned)):
            self._hungry_since_s = None
        elif self._hungry_since_s is None:
            self._hungry_since_s = now_s
        if self.current_step in self._complete:
            return self._next_planned(ready) or self.end_step()
        if not ready.items or self.deterministic:
            return None
        required = self._required_fill(now_s) * self.num_ranks * self.max_tokens
        return self._form(ready) if ready.num_tokens >= required else None

    def due_in(self, now_s: float) -> float | None:
        """Seconds until `next_round` has a round without further samples; None: it never will.

        >>> former = RoundFormer(2, max_tokens=100, steps_per_batch=1, patience_s=10)
        >>> former.offer(StepKey(0, 0), item=Item((0, 0), 45, 45.0))
        >>> former.next_round(0.0, hungry=True)  # a quarter of the 180 tokens required
        >>> round(former.due_in(1.0), 2)
        6.5
        """
        ready = self._ready.get(self.current_step, _Ready())
        if self._hungry_since_s is None or self.deterministic or not ready.items:
            return None
        share = ready.num_tokens / (self.fill_target * self.num_ranks * self.max_tokens)
        due_s = self._hungry_since_s + self.patience_s * (1 - share)
        return max(0.0, due_s - now_s) + ROUNDING_S

    def end_step(self) -> StepKey | None:
        """The key of the current step if its last round is out; the next step becomes current."""
        ended, ready = self.current_step, self._ready.get(self.current_step, _Ready())
        if ended not in self._complete or ready.items or ready.planned:
            return None
        self._complete.discard(ended)
        self._ready.pop(ended, None)
        self._round_index = 0
        num_batches, step_in_batch = divmod(ended.step_in_batch + 1, self.steps_per_batch)
        self.current_step = StepKey(ended.batch + num_batches, step_in_batch)
        return ended

    def _required_fill(self, now_s: float) -> float:
        """The share of all budgets that the ready tokens must reach."""
        if self._hungry_since_s is None:
            return self.fill_target
        waited_s = now_s - self._hungry_since_s
        if waited_s >= self.patience_s:
            return 0.0
        return self.fill_target * (1 - waited_s / self.patience_s)

    def _form(self, ready: _Ready) -> Round:
        """One round of an incomplete step."""
        choice = ready.take(CHOICE * self.num_ranks * self.max_tokens)
        packed = pack_round(choice, num_ranks=self.num_ranks, max_tokens=self.max_tokens)
        ready.put_back(packed.leftover)
        return self._send(packed.bins)

    def _next_planned(self, ready: _Ready) -> Round | None:
        """The next round of a complete step."""
        if ready.items:
            items = ready.take(ready.num_tokens)
            rounds = pack_rounds(items, num_ranks=self.num_ranks, max_tokens=self.max_tokens)
            ready.planned.extend(rounds)
        return self._send(ready.planned.popleft()) if ready.planned else None

    def _send(self, bins: Bins) -> Round:
        formed = Round(self.current_step, self._round_index, bins)
        self.num_ready -= sum(map(len, bins))
        self._round_index += 1
        self._hungry_since_s = None
        return formed


@dataclass(slots=True)
class _Step:
    num_missing: int  # slots that have neither come nor failed
    groups: dict[int, Group] = field(default_factory=dict)  # by ordinal
    finished: asyncio.Future[dict[int, Group]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True, eq=False, kw_only=True)
class StepGroups:
    """Holds groups until all groups of their gradient step can get advantages.

    A slot joins its step with its group and waits for the others, or fails and is left out.
    """

    rules: GroupRules
    num_slots: int  # of each step
    _steps: dict[StepKey, _Step] = field(default_factory=dict)

    async def join(self, step: StepKey, group: Group) -> Group:
        """The same group with the advantages of its step."""
        opened = self._steps.setdefault(step, _Step(self.num_slots))
        opened.groups[group.ordinal] = group
        await self._one_less(opened)
        return (await opened.finished)[group.ordinal]

    async def leave(self, step: StepKey, ordinal: int) -> None:
        """The slot has failed, before or after it joined: the others do not wait for it."""
        opened = self._steps.setdefault(step, _Step(self.num_slots))
        if ordinal not in opened.groups:
            await self._one_less(opened)

    def close(self, step: StepKey) -> None:
        """Forget a step whose slots are all settled."""
        self._steps.pop(step, None)

    async def _one_less(self, opened: _Step) -> None:
        opened.num_missing -= 1
        if opened.num_missing or not opened.groups:
            return
        in_order = [opened.groups[each] for each in sorted(opened.groups)]
        try:
            finished = await self.rules.finish_step(in_order)
        except BaseException as error:
            opened.finished.set_exception(error)  # every waiting slot raises it
        else:
            opened.finished.set_result({group.ordinal: group for group in finished})


class Outbox:
    """The streams of all ranks, in lockstep by index. No call costs more for more ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._answers: dict[int, list[StreamItems]] = {}
        self._next = 0  # index of the answer that is formed next
        self._asked = [-1] * num_ranks  # the latest index that each rank has requested
        self._num_asking = 0  # ranks that have requested the next answer
        self._hungry: set[int] = set()  # indices that idle ranks wait for
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()  # set at each change, and replaced
        self._demand = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Every rank has requested the next answer."""
        return self._num_asking == self._num_ranks

    @property
    def is_hungry(self) -> bool:
        """The ranks are idle until the next answer comes."""
        return self._next in self._hungry

    async def take(self, rank: int, index: int) -> StreamItems:
        """Answer `index` for `rank`, once it exists. Raises the failure of the batcher, if any."""
        self._note(rank, index)
        while index not in self._answers and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # every rank would add a traceback to it
        return self._answers[index][rank]

    def replace(self, rank: int, index: int, items: StreamItems) -> None:
        """If a rank requests the answer again, it gets these items."""
        self._answers[index][rank] = items

    def mark_hungry(self, index: int) -> None:
        """The ranks are idle until answer `index` comes."""
        if index >= self._next:
            self._hungry.add(index)

    def put(self, answers: list[StreamItems]) -> None:
        """Add the next answer: the items of each rank."""
        self._answers[self._next] = answers
        self._hungry.discard(self._next)
        self._next += 1
        self._num_asking = sum(index >= self._next for index in self._asked)
        if not self.is_wanted:
            self._demand.clear()
        self._notify()

    def fail(self, error: BaseException) -> None:
        """No more answers will come: a rank that takes one gets the first such error."""
        self._failure = self._failure or error
        self._notify()

    async def wait_for_demand(self) -> None:
        """Return when an answer is wanted."""
        await self._demand.wait()

    def _note(self, rank: int, index: int) -> None:
        """Record a request; forget answers that no rank can request again once all have asked."""
        if index <= self._asked[rank]:
            return
        if self._asked[rank] < self._next <= index:
            self._num_asking += 1
        self._asked[rank] = index
        if self.is_wanted:
            self._demand.set()
            for old in [old for old in self._answers if old < self._next - 1]:
                del self._answers[old]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
