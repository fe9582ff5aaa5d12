"""Asks a run's actors what they do, from a driver in a process of its own.

A lost cluster ends a Ray driver as it likes; this one may end, the measurement may not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from async_grpo.config.roles import GENERATION, REFERENCE, VERIFIER

START_TIMEOUT_S = 90.0
ASK_TIMEOUT_S = 5.0
CONTROLLER = "the controller"


class Probe:
    """One question, one line of JSON; a probe that does not answer is replaced."""

    def __init__(self, address: str, *, namespace: str, environment: Mapping[str, str]) -> None:
        self._line = [sys.executable, "-m", "faults.probe", address, namespace]
        self._environment = dict(environment)
        self._child: subprocess.Popen[str] | None = None

    def status(self) -> dict[str, Any]:
        """Of the pipeline; empty while there is no run, or the controller does not answer."""
        return self._ask("status")

    def fenced(self) -> dict[str, str]:
        """Workers that were fenced, with the reason."""
        return self._ask("fenced")

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _ask(self, question: str) -> dict[str, Any]:
        try:
            if self._child is None:
                self._child = self._start()
            assert self._child.stdin is not None
            self._child.stdin.write(question + "\n")
            self._child.stdin.flush()
            return dict(json.loads(self._receive(self._child, timeout_s=ASK_TIMEOUT_S + 2)))
        except (OSError, TimeoutError, ValueError):
            self.close()
            return {}

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            self._line, env=self._environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._child = child
        self._receive(child, timeout_s=START_TIMEOUT_S)
        return child

    @staticmethod
    def _receive(child: subprocess.Popen[str], *, timeout_s: float) -> str:
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError
        return child.stdout.readline()


def _status() -> dict[str, Any]:
    from async_grpo.cluster.cluster import Cluster

    controller = Cluster().find_actor("controller")
    if controller is None:
        return {}
    run = Cluster().wait(controller.current_run.remote(), timeout_s=ASK_TIMEOUT_S, who=CONTROLLER)
    if run is None:
        return {}
    status = Cluster().wait(controller.status.remote(run), timeout_s=ASK_TIMEOUT_S, who=CONTROLLER)
    return dataclasses.asdict(status) | {"workers": dict(status.workers)}


def _fenced() -> dict[str, str]:
    from async_grpo.cluster.cluster import Cluster

    controller = Cluster().find_actor("controller")
    if controller is None:
        return {}
    calls = [controller.fenced.remote(role) for role in (GENERATION, REFERENCE, VERIFIER)]
    found: dict[str, str] = {}
    for call in calls:
        found |= Cluster().wait(call, timeout_s=ASK_TIMEOUT_S, who=CONTROLLER)
    return found


def main(address: str, namespace: str) -> None:
    """Answer each line of the input with a line of JSON; {} when nobody can be asked."""
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.util.errors import AsyncGrpoError

    Cluster.join(address, namespace=namespace)
    answers = {"status": _status, "fenced": _fenced}
    print(json.dumps("connected"), flush=True)
    for line in sys.stdin:
        try:
            answer = answers[line.strip()]()
        except AsyncGrpoError:
            answer = {}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
