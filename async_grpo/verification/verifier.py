"""What runs inside a verifier process: its limits, the users' adapters, one sample at a time.

Nothing but plain records leaves the process, see `tasks`.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
from collections.abc import Mapping
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.verification import family, frames, namespaces
from async_grpo.verification.adapters import Adapter, load_adapters
from async_grpo.verification.calls import run_adapter
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.tasks import answer

OUR_PIPE = 3
MAX_OPEN_FILES = 1024
MAX_LOAD_ERROR_CHARACTERS = 4000
TIMEOUT_VARIABLE = "ASYNC_GRPO_VERIFIER_TIMEOUT_S"  # for adapters that plan their time
CPU_GRACE_S = 1  # the kernel counts whole seconds


def serve(work: int) -> None:
    """Say what is wrong with the adapters (empty: nothing), then grade until the pool is gone."""
    connection = _leave_family(work)
    config = read_config(frames.receive(connection, max_bytes=frames.MAX_TASK_BYTES))
    _limit(config)
    os.environ[TIMEOUT_VARIABLE] = f"{config.timeout_s:g}"
    adapters, load_error = _load(config)
    _send(connection, {"load_error": load_error[:MAX_LOAD_ERROR_CHARACTERS]})
    while not load_error:
        try:
            task = frames.receive(connection, max_bytes=frames.MAX_TASK_BYTES)
        except EOFError:
            return
        _limit_processor_time(config.timeout_s)
        name, sample = task["adapter"], task["sample"]
        outcome = run_adapter(name, adapters[name], sample, config, left_out=task["left_out"])
        _send(connection, answer(task["id"], outcome))


def read_config(message: Mapping[str, Any]) -> VerifierConfig:
    """The configuration as it went over the pipe: JSON knows lists only."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in message.items()}
    return VerifierConfig(**values)


def _leave_family(work: int) -> socket.socket:
    """Keep no signal, session or descriptor of the zygote but our own pipe."""
    family.forget_children()
    os.setsid()
    namespaces.die_with_parent(signal.SIGKILL)
    namespaces.drop_capabilities(keep=namespaces.FILE_CAPABILITIES)
    os.dup2(work, OUR_PIPE, inheritable=False)
    os.closerange(OUR_PIPE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    return socket.socket(fileno=OUR_PIPE)


def _limit(config: VerifierConfig) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, config.memory_mib << 20),
        (resource.RLIMIT_FSIZE, config.file_mib << 20),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _limit_processor_time(timeout_s: float) -> None:
    """Threads together may use as much as one that never waits; the wall clock is the pool's."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + CPU_GRACE_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _load(config: VerifierConfig) -> tuple[dict[str, Adapter], str]:
    try:
        return load_adapters(config), ""
    except ConfigError as error:
        return {}, str(error)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.settimeout(None)
    connection.sendall(frames.encode(message, max_bytes=frames.MAX_ANSWER_BYTES))
