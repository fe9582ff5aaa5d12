"""One place in the pool: a verifier process that is killed and replaced when it misbehaves.

Every slot has its own pipe, so that no process can hold up or poison another's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.verdict import Outcome
from async_grpo.verification.verifier import serve

SAMPLES_PER_PROCESS = 5000  # sympy's caches grow, and an innocent text must not pay for it
PRELOADED = ["async_grpo.verification.verifier", "math_verify"]  # forked, not imported each time


class Slot:
    """Blocking and for one thread at a time; the process starts when it is first needed."""

    def __init__(self, config: VerifierConfig) -> None:
        self._config = config
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._num_samples = 0

    def start(self) -> None:
        """Have a live process with adapters loaded; raises `ConfigError` when they cannot be."""
        if self._process is not None and self._process.is_alive():
            return
        self.stop()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._config), daemon=True)
        self._process.start()
        theirs.close()
        self._num_samples = 0
        self._await_adapters()

    def grade(self, name: str, sample: dict[str, Any]) -> Outcome:
        """Run one adapter on one sample within the limits; never raises for what they do."""
        try:
            self.start()
            outcome = self._exchange((name, sample))
        except ConfigError as error:  # it loaded when the run began: the file changed since
            return Outcome(name, "error", reason=str(error))
        except TimeoutError:
            outcome = Outcome(
                name, "overrun", reason=f"takes longer than {self._config.timeout_s:g} s"
            )
        except (EOFError, OSError):
            outcome = Outcome(name, "error", reason=f"its process ended, {self._exit_code()}")
        self._num_samples += 1
        accident = outcome.status in ("overrun", "error")
        if accident or self._num_samples >= SAMPLES_PER_PROCESS:
            self.stop()
        return outcome

    def stop(self) -> None:
        """End the process and whatever it started."""
        process, self._process = self._process, None
        if process is None or process.pid is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it is gone, or has not made its group yet
            process.kill()
        process.join()
        if self._connection is not None:
            self._connection.close()

    def _exit_code(self) -> str:
        assert self._process is not None
        self._process.join(timeout=1.0)  # its pipe closes a moment before its code is known
        return f"exit code {self._process.exitcode}"

    def _await_adapters(self) -> None:
        names = ",".join(self._config.reward_names)
        try:
            error = self._receive(timeout_s=self._config.start_timeout_s)
        except (TimeoutError, EOFError, OSError) as failure:
            what = "did not end" if isinstance(failure, TimeoutError) else "ended the process"
            self.stop()
            raise ConfigError(
                f"--reward-fns must import within {self._config.start_timeout_s:g} s, got {names}, "
                f"whose import {what}: look at what the module does when imported"
            ) from failure
        if error:
            self.stop()
            raise ConfigError(error)

    def _exchange(self, task: tuple[str, dict[str, Any]]) -> Outcome:
        assert self._connection is not None
        self._connection.send(task)
        return self._receive(timeout_s=self._config.timeout_s)

    def _receive(self, *, timeout_s: float) -> Any:
        """The process' next message; raises TimeoutError, or EOFError/OSError when it died."""
        assert self._connection is not None and self._process is not None
        ready = wait([self._connection, self._process.sentinel], timeout=timeout_s)
        if not ready:
            raise TimeoutError
        if self._connection not in ready and not self._connection.poll():
            raise EOFError
        return self._connection.recv()
