"""The environment of a taskset of `verifiers` 0.4, which plays and grades its episodes.

    --environment "verifiers:/path/to/its/python TASKSET [options of vf-eval]"

consumes:     questions with a column `task`, which `verifiers_bridge.py tasks` writes
produces:     episodes of the policy's turns at this worker's gateway, with the reward of verifiers
waits for:    the bridge, one process for all episodes of a worker
unblocked by: the bridge's answer, its end, or a policy that cannot answer
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
from async_grpo.bridges.agent import Address, HostedEnvironment, OutputTail, process_variables
from async_grpo.environments.base import EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import Cause
from async_grpo.types import Episode, Question, Verdict
from async_grpo.util.deadlines import AGENT_SAID_S, BRIDGE_READY_S

# Failures by the class of verifiers' error; all others are failures of the environment.
FAILURES = {
    "ToolsetError": FailureClass.TOOL,
    "TaskError": FailureClass.JUDGE,
    "TimeoutError": FailureClass.DEADLINE,
}
# Errors with which a harness ends when it is refused another turn.
WITHOUT_ROOM = ("ProviderError", "HarnessError")
MAX_ANSWER_BYTES = 16 << 20
KEPT_CHARACTERS = 300  # at the end of a bridge's standard error, for its error message


class VerifiersEnvironment(HostedEnvironment):
    """One worker's episodes of one taskset."""

    max_turns = 1000  # the taskset bounds episodes before
    goes_on_without_room = True  # a harness compacts its prompt, or ends and is graded

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: the path of a Python, then the options of `vf-eval`."""
        python, *options = words
        token = secrets.token_urlsafe(24)
        super().__init__(token=token)
        self._bridge = Bridge(
            # -P: modules beside the file would hide packages of the same name.
            [python, "-P", verifiers_bridge.__file__, "serve", *options],
            variables=process_variables(python, **{verifiers_bridge.KEY_VARIABLE: token}),
        )

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """Have the bridge play and grade the task of the question."""
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
    """The bridge's answer as a verdict; raises `EpisodeFailed` for errors other than the model's.

    `mistake`: the model's in its last turn, which may have ended the harness.

    >>> verdict_of({"reward": 0.5}, is_full=False).reward
    0.5
    """
    errors = answer.get("errors", ())
    if not errors:
        return Verdict.scored(answer["reward"], adapter="verifiers")
    kind, message = errors[-1]
    if is_full and kind in WITHOUT_ROOM:
        return Verdict("unscorable", 0.0, None, "verifiers", "no room for another turn", 0.0)
    if mistake and kind == "HarnessError":
        return Verdict("unscorable", 0.0, None, "verifiers", f"the last turn {mistake}", 0.0)
    failure = FAILURES.get(kind, FailureClass.ENVIRONMENT)
    cause = Cause.STATE if kind == "SandboxError" else None
    raise EpisodeFailed(failure, f"verifiers: {kind}: {message}", cause=cause)


class Bridge:
    """One process in another Python, which answers many requests side by side by lines of JSON.

        to it        {"id": 1, ...the request}      {"id": 1, "cancel": true}
        from it      {"ready": true}, once          {"id": 1, ...the answer}

    It ends when its standard input does. The end of its standard error stands in error messages. If
    it has ended, the next request starts it again. Any failure raises `EpisodeFailed`.
    """

    def __init__(self, command: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self._command = list(command)
        self._variables = variables
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def ask(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Send a request and wait for its answer; a caller that is cancelled cancels it."""
        async with self._starting:
            if self._running is None or self._running.ended.done():
                self._running = await _Running.start(self._command, self._variables)
        return await self._running.ask(request)


class _Running:
    """The process from one start until its end."""

    def __init__(self, process: asyncio.subprocess.Process, who: str) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the reason
        self._process = process
        self._who = who
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Mapping[str, object]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stderr = OutputTail()
        self._tasks = [
            asyncio.create_task(self._read_answers(), name="bridge"),
            asyncio.create_task(self._read_stderr(), name="bridge-stderr"),
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
            what = f"{who} cannot be started: {error}"
            raise EpisodeFailed(FailureClass.ENVIRONMENT, what) from error
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

    async def ask(self, request: Mapping[str, object]) -> Mapping[str, object]:
        answer: asyncio.Future[Mapping[str, object]] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._answers[number] = answer
        try:
            self._send({"id": number, **request})
            ends: set[asyncio.Future[Any]] = {answer, self.ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self.failed(self.ended.result())
            return answer.result()
        finally:
            del self._answers[number]
            if not answer.done() and not self.ended.done():
                self._send({"id": number, "cancel": True})

    def _send(self, message: Mapping[str, object]) -> None:
        assert self._process.stdin, "it is a pipe"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def failed(self, how: str) -> EpisodeFailed:
        said = self._stderr.text[-KEPT_CHARACTERS:] or "it has said nothing"
        what = f"{self._who} {how}: {said}"
        return EpisodeFailed(FailureClass.ENVIRONMENT, what, cause=Cause.STATE)

    async def _read_answers(self) -> None:
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

    async def _read_stderr(self) -> None:
        assert self._process.stderr, "it is a pipe"
        while read := await self._process.stderr.read(1 << 16):
            self._stderr.data_received(read)
