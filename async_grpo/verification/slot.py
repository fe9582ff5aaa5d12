"""One place in the pool: a verifier process that is killed and replaced when it misbehaves.

Every slot has its own pipes, so that no process can hold up or poison another's.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import Any, Literal

from async_grpo.errors import ConfigError, WorkerError
from async_grpo.verification import frames
from async_grpo.verification.accident import classify_end, classify_silence
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.frames import FrameError
from async_grpo.verification.spawner import Lines, Spawner
from async_grpo.verification.tasks import encode_task, read_answer
from async_grpo.verification.verdict import Outcome

logger = logging.getLogger(__name__)

SAMPLES_PER_PROCESS = 5000  # sympy's caches grow, and an innocent text must not pay for it
YOUNG_S = 5.0
SPAWN_TIMEOUT_S = 30.0  # of the zygote, which imports graders first
END_TIMEOUT_S = 1.0  # of a process that is told to end, before it is killed
END_GRACE_S = 0.3  # of a process that has closed its pipe: most are just ending


class Slot:
    """Blocking and for one thread at a time; the process starts when it is first needed.

    `events` counts why processes had to be replaced: outcomes that are accidents, `died_idle`, and
    `killed_keeper` where a process did not end when it was told to.
    """

    def __init__(self, config: VerifierConfig, spawner: Spawner) -> None:
        self._config = config
        self._spawner = spawner
        self._lines: Lines | None = None
        self._num_samples = 0
        self._started_s = 0.0
        self.events: Counter[str] = Counter()
        self.is_confined = False  # whether the process lives in namespaces of its own
        self.is_late = False  # its task takes longer than others are to wait; see Sandbox
        self.busy_since: float | None = None  # when its task began, on the monotonic clock

    @property
    def has_process(self) -> bool:
        return self._lines is not None

    @property
    def is_up(self) -> bool:
        """Whether a process waits for samples; its end, or anything it says unasked, is a no."""
        return self._lines is not None and not self._lines.poll.poll(0)

    def start(self) -> None:
        """Have a live process with adapters loaded.

        Raises `ConfigError` when adapters cannot be loaded, `WorkerError` when no process starts.
        """
        if self.is_up:
            return
        if self._lines is not None:
            self.events["died_idle"] += 1
            self.stop()
        self._lines = self._spawn()
        self._num_samples = 0
        self._await_adapters(self._lines)
        self._started_s = time.monotonic()

    def try_start(self) -> None:
        """Start ahead of the next sample, which will be told when that fails."""
        try:
            self.start()
        except (ConfigError, WorkerError) as error:
            logger.warning("a verifier process cannot be replaced yet: %s", error)

    def grade(
        self, name: str, sample: dict[str, Any], *, control: dict[str, Any] | None = None
    ) -> Outcome:
        """Run one adapter on one sample within the limits; never raises for what they do.

        With a `control`, which the adapter has graded before, a fresh process grades that first:
        when it fails, it is not the sample's doing.
        """
        if control is None:
            return self._grade(name, sample)
        self.stop()
        outcome = self._grade(name, control)
        if outcome.status not in ("scored", "unscorable"):
            reason = f"{outcome.reason}, on a sample that it has graded before"
            status: Literal["lost", "error"] = "lost" if outcome.status == "lost" else "error"
            return replace(outcome, status=status, reason=reason)
        return replace(self._grade(name, sample), is_checked=True)

    def _grade(self, name: str, sample: dict[str, Any]) -> Outcome:
        try:
            self.start()
        except ConfigError as error:  # it loaded when the run began: something else has changed
            return Outcome(name, "error", reason=str(error), cause="end")
        except WorkerError as error:
            return Outcome(name, "lost", reason=str(error), cause="lost")
        outcome = self._exchange(name, sample)
        self._num_samples += 1
        if outcome.status in ("overrun", "error", "lost"):
            self.events[outcome.status] += 1
            if not (outcome.place and self._is_young):
                self.stop()
        elif self._num_samples >= SAMPLES_PER_PROCESS:
            self.stop()
        return outcome

    @property
    def _is_young(self) -> bool:
        """Hardly older than a start takes: an exception is no reason yet for another process."""
        return time.monotonic() - self._started_s < YOUNG_S

    def stop(self) -> None:
        """End the process and whatever it started."""
        if self._lines is not None:
            self._end()

    def _spawn(self) -> Lines:
        """A new process whose keeper has reported; a zygote that cannot is replaced, once."""
        for _ in range(2):
            lines = self._spawner.spawn()
            try:
                self.is_confined = bool(_hear(lines, timeout_s=SPAWN_TIMEOUT_S)["confined"])
            except (EOFError, OSError, FrameError):
                lines.close()
                self._spawner.give_up(lines)
                continue
            return lines
        raise WorkerError(
            "a verifier process must start, but its zygote ended or was silent for "
            f"{SPAWN_TIMEOUT_S:g} s, twice: its errors are in the log of the verifier pool"
        )

    def _await_adapters(self, lines: Lines) -> None:
        names = ",".join(self._config.reward_names)
        deadline = time.monotonic() + self._config.start_timeout_s
        greeting = frames.encode(asdict(self._config), max_bytes=frames.MAX_TASK_BYTES)
        try:
            frames.send(lines.work, greeting, deadline=deadline)
            error = str(_listen(lines, deadline=deadline)["load_error"])
        except (EOFError, OSError, FrameError) as failure:
            what = "did not end" if isinstance(failure, TimeoutError) else "ended the process"
            self.stop()
            raise ConfigError(
                f"--reward-fns must import within {self._config.start_timeout_s:g} s, got {names}, "
                f"whose import {what}: look at what the module does when imported"
            ) from failure
        if error:
            self.stop()
            raise ConfigError(error)

    def _exchange(self, name: str, sample: dict[str, Any]) -> Outcome:
        assert self._lines is not None
        task_id = secrets.token_hex(16)
        deadline = time.monotonic() + self._config.timeout_s
        try:
            data = encode_task(task_id, name, sample)
        except FrameError as error:
            return Outcome(name, "error", reason=f"the sample cannot be sent: {error}", cause="end")
        try:
            frames.send(self._lines.work, data, deadline=deadline)
            return read_answer(
                _listen(self._lines, deadline=deadline), task_id=task_id, adapter=name
            )
        except TimeoutError:
            report = self._end(within_s=self._config.timeout_s)
            return classify_silence(name, report, self._config)
        except (EOFError, OSError):
            return classify_end(name, self._end(grace_s=END_GRACE_S), self._config)
        except FrameError as error:
            reason = f"its process sent what is no answer: {error}"
            return Outcome(name, "error", reason=reason, cause="end")

    def _end(self, *, within_s: float = 0.0, grace_s: float = 0.0) -> dict[str, Any]:
        """End the process; what its keeper reports of it and of its last `within_s` seconds.

        Within `grace_s` it may still end by itself: its exit code says more than any state.
        """
        assert self._lines is not None
        lines, self._lines = self._lines, None
        report: dict[str, Any] = {}
        try:
            ask = {"within_s": within_s, "grace_s": grace_s}
            order = frames.encode(ask, max_bytes=frames.MAX_ANSWER_BYTES)
            deadline = time.monotonic() + END_TIMEOUT_S
            report = self._last_words(lines, order, deadline=deadline)
        except TimeoutError:
            self.events["killed_keeper"] += 1
            self._spawner.kill(lines)
            try:
                self._last_words(lines, b"", deadline=time.monotonic() + END_TIMEOUT_S)
            except TimeoutError:
                self._spawner.give_up(lines)
        lines.close()
        return report

    def _last_words(self, lines: Lines, order: bytes, *, deadline: float) -> dict[str, Any]:
        """The keeper's report, once the keeper has ended; empty when it ended without one."""
        report: dict[str, Any] = {}
        try:
            frames.send(lines.keeper, order, deadline=deadline)
        except TimeoutError:
            raise
        except OSError:  # it has ended already: its report waits to be read all the same
            pass
        try:
            while True:
                report |= frames.receive(
                    lines.keeper, max_bytes=frames.MAX_ANSWER_BYTES, deadline=deadline
                )
        except TimeoutError:
            raise
        except (EOFError, OSError, FrameError):
            return report


def _hear(lines: Lines, *, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    return frames.receive(lines.keeper, max_bytes=frames.MAX_ANSWER_BYTES, deadline=deadline)


def _listen(lines: Lines, *, deadline: float) -> Any:
    """The process' next message; raises EOFError when its keeper has something to say instead."""
    if lines.work.fileno() not in frames.wait(lines.poll, deadline=deadline):
        raise EOFError
    return frames.receive(lines.work, max_bytes=frames.MAX_ANSWER_BYTES, deadline=deadline)
