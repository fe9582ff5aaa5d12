"""The environment of a taskset of `verifiers` 0.4, which plays and grades it unchanged.

    --environment "verifiers:/path/to/its/python TASKSET [options of vf-eval]"

consumes:     questions with a column `task`, which `verifiers_bridge.py tasks` writes
produces:     episodes of what the policy was asked here, with the reward of verifiers
waits for:    the bridge, one process for all episodes of a worker
unblocked by: its answers, its end, or a policy that cannot answer
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from async_grpo.bridges import verifiers_bridge
from async_grpo.bridges.hosted import Address, HostedEnvironment, Said, process_variables
from async_grpo.environments.base import EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import Cause
from async_grpo.types import Episode, Question, Verdict
from async_grpo.util.deadlines import AGENT_SAID_S, BRIDGE_READY_S

# What failed, by the class of verifiers' error; of all others it is the environment.
FAILURES = {
    "ToolsetError": FailureClass.TOOL,
    "TaskError": FailureClass.JUDGE,
    "TimeoutError": FailureClass.DEADLINE,
}
# Errors in which a harness ends that has been refused another turn.
WITHOUT_ROOM = ("ProviderError", "HarnessError")
MAX_ANSWER_BYTES = 16 << 20
KEPT_CHARACTERS = 300  # of the last words of a bridge


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

        async def ask(address: Address) -> Mapping[str, object]:
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


class Bridge:
    """One process in another Python, asked many things side by side by lines of JSON.

        to it        {"id": 1, ...what is asked}    {"id": 1, "cancel": true}
        from it      {"ready": true}, once          {"id": 1, ...the answer}

    It ends when its standard input does. What it writes to its standard error is kept for its last
    words. One that has ended is started again by whoever asks next. Raises `EpisodeFailed` for
    whatever is wrong with it.
    """

    def __init__(self, command: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self._command = list(command)
        self._variables = variables
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def ask(self, asked: Mapping[str, object]) -> Mapping[str, object]:
        """Its answer; who is cancelled while waiting has it do no more."""
        async with self._starting:
            if self._running is None or self._running.ended.done():
                self._running = await _Running.start(self._command, self._variables)
        return await self._running.ask(asked)


class _Running:
    """One life of the process."""

    def __init__(self, process: asyncio.subprocess.Process, who: str) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # how
        self._process = process
        self._who = who
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Mapping[str, object]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._said = Said()
        self._tasks = [
            asyncio.create_task(self._listen(), name="bridge"),
            asyncio.create_task(self._keep_last_words(), name="bridge-stderr"),
        ]

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str]) -> _Running:
        who = f"bridge {' '.join(command)}"
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(variables),
                limit=MAX_ANSWER_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise EpisodeFailed(
                FailureClass.ENVIRONMENT, f"{who} cannot be started: {error}"
            ) from error
        running = cls(process, who)
        ends: set[asyncio.Future[Any]] = {running._ready, running.ended}
        try:
            await asyncio.wait(ends, timeout=BRIDGE_READY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not running._ready.done():
                running.kill()
        if running.ended.done():
            raise running.failed(running.ended.result())
        if not running._ready.done():
            raise running.failed(f"is not ready after {BRIDGE_READY_S:.0f} s")
        return running

    async def ask(self, asked: Mapping[str, object]) -> Mapping[str, object]:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._say({"id": number, **asked})
            await asyncio.wait({answer, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self.failed(self.ended.result())
            found: Mapping[str, object] = answer.result()
            return found
        finally:
            del self._answers[number]
            if not answer.done() and not self.ended.done():
                self._say({"id": number, "cancel": True})

    def _say(self, what: Mapping[str, object]) -> None:
        assert self._process.stdin, "it is a pipe"
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def failed(self, how: str) -> EpisodeFailed:
        said = self._said.text[-KEPT_CHARACTERS:] or "it has said nothing"
        what = f"{self._who} {how}: {said}"
        return EpisodeFailed(FailureClass.ENVIRONMENT, what, cause=Cause.STATE)

    async def _listen(self) -> None:
        assert self._process.stdout, "it is a pipe"
        how = ""
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                waiting = self._ready if "ready" in answer else self._answers.get(answer["id"])
                if waiting and not waiting.done():
                    waiting.set_result(answer)
        except (ValueError, KeyError, TypeError) as error:
            how = f"wrote what is no answer ({error})"
        self.kill()
        code = await self._process.wait()
        await asyncio.wait({self._tasks[1]}, timeout=AGENT_SAID_S)
        self.ended.set_result(how or f"ended with {code}")

    async def _keep_last_words(self) -> None:
        assert self._process.stderr, "it is a pipe"
        while said := await self._process.stderr.read(1 << 16):
            self._said.data_received(said)
