"""The environment of a taskset of `verifiers` 0.4, which plays and grades it unchanged.

    --environment "verifiers:/path/to/its/python TASKSET [options of vf-eval]"

consumes:     questions with a column `task`, which `verifiers_bridge.py tasks` writes
produces:     episodes of what the policy was asked here, with the reward of verifiers
waits for:    the bridge, one process for all episodes of a worker
unblocked by: its answers, its end, or a policy that cannot answer
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_grpo.bridges import verifiers_bridge
from async_grpo.bridges.hosted import Address, HostedEnvironment, process_variables
from async_grpo.bridges.process import Bridge
from async_grpo.environments.base import EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import Cause
from async_grpo.types import Episode, Question, Verdict

# What failed, by the class of verifiers' error; of all others it is the environment.
FAILURES = {
    "ToolsetError": FailureClass.TOOL,
    "TaskError": FailureClass.JUDGE,
    "TimeoutError": FailureClass.DEADLINE,
}
# Errors in which a harness ends that has been refused another turn.
WITHOUT_ROOM = ("ProviderError", "HarnessError")


class VerifiersEnvironment(HostedEnvironment):
    """One worker's episodes of one taskset."""

    max_turns = 1000  # what bounds episodes is the taskset's
    goes_on_without_room = True  # harnesses compact, or end and are graded

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: a Python, then the options of `vf-eval`."""
        python, *options = words
        token = secrets.token_urlsafe(24)
        super().__init__(token=token)
        self._bridge = Bridge(
            # Without the folder of the file, whose names hide those of packages.
            [python, "-P", verifiers_bridge.__file__, "serve", *options],
            variables=process_variables(python, **{verifiers_bridge.KEY_VARIABLE: token}),
        )

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """The task of the question, as verifiers plays it."""
        task = question.columns.get("task")
        if not isinstance(task, Mapping):
            raise EpisodeFailed(
                FailureClass.ENVIRONMENT,
                "a question of verifiers must have a column task, got "
                f"{', '.join(question.columns)}: write the data with verifiers_bridge.py tasks",
            )

        async def ask(address: Address) -> Mapping[str, Any]:
            where = {"base_url": f"{address.url}/v1", "session": address.session}
            return await self._bridge.ask({"task": task, **where})

        answer, sampler = await self.hosted(policy, services, ask)
        verdict = verdict_of(answer, is_full=sampler.is_full, mistake=sampler.mistake)
        return replace(policy.episode(is_cut=sampler.is_full), verdict=verdict)


def verdict_of(answer: Mapping[str, Any], *, is_full: bool, mistake: str = "") -> Verdict:
    """The bridge's answer as a verdict; raises `EpisodeFailed` for errors that made none.

    `mistake`: of the model in its last turn, on which a harness may end.

    >>> verdict_of({"reward": 0.5}, is_full=False).reward
    0.5
    """
    errors = answer.get("errors", ())
    if not errors:
        return Verdict("scored", float(answer["reward"]), None, "verifiers", "", 0.0)
    kind, message = errors[-1]
    if is_full and kind in WITHOUT_ROOM:
        return Verdict("unscorable", 0.0, None, "verifiers", "no room for another turn", 0.0)
    if mistake and kind == "HarnessError":
        return Verdict("unscorable", 0.0, None, "verifiers", f"the last turn {mistake}", 0.0)
    failure = FAILURES.get(kind, FailureClass.ENVIRONMENT)
    cause = Cause.STATE if kind == "SandboxError" else None
    raise EpisodeFailed(failure, f"verifiers: {kind}: {message}", cause=cause)
