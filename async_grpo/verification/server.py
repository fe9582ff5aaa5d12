"""The pool's end of a fork server: starts it, sends it requests, and starts another if it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, WorkerError, escaped
from async_grpo.verification import confinement, tasks
from async_grpo.verification.config import MAX_PROCESSES, VerifierConfig
from async_grpo.verification.tasks import FrameError, Outcome, overrun

Report = Mapping[str, Any]  # JSON of a fork server, see `ForkServer`
ACCIDENTS = ("overrun", "error", "lost")
CPU_SHARE = 0.9  # of the time limit: a process killed after this much reached the kernel's limit
WAITING_SHARE = 0.5  # of the time limit: processes that used less, in three times as long, waited
MEMORY_SHARE = 0.5  # of the memory limit: a process killed with this much ran out of memory


class GraderServer:
    """Serves requests side by side; called from one event loop."""

    def __init__(self, config: VerifierConfig, *, shipped: bool, events: Counter[str]) -> None:
        """Raises `ConfigError` where requests must be confined and cannot be."""
        self._config = config
        self._events = events
        self.isolation = confinement.isolation(config, shipped=shipped)
        self._extra = () if shipped else config.environment
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket  # uvloop's socket has no shutdown
        self._writer: asyncio.StreamWriter | None = None
        self._reports: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[Report]] = {}
        self._is_closed = False
        self.shipped: tuple[str, ...] = ()  # names of adapters that are shipped graders
        self.groupwise: tuple[str, ...] = ()  # names of those that grade a group in one call
        self._executing: tuple[str, ...] = ()  # names of those that run what the model wrote
        # By kind of code, why it is not confined; empty texts: it is.
        self.confinement = {self.isolation.kind: self.isolation.why}

    @property
    def is_up(self) -> bool:
        """Whether the process runs and its connection is open."""
        return bool(self._writer and self._process and self._process.poll() is None)

    async def start(self) -> None:
        """Start the server unless it is up, and wait until it has loaded its adapters.

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
        """Run one adapter on samples of one group, in one process; no failure of theirs raises.

        Returns outcomes of the first samples, at least one; the last may be of the sample on which
        the process ended.
        """
        try:
            await self.start()
        except ConfigError as error:  # the adapters loaded at the run's start, but not again
            return [Outcome(name, "error", reason=str(error), cause="end")]
        except WorkerError as error:
            return [lost(name, str(error))]
        by_id = {secrets.token_hex(16): sample for sample in samples}
        task_ids = list(by_id)
        try:
            data = tasks.encode_request(name, by_id)
        except FrameError as error:  # too large: the sandbox tries each again alone
            reason = f"the samples cannot be sent: {error}"
            return [Outcome(name, "error", reason=reason, cause="end")]
        report = await self._report_of(task_ids[0], data)
        answers, has_failed = report.get("answers", ""), report.get("exit_code") != 0
        if has_failed:
            answers = answers[: answers.rfind("\n") + 1]  # the last may be incomplete
        outcomes = tasks.read_answers(answers, task_ids=task_ids, adapter=name)
        answered_badly = bool(outcomes) and outcomes[-1].cause == "end"
        if not outcomes or (has_failed and len(outcomes) < len(by_id) and not answered_badly):
            executes_text = name in self._executing
            outcomes.append(classify_end(name, report, self._config, executes_text=executes_text))
        self._events.update(o.status for o in outcomes if o.status in ACCIDENTS)
        return outcomes

    def close(self) -> None:
        """End the server with all of its processes, for good."""
        self._is_closed = True
        self._end()

    async def _report_of(self, request: str, data: bytes) -> Report:
        """The server's report of a request; empty if the server ends or does not answer in time."""
        if self._writer is None:  # the server has just ended
            return {}
        process = self._process
        report = self._waiting[request] = asyncio.get_running_loop().create_future()
        self._writer.write(data)
        try:
            return await asyncio.wait_for(report, self._config.child_s + deadlines.GRADER_SILENCE_S)
        except TimeoutError:
            if self._process is process:  # else another request has ended it already
                self._end()
            return {}
        finally:
            self._waiting.pop(request, None)

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = confinement.server_command(self.isolation)
            scratch = {"TMPDIR": "/dev/shm"} if self.isolation.scratch_mib else {}
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it ends with the thread that starts it
                [*command, str(theirs.fileno())],
                env=confinement.environment(os.environ, names=self._extra) | scratch,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        self._connection = ours
        reader, self._writer = await asyncio.open_connection(sock=ours)
        orders = {"config": asdict(self._config), "isolation": asdict(self.isolation)}
        self._writer.write(tasks.encode(orders))
        await self._await_adapters(reader)
        self._reports = asyncio.create_task(self._read_reports(reader), name="verifier reports")

    async def _await_adapters(self, reader: asyncio.StreamReader) -> None:
        """Wait for the server's two greetings: it has started, and its adapters are loaded."""
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

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        """Give each report to the request that waits for it; empty ones once the server ends."""
        with contextlib.suppress(EOFError, OSError, FrameError):
            while True:
                report = await _receive(reader)
                waiting = self._waiting.get(report["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(report)
        self._reports = None
        self._end()

    def _end(self) -> None:
        """Close the connection, at which the server ends all of its processes; then kill it."""
        if self._reports is not None:
            self._reports.cancel()
        if self._writer is not None:
            with contextlib.suppress(OSError):  # at once, before the transport does
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
    length = tasks.length_of(await reader.readexactly(tasks.LENGTH.size))
    return tasks.decode(await reader.readexactly(length))


def lost(adapter: str, reason: str) -> Outcome:
    """The outcome of an attempt that says nothing about the text."""
    return Outcome(adapter, "lost", reason=reason, cause="lost")


def classify_end(
    adapter: str, report: Report, config: VerifierConfig, *, executes_text: bool = False
) -> Outcome:
    """The outcome of an attempt whose process failed, from the report of its fork server.

    A grader that waited for a connection is no fault of the text, unless the adapter executes it.

    >>> config = VerifierConfig(reward_names=())
    >>> report = {"exit_code": -11, "cpu_s": 0.1, "memory_mib": 90.0, "killed_for": ""}
    >>> classify_end("mine", report, config).status
    'error'
    >>> classify_end("mine", report | {"exit_code": -9}, config).status
    'lost'
    >>> classify_end("mine", report | {"exit_code": -9, "cpu_s": 10.1}, config).status
    'overrun'
    """
    if "exit_code" not in report:
        return lost(adapter, report.get("failed", "its server was ended from outside"))
    code, memory_mib = report["exit_code"], report["memory_mib"]
    if report["killed_for"] == "memory":
        return overrun(adapter, f"needs more than {config.memory_limit} in all of its processes")
    if report["killed_for"] == "processes":
        return overrun(adapter, f"starts more than {MAX_PROCESSES} processes")
    if report["killed_for"] == "time":
        is_idle = report["family_cpu_s"] < WAITING_SHARE * config.timeout_s
        if report["is_connected"] and is_idle and not executes_text:
            reason = f"waits for a connection for longer than {config.time_limit} allows"
            return Outcome(adapter, "error", reason=reason, cause="connection")
        return overrun(adapter, f"takes longer than {config.time_limit} allows")
    if report["killed_for"] == "answers":
        return Outcome(adapter, "error", reason="its process sent no answer but more", cause="end")
    is_killed = code == -signal.SIGKILL
    if report["killed_for"] == "processor" or (
        is_killed and report["cpu_s"] >= CPU_SHARE * config.timeout_s
    ):
        return overrun(adapter, f"uses more processor time than {config.time_limit}")
    if is_killed and memory_mib > MEMORY_SHARE * config.memory_mib:
        return overrun(adapter, f"was killed while it held {memory_mib:.0f} MiB")
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return lost(adapter, f"its process was ended from outside, code {code}")
    return Outcome(adapter, "error", reason=f"its process ended, exit code {code}", cause="end")
