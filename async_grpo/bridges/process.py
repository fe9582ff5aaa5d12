"""One process in another Python, asked many things side by side by lines of JSON.

    to it        {"id": 1, ...what is asked}    {"id": 1, "cancel": true}
    from it      {"ready": true}, once          {"id": 1, ...the answer}

It ends when its standard input does. What it writes to its standard error is kept for its last
words. One that has ended is started again by whoever asks next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from async_grpo.bridges.agent_process import Said
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause
from async_grpo.util.deadlines import AGENT_SAID_S, BRIDGE_READY_S

MAX_BYTES = 16 << 20  # of one answer
KEPT = 300  # characters of its last words


class Bridge:
    """The process of a command; raises `EpisodeFailed` for whatever is wrong with it."""

    def __init__(self, command: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self._command = list(command)
        self._variables = variables
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def ask(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
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
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
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
                limit=MAX_BYTES,
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

    async def ask(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._say({"id": number, **asked})
            await asyncio.wait({answer, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self.failed(self.ended.result())
            found: Mapping[str, Any] = answer.result()
            return found
        finally:
            del self._answers[number]
            if not answer.done() and not self.ended.done():
                self._say({"id": number, "cancel": True})

    def _say(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin, "it is a pipe"
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def failed(self, how: str) -> EpisodeFailed:
        said = self._said.text[-KEPT:] or "it has said nothing"
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
