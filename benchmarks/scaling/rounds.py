"""From finished groups to rounds of minibatches: the real `RoundFormer`, one a batcher.

With several batchers each forms the bins of its own group of ranks from its own samples. A round
goes out when every batcher has one; who has nothing left of the step gives its ranks fillers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from async_grpo.batching.admission import StepKey
from async_grpo.batching.packing import Item
from async_grpo.batching.rounds import Round, RoundFormer, StepMarker
from benchmarks.scaling.clock import Actor, Clock
from benchmarks.scaling.scenario import Scenario

FILL_TARGET = 0.9  # RoundFormer's own default: below it only hunger can make a round go out
Formed = list[Round | StepMarker]


class Rounds:
    """Tells of one item after the other, each when somebody has asked for it."""

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        batchers: list[Actor],
        *,
        send: Callable[[Formed], None],
        deterministic: bool = False,
    ) -> None:
        """`send` hears of every round that goes out, when its last rank has it."""
        self._clock = clock
        self._scenario = scenario
        self._batchers = batchers
        self._send = send
        self.num_ranks = scenario.num_ranks // len(batchers)  # of one batcher
        self._formers = [
            RoundFormer(
                self.num_ranks,
                max_tokens=scenario.trainer.max_tokens,
                steps_per_batch=1,
                deterministic=deterministic,
            )
            for _ in batchers
        ]
        self._formed: list[Round | StepMarker | None] = [None] * len(batchers)
        self._ready_tokens: list[dict[int, int]] = [{} for _ in batchers]  # by batch
        self._complete: set[tuple[int, int]] = set()  # (batcher, batch)
        self._items: dict[tuple[int, int], Item] = {}
        self._batch = 0
        self._is_wanted = True
        self._is_hungry = False
        self._is_looking = False

    def offer(self, batcher: int, step: StepKey, items: Iterable[Item]) -> None:
        """A group of `step` is ready to train."""
        tokens = self._ready_tokens[batcher]
        for item in items:
            self._formers[batcher].offer(step, item=item)
            self._items[item.key] = item
            tokens[step.batch] = tokens.get(step.batch, 0) + item.num_tokens
        self._look_soon()

    def complete(self, batcher: int, step: StepKey) -> None:
        """Nothing more of `step` comes from this batcher."""
        self._formers[batcher].step_complete(step)
        self._complete.add((batcher, step.batch))
        self._look_soon()

    def ask(self) -> None:
        """Every rank wants the next item."""
        self._is_wanted, self._is_hungry = True, False
        self._look_soon()

    def hunger(self) -> None:
        """Ranks stand still until it comes."""
        self._is_hungry = True
        self._look_soon()

    def take(self, formed: Round) -> list[list[Item]]:
        """What each rank has to train; forgotten here."""
        return [[self._items.pop(key) for key in keys] for keys in formed.bins]

    def _look_soon(self) -> None:
        if self._is_wanted and not self._is_looking:
            self._is_looking = True
            self._clock.after(self._scenario.control.poll_s, self._look)

    def _look(self) -> None:
        self._is_looking = False
        if not self._is_wanted:
            return
        for number, former in enumerate(self._formers):
            if self._formed[number] is None and self._may_form(number):
                now_s = self._clock.now_s
                self._formed[number] = former.next_round(now_s, hungry=self._is_hungry)
        formed = [one for one in self._formed if one is not None]
        if len(formed) == len(self._formers):
            self._send_round(formed)
        elif self._is_hungry and any(tokens.get(self._batch) for tokens in self._ready_tokens):
            self._look_soon()

    def _may_form(self, number: int) -> bool:
        """Saves asking in vain: what is asked is the sum over all that waits."""
        if self._is_hungry or (number, self._batch) in self._complete:
            return True
        budget = self.num_ranks * self._scenario.trainer.max_tokens
        return self._ready_tokens[number].get(self._batch, 0) >= FILL_TARGET * budget

    def _send_round(self, formed: Formed) -> None:
        self._is_wanted = self._is_hungry = False
        is_end = all(isinstance(one, StepMarker) for one in formed)
        num_left = len(formed)

        def sent() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                self._send(formed)

        for number, one in enumerate(formed):
            if is_end or isinstance(one, Round):  # a marker stays until the others end too
                self._formed[number] = None
            self._batchers[number].call(self._cost(number, one), sent)
        if is_end:
            self._batch += 1

    def _cost(self, number: int, formed: Round | StepMarker) -> float:
        """CPU seconds of the batcher: its ranks' requests, and the samples' way out."""
        control = self._scenario.control
        seconds = self.num_ranks * control.batcher_item_s
        if isinstance(formed, Round):
            keys = [key for keys in formed.bins for key in keys]
            tokens = sum(self._items[key].num_tokens for key in keys)
            self._ready_tokens[number][self._batch] -= tokens
            seconds += len(keys) * control.batcher_sample_s / 2
            seconds += tokens * control.batcher_token_s / 2
        return seconds
