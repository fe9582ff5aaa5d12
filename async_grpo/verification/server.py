"""The pool's end of a fork server: starts it, asks it, and starts another when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, WorkerError, escaped
from async_grpo.verification import confinement
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.tasks import (
    LENGTH,
    FrameError,
    Outcome,
    decode,
    encode,
    encode_request,
    length_of,
    read_answers,
)
from async_grpo.verification.verdict import classify_end, lost

ACCIDENTS = ("overrun", "error", "lost")


class GraderServer:
    """Serves requests side by side; used from one event loop."""

    def __init__(self, config: VerifierConfig, *, shipped: bool, events: Counter[str]) -> None:
        """Raises `ConfigError` where requests must be confined and cannot be."""
        self._config = config
        self._events = events
        self.isolation = confinement.isolation(config, shipped=shipped)
        self._extra = () if shipped else config.environment
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket  # uvloop's own cannot be shut
        self._writer: asyncio.StreamWriter | None = None
        self._reports: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._is_closed = False
        self.shipped: tuple[str, ...] = ()  # of its adapters, those that are ours
        self.groupwise: tuple[str, ...] = ()  # and those that grade a group in one call
        self._executing: tuple[str, ...] = ()  # and those that run what the model wrote
        # Why what it runs is not confined, by kind; empty texts: it is.
        self.confinement = {self.isolation.kind: self.isolation.why}

    @property
    def is_up(self) -> bool:
        return self._writer is not None and self._process is not None and (
            self._process.poll() is None
        )  # fmt: skip

    async def start(self) -> None:
        """Have a server with adapters loaded.

        Raises `ConfigError` when adapters cannot be loaded, `WorkerError` when no process starts.
        """
        async with self._starting:
            if self.is_up:
                return
            if self._is_closed:
                raise WorkerError("a fork server must not be started, its pool has been closed")
            self._events["server_restarts"] += self._process is not None
            self._end()
            try:
                await self._launch()
            except BaseException:
                self._end()
                raise

    async def ask(self, name: str, samples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Run one adapter on samples of one group, in one process; never raises for what they do.

        Outcomes of the first samples, at least one: what ends the process is the last of them.
        """
        try:
            await self.start()
        except ConfigError as error:  # it loaded when the run began: something else has changed
            return [Outcome(name, "error", reason=str(error), cause="end")]
        except WorkerError as error:
            return [lost(name, str(error))]
        tasks = {secrets.token_hex(16): sample for sample in samples}
        task_ids = list(tasks)
        try:
            data = encode_request(name, tasks)
        except FrameError as error:  # too large: each will be tried again alone
            reason = f"the samples cannot be sent: {error}"
            return [Outcome(name, "error", reason=reason, cause="end")]
        report = await self._report_of(task_ids[0], data)
        said, has_failed = report.get("answers", ""), report.get("exit_code") != 0
        if has_failed:
            said = said[: said.rfind("\n") + 1]  # it may have been cut off in the middle
        outcomes = read_answers(said, task_ids=task_ids, adapter=name)
        answered_badly = bool(outcomes) and outcomes[-1].cause == "end"
        if not outcomes or (has_failed and len(outcomes) < len(tasks) and not answered_badly):
            is_own_doing = name in self._executing
            outcomes.append(classify_end(name, report, self._config, executes_text=is_own_doing))
        self._events.update(o.status for o in outcomes if o.status in ACCIDENTS)
        return outcomes

    def close(self) -> None:
        """End the server with everything below it; it cannot be started again."""
        self._is_closed = True
        self._end()

    async def _report_of(self, request: str, data: bytes) -> Mapping[str, Any]:
        """What the server says of a request; nothing when the server ends or is stuck."""
        if self._writer is None:  # it has just ended
            return {}
        process = self._process
        report = self._waiting[request] = asyncio.get_running_loop().create_future()
        self._writer.write(data)
        try:
            return await asyncio.wait_for(report, self._config.child_s + deadlines.GRADER_SILENCE_S)
        except TimeoutError:
            if self._process is process:  # else another request has seen to that
                self._end()
            return {}
        finally:
            self._waiting.pop(request, None)

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = confinement.server_command(self.isolation)
            scratch = {"TMPDIR": "/dev/shm"} if self.isolation.scratch_mib else {}
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it ends with the thread that began it
                [*command, str(theirs.fileno())],
                env=confinement.environment(os.environ, names=self._extra) | scratch,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
        self._connection = ours
        reader, self._writer = await asyncio.open_connection(sock=ours)
        orders = {"config": asdict(self._config), "isolation": asdict(self.isolation)}
        self._writer.write(encode(orders))
        await self._await_adapters(reader)
        self._reports = asyncio.create_task(self._hear(reader), name="verifier reports")

    async def _await_adapters(self, reader: asyncio.StreamReader) -> None:
        try:
            await asyncio.wait_for(_receive(reader), deadlines.GRADERS_LOADED_S)
        except (EOFError, OSError, FrameError) as failure:
            raise WorkerError(
                f"a fork server must start within {deadlines.GRADERS_LOADED_S:g} s, but it was "
                "silent or ended: its errors are in the log of the verifier pool"
            ) from failure
        names, limit_s = ",".join(self._config.reward_names), self._config.start_timeout_s
        try:
            greeting = await asyncio.wait_for(_receive(reader), limit_s)
        except (EOFError, OSError, FrameError) as failure:
            what = "did not end" if isinstance(failure, TimeoutError) else "ended the process"
            raise ConfigError(
                f"--reward-fns must import within {limit_s:g} s, got {names}, "
                f"whose import {what}: look at what the module does when imported"
            ) from failure
        if greeting["load_error"]:
            raise ConfigError(escaped(greeting["load_error"]))
        self.shipped, self.groupwise = tuple(greeting["shipped"]), tuple(greeting["groupwise"])
        self._executing = tuple(greeting["executing"])
        self.confinement |= greeting["confinement"]

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Hand out reports until the server ends; then all that wait hear of nothing."""
        with contextlib.suppress(EOFError, OSError, FrameError):
            while True:
                report = await _receive(reader)
                waiting = self._waiting.get(report["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(report)
        self._reports = None
        self._end()

    def _end(self) -> None:
        """Closing the connection ends the server, and that all others; then make sure."""
        if self._reports is not None:
            self._reports.cancel()
        if self._writer is not None:
            with contextlib.suppress(OSError):  # at once: a transport closes when the loop goes on
                self._connection.shutdown(socket.SHUT_RDWR)
            self._writer.transport.abort()
        self._reports = self._writer = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(deadlines.GRADER_ENDED_S)
            self._process.kill()
            self._process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({})
        self._waiting.clear()


async def _receive(reader: asyncio.StreamReader) -> Any:
    head = await reader.readexactly(LENGTH.size)
    length = length_of(head)
    return decode(await reader.readexactly(length))
