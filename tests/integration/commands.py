"""Our commands as a user runs them, with everything that they print, ended with their test."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from private_cluster import environment, is_running, sessions_of

REPOSITORY = Path(__file__).parents[2]


class Command:
    """A child in a session of its own; output and errors apart, as they appear."""

    def __init__(self, *arguments, program=sys.executable, cwd=REPOSITORY, env=None):
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._child = subprocess.Popen(
            [program, *map(str, arguments)],
            cwd=cwd,
            env=env or environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()

    @property
    def pid(self):
        return self._child.pid

    @property
    def out(self):
        return _text(self._out)

    @property
    def err(self):
        return _text(self._err)

    def family(self):
        """Process ids of the command and of all that it started outside Ray."""
        return {pid for pid in sessions_of({self._child.pid}) if is_running(pid)}

    def send(self, number):
        self._child.send_signal(number)

    def has_ended(self):
        return self._child.poll() is not None

    def wait(self, *, timeout_s):
        """The exit code; raises with what it printed when it does not end in time."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.out}\n{self.err}") from None

    def wait_for(self, text, *, timeout_s=120):
        """Until `text` was printed; raises with what was printed instead."""
        deadline = time.monotonic() + timeout_s
        while text not in self.out + self.err:
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} in: {self.out}\n{self.err}")
            time.sleep(0.1)


def dispatcher(address, model, *options, env=None):
    """`worker_dispatcher.py`."""
    fixed = ("--model-path", model, "--ray-address", address)
    return Command("worker_dispatcher.py", *fixed, *options, env=env)


def trainer(
    address, model, questions, output, *options, ranks=1, env=None, script="trainer_core.py"
):
    """`trainer_core.py`, or another like it, which starts its `ranks` by itself."""
    run = of_a_run(address, model, questions, output)
    return Command(script, "--nproc-per-node", ranks, *run, *options, env=env)


def under_torchrun(address, model, questions, output, *options, ranks):
    """The same where torchrun starts the ranks."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    run = of_a_run(address, model, questions, output)
    return Command(*torchrun, "trainer_core.py", *run, *options)


def of_a_run(address, model, questions, output):
    """Options of a small run."""
    return (
        *("--model-name-or-path", model, "--data-path", questions),
        *("--output-dir", output, "--ray-address", address, "--batch-size", 4),
        *("--samples-per-question", 4, "--max-generation-tokens", 16, "--max-tokens-per-gpu", 512),
        *("--trackers", ""),
    )


def wait_until(condition, *, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def _text(file):
    return os.pread(file.fileno(), 1 << 22, 0).decode(errors="replace")
