"""The controller's half of a user's algorithm, in a process of its own beside rank 0.

consumes:     groups that are verified, and the groups of a step
produces:     the same with advantages, masks and contributions
waits for:    nothing: one call after the other
unblocked by: the controller's calls

What the user's code raises there, its process' end, or 60 s without an answer end the run with the
user's line, and never the controller.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from async_grpo.algorithms.base import Algorithm, GroupRules, LocalRules
from async_grpo.cluster import handles
from async_grpo.types import Group
from async_grpo.util import deadlines
from async_grpo.util.errors import WorkerError
from async_grpo.util.user_code import UserCode

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster

T = TypeVar("T")
Q = TypeVar("Q")
Make = Callable[[UserCode | None], Algorithm]


class RulesProcess:
    """Runs the user's code, and names the line of it that fails."""

    def __init__(self, make: Make, code: UserCode) -> None:
        self._code = code
        self._rules = LocalRules(make(code))

    async def finish_group(self, group: Group) -> Group:
        return await self._told_apart(self._rules.finish_group, group)

    async def finish_step(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        return await self._told_apart(self._rules.finish_step, groups)

    async def _told_apart(self, method: Callable[[Q], Awaitable[T]], argument: Q) -> T:
        try:
            return await method(argument)
        except Exception as error:  # the user's own code may raise anything
            line = self._code.line_in(traceback.extract_tb(error.__traceback__))
            raise WorkerError(
                f"--algorithm {self._code.name} raised {type(error).__name__}: {error} ({line}): "
                "correct it"
            ) from None


class RemoteRules:
    """The rules that the process runs, as the controller asks for them."""

    def __init__(self, process: Any, algorithm: Algorithm) -> None:
        self.needs = algorithm.needs
        self.waits_for_step = algorithm.waits_for_step
        self._process = process
        self._who = f"--algorithm {algorithm.config.objective.algorithm}"

    async def finish_group(self, group: Group) -> Group:
        return await self._answer(self._process.finish_group.remote(group))

    async def finish_step(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        return await self._answer(self._process.finish_step.remote(groups))

    async def _answer(self, call: Awaitable[T]) -> T:
        return await handles.call(call, timeout_s=deadlines.ANSWER_S, who=self._who)


def start_rules(make: Make, code: UserCode | None, cluster: Cluster) -> GroupRules:
    """The rules of the run's algorithm: in the controller where it is shipped, else beside it.

    `make` makes the algorithm, of the user's `code` where that is not None.
    """
    algorithm = make(code)
    if code is None:
        return LocalRules(algorithm)
    process = cluster.actor(RulesProcess)  # on this node, which has what the code imports
    return RemoteRules(process.remote(make, code), algorithm)
