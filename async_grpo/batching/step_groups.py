"""Holds the groups of a gradient step whose advantages can only be made of all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.batching.admission import StepKey
from async_grpo.types import Group

if TYPE_CHECKING:
    from async_grpo.algorithms.base import GroupRules


@dataclass(slots=True)
class _Step:
    num_missing: int  # slots that have neither come nor failed
    groups: dict[int, Group] = field(default_factory=dict)  # by ordinal
    finished: asyncio.Future[dict[int, Group]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class StepGroups:
    """A slot joins its step with its group and waits for the others, or fails and is left out."""

    def __init__(self, rules: GroupRules, *, num_slots: int) -> None:
        """`num_slots` of each step."""
        self._rules = rules
        self._num_slots = num_slots
        self._steps: dict[StepKey, _Step] = {}

    async def join(self, step: StepKey, group: Group) -> Group:
        """The same group with the advantages of its step."""
        opened = self._steps.setdefault(step, _Step(self._num_slots))
        opened.groups[group.ordinal] = group
        await self._one_less(opened)
        return (await opened.finished)[group.ordinal]

    async def leave(self, step: StepKey, ordinal: int) -> None:
        """The slot has failed, before or after it joined: nobody waits for it."""
        opened = self._steps.setdefault(step, _Step(self._num_slots))
        if ordinal not in opened.groups:
            await self._one_less(opened)

    def close(self, step: StepKey) -> None:
        """Every slot of the step is settled."""
        self._steps.pop(step, None)

    async def _one_less(self, opened: _Step) -> None:
        opened.num_missing -= 1
        if opened.num_missing or not opened.groups:
            return
        in_order = [opened.groups[each] for each in sorted(opened.groups)]
        try:
            finished = await self._rules.finish_step(in_order)
        except BaseException as error:
            opened.finished.set_exception(error)  # to every slot that waits
        else:
            opened.finished.set_result({group.ordinal: group for group in finished})
