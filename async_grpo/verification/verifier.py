"""What runs inside a verifier process: its limits, the users' adapters, one sample at a time.

Nothing but plain records leaves the process: an exception of a user's class might not unpickle.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.verification.adapters import Adapter, load_adapters
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.verdict import Outcome

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
MAX_REASON_CHARACTERS = 500
PR_SET_PDEATHSIG = 1


def serve(connection: Connection, config: VerifierConfig) -> None:
    """Say what is wrong with the adapters (empty: nothing), then grade until the pool is gone."""
    _confine(memory_mib=config.memory_mib)
    adapters, load_error = _load(config)
    connection.send(load_error)
    while not load_error:
        try:
            name, sample = connection.recv()
        except EOFError:
            return
        connection.send(run_adapter(name, adapters[name], sample, memory_mib=config.memory_mib))


def _confine(*, memory_mib: int) -> None:
    multiprocessing.current_process().daemon = False  # adapters may start processes
    os.setsid()  # which are killed with this group; Ctrl-C is not for it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives the pool
    limit_bytes = memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    for name in list(os.environ):
        if any(word in name.upper() for word in SECRET_WORDS):
            del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the pool is parallel already


def _load(config: VerifierConfig) -> tuple[dict[str, Adapter], str]:
    try:
        return load_adapters(config), ""
    except ConfigError as error:
        return {}, str(error)


def run_adapter(name: str, adapter: Adapter, sample: dict[str, Any], *, memory_mib: int) -> Outcome:
    """Grade one sample with one adapter; never raises."""
    try:
        return _read_result(name, adapter(sample), getattr(adapter, "max_reward", 1.0))
    except UnscorableError as error:
        reason = str(error)[:MAX_REASON_CHARACTERS]
        return Outcome(name, "unscorable", format_reward=error.format_reward, reason=reason)
    except MemoryError:
        return Outcome(name, "overrun", reason=f"needs more than {memory_mib} MiB")
    except RecursionError:
        return Outcome(name, "overrun", reason="recurses too deeply")
    except BaseException as error:  # the process boundary: classified here, once
        return Outcome(name, "error", reason=_explain(error, sample)[:MAX_REASON_CHARACTERS])


def _explain(error: BaseException, sample: Mapping[str, Any]) -> str:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, KeyError):  # most often a column that the data does not have
        reason += f" (the sample has {', '.join(map(str, sample))})"
    return reason


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
