"""What runs inside a verifier process: its limits, the users' adapters, one sample at a time.

Nothing but plain records leaves the process, see `tasks`.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import socket
import traceback
from collections.abc import Mapping
from numbers import Real
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.verification import family, frames, namespaces
from async_grpo.verification.adapters import Adapter, load_adapters
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.tasks import MAX_REASON_CHARACTERS, answer
from async_grpo.verification.verdict import Outcome

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


def run_adapter(
    name: str,
    adapter: Adapter,
    sample: dict[str, Any],
    config: VerifierConfig,
    *,
    left_out: Mapping[str, str],
) -> Outcome:
    """Grade one sample with one adapter; never raises."""
    try:
        return _read_result(name, adapter(sample), getattr(adapter, "max_reward", 1.0))
    except UnscorableError as error:
        reason = str(error)[:MAX_REASON_CHARACTERS]
        return Outcome(name, "unscorable", format_reward=error.format_reward, reason=reason)
    except MemoryError:
        return Outcome(name, "overrun", reason=f"needs more than {config.memory_mib} MiB")
    except RecursionError:
        return Outcome(name, "overrun", reason="recurses too deeply")
    except BaseException as error:  # the process boundary: classified here, once
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return Outcome(name, "overrun", reason=f"writes more than {config.file_mib} MiB")
        return Outcome(name, "error", reason=_explain(error, sample, left_out))


def _explain(error: BaseException, sample: Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    reason = f"{type(error).__name__}: {error}"[: MAX_REASON_CHARACTERS // 2]
    if isinstance(error, KeyError):  # most often a column that the data does not have
        reason += f" (the sample has {', '.join(sample)})"
        reason += "".join(
            f"; {name} is a {kind}, no plain value" for name, kind in left_out.items()
        )
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{reason} [{os.path.basename(last.filename)}:{last.lineno}]"[:MAX_REASON_CHARACTERS]


def _read_result(name: str, result: object, max_reward: float) -> Outcome:
    if not isinstance(result, Mapping) or "reward" not in result:
        raise TypeError(f"an adapter must return {{'reward': float}}, got {result!r}")
    format_reward = result.get("format_reward")
    return Outcome(
        name,
        "scored",
        reward=_number("reward", result["reward"]),
        format_reward=None if format_reward is None else _number("format_reward", format_reward),
        max_reward=float(max_reward),
    )


def _number(key: str, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"an adapter's {key} must be a finite number, got {value!r}")
    return float(value)
