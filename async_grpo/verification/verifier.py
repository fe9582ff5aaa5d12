"""What a fork server loads, and what a child of it does with one request.

Used inside verifier processes only: it imports users' code, the reward adapters, by their names.
Nothing but plain records leaves the child, see `tasks`.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import inspect
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import run_file, run_module, text_of
from async_grpo.verification.config import (
    MAX_OPEN_FILES,
    MAX_PROCESSES,
    SHIPPED,
    TIMEOUT_VARIABLE,
    VerifierConfig,
    candidates,
    path_of,
)
from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.jail import limit
from async_grpo.verification.tasks import MAX_REASON_CHARACTERS, Outcome, encode_answer, overrun

if TYPE_CHECKING:  # a fork server holds no arrays: a fork costs what its parent holds
    from async_grpo.types import FailureCause

JAILER = "async_grpo.verification.jailer"
MAX_LOAD_ERROR_CHARACTERS = 4000
NUM_REHEARSALS = 50  # Python makes code faster that has run so often: no child must do so again
CONNECTION_ERRNOS = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
# Whose exceptions tell of somebody else's machine; they need not be installed here.
CLIENT_LIBRARIES = frozenset(
    {"aiohttp", "anthropic", "botocore", "grpc", "http", "httpcore", "httpcore2", "httpx", "httpx2"}
    | {"openai", "redis", "requests", "socket", "ssl", "urllib", "urllib3", "websockets"}
)
Adapter = Callable[[dict[str, object]], float | Mapping[str, float]]


def load(config: VerifierConfig) -> tuple[dict[str, Adapter], dict[str, object]]:
    """The adapters of a fork server, and what it tells its pool of them.

    They are imported within the limits that they work in, which the server keeps.
    """
    limit(resource.RLIMIT_AS, config.memory_mib << 20)
    limit(resource.RLIMIT_FSIZE, config.file_mib << 20)
    limit(resource.RLIMIT_CORE, 0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # two for each child at a time
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ[TIMEOUT_VARIABLE] = f"{config.timeout_s:g}"
    if config.unconfined_code:
        from async_grpo.verification.jailer import allow_unconfined

        allow_unconfined()
    try:
        adapters = load_adapters(config)
    except ConfigError as error:
        return {}, {"load_error": str(error)[:MAX_LOAD_ERROR_CHARACTERS]}
    for _ in range(NUM_REHEARSALS):
        outcome = run_adapter("", lambda sample: {"reward": 0.0}, {}, config, left_out={})
        encode_answer("", outcome)
    # Ours are known without importing them, which takes long.
    ours = getattr(sys.modules.get(SHIPPED), "SHIPPED", {}).values()
    shipped = [name for name, adapter in adapters.items() if adapter in ours]
    groupwise = [name for name, adapter in adapters.items() if _is(adapter, "groupwise")]
    executing = [name for name, adapter in adapters.items() if _is(adapter, "executes_text")]
    jailer = sys.modules.get(JAILER)
    found = {"shipped": shipped, "groupwise": groupwise, "executing": executing}
    found |= {"confinement": jailer.confinement() if jailer else {}}
    return adapters, {"load_error": "", **found}


def _is(adapter: Adapter, kind: Literal["groupwise", "executes_text"]) -> bool:
    """Whether it grades all outputs of a question in one call; runs what the model wrote."""
    return bool(getattr(adapter, kind, False))


def load_adapters(config: VerifierConfig) -> dict[str, Adapter]:
    """The adapters that the run names, by name; raises `ConfigError` for one that cannot be had.

    An adapter's attribute `prepare` is called once in each process, and may raise `ConfigError`.
    """
    for folder in reversed(config.search_paths):
        sys.path.insert(0, folder)
    adapters = {name: _load_adapter(name, config) for name in config.reward_names}
    for adapter in adapters.values():
        getattr(adapter, "prepare", lambda: None)()
    return adapters


def _load_adapter(name: str, config: VerifierConfig) -> Adapter:
    source, colon, function = name.rpartition(":")
    if not colon:
        return _from_registry(name, config)
    module = _load_module(source, config, option="--reward-fns")
    adapter = getattr(module, function, None)
    if not callable(adapter):
        raise ConfigError(
            f"--reward-fns must name a function, got {name!r}: {source} has no {function!r}"
        )
    return adapter


def _from_registry(name: str, config: VerifierConfig) -> Adapter:
    module = _load_module(config.registry, config, option="--reward-registry")
    registered = getattr(module, "REWARD_ADAPTERS", None)
    if not isinstance(registered, Mapping):
        raise ConfigError(
            f"--reward-registry must hold a dict REWARD_ADAPTERS, {config.registry!r} has none: "
            "see reward_registry.py of async-grpo for an example"
        )
    adapters = {key.value if isinstance(key, Enum) else key: registered[key] for key in registered}
    if not callable(adapters.get(name)):
        raise ConfigError(
            f"--reward-fns must be adapters of {config.registry}, got {name!r}: choose from "
            f"{', '.join(sorted(map(str, adapters)))}, or give path/to/file.py:function"
        )
    return adapters[name]


def _load_module(source: str, config: VerifierConfig, *, option: str) -> ModuleType:
    """The module, run from the text that the dispatcher has read, if it has found one."""
    text = config.sources.get(source)
    try:
        if source.endswith(".py"):
            path = str(_find_file(source, option=option, search_paths=config.search_paths))
            return run_file(path, text_of(path) if text is None else text)
        spec = importlib.util.find_spec(source)
        if text is None or spec is None or source in sys.modules:
            return importlib.import_module(source)
        return run_module(spec, text)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # users' code: whatever it raises is told, once
        raise ConfigError(
            f"{option} names {source!r}, which cannot be imported "
            f"({type(error).__name__}: {error}): correct it or the name"
        ) from error


def _find_file(source: str, *, option: str, search_paths: tuple[str, ...]) -> Path:
    if path := path_of(source, search_paths):
        return path
    looked = ", ".join(dict.fromkeys(map(str, candidates(source, search_paths))))
    raise ConfigError(f"{option} must name a file that exists, got {source!r}: looked at {looked}")


def grade(
    adapters: Mapping[str, Adapter], config: VerifierConfig, request: Mapping[str, Any]
) -> Iterator[bytes]:
    """Run an adapter on samples of one group, in a child: the answers as its pipe carries them.

    A child ends early when all that it has done took as long as one sample may.
    """
    # A hard limit, for a namespace's first process ignores SIGXCPU, cannot be raised for the next
    # sample: it is for a child that is on its last one, and the server limits each sample.
    limit(resource.RLIMIT_CPU, math.ceil(2 * config.timeout_s) + 1)  # it is counted roughly
    limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    name, ends_at = request["adapter"], time.monotonic() + config.timeout_s
    if _is(adapters[name], "groupwise"):
        task_ids, samples, left_out = zip(*request["tasks"], strict=True)
        outcomes = run_groupwise(name, adapters[name], samples, config, left_out=left_out[0])
        yield b"".join(map(encode_answer, task_ids, outcomes))
        return
    for task_id, sample, left_out in request["tasks"]:
        outcome = run_adapter(name, adapters[name], sample, config, left_out=left_out)
        yield encode_answer(task_id, outcome)
        if time.monotonic() > ends_at:
            return


def run_adapter(
    name: str,
    adapter: Adapter,
    sample: dict[str, object],
    config: VerifierConfig,
    *,
    left_out: Mapping[str, str],
) -> Outcome:
    """Grade one sample with one adapter; never raises."""
    try:
        return _read_result(name, adapter(sample), getattr(adapter, "max_reward", 1.0))
    except BaseException as error:  # the process boundary: classified here, once
        return _failed(name, adapter, error, sample, config, left_out=left_out)


def run_groupwise(
    name: str,
    adapter: Any,  # a groupwise one
    samples: Sequence[dict[str, object]],
    config: VerifierConfig,
    *,
    left_out: Mapping[str, str],
) -> list[Outcome]:
    """Grade the samples of one question in one call, which fails for all; never raises.

    A result may be an `UnscorableError`: of a sample that holds no answer.
    """
    try:
        results = list(adapter(list(samples)))
        if len(results) != len(samples):
            raise TypeError(
                f"a groupwise adapter must return {len(samples)} results, a sample each, it "
                f"returned {len(results)}"
            )
        most = getattr(adapter, "max_reward", 1.0)
        return [
            _unscorable(name, result)
            if isinstance(result, UnscorableError)
            else _read_result(name, result, most)
            for result in results
        ]
    except BaseException as error:  # the process boundary, as above
        failed = _failed(name, adapter, error, samples[0], config, left_out=left_out)
        return [failed] * len(samples)


def _unscorable(name: str, error: UnscorableError) -> Outcome:
    reason = str(error)[:MAX_REASON_CHARACTERS]
    return Outcome(name, "unscorable", format_reward=error.format_reward, reason=reason)


def _failed(
    name: str,
    adapter: Adapter,
    error: BaseException,
    sample: Mapping[str, object],
    config: VerifierConfig,
    *,
    left_out: Mapping[str, str],
) -> Outcome:
    """What an adapter's exception says of a sample."""
    if isinstance(error, UnscorableError):
        return _unscorable(name, error)
    if isinstance(error, MemoryError):
        return overrun(name, f"needs more than {config.memory_limit}")
    if isinstance(error, RecursionError):
        return overrun(name, "recurses too deeply")
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return overrun(name, f"writes more than {config.file_mib} MiB")
    if isinstance(error, BlockingIOError):  # of a fork
        return overrun(name, f"starts more than {MAX_PROCESSES} processes")
    line = _line(error, adapter)
    room = MAX_REASON_CHARACTERS - len(line) - 3
    reason = f"{_explain(error, sample, left_out)[:room]} [{line}]"
    place = f"{type(error).__name__} {line}"[:MAX_REASON_CHARACTERS]
    return Outcome(name, "error", reason=reason, cause=cause_of(error), place=place)


def cause_of(error: BaseException) -> FailureCause:
    """Whether it tells of a connection, itself or what it was raised from.

    >>> cause_of(ConnectionRefusedError()), cause_of(FileNotFoundError(2, "no such file"))
    ('connection', 'exception')
    """
    while True:
        is_network = isinstance(error, OSError) and error.errno in CONNECTION_ERRNOS
        libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if is_network or isinstance(error, (ConnectionError, TimeoutError)):
            return "connection"
        if libraries & CLIENT_LIBRARIES:
            return "connection"
        if error.__cause__ is None:
            return "exception"
        error = error.__cause__


def _line(error: BaseException, adapter: Adapter) -> str:
    """The deepest line of the adapter's own file; where it begins, when what it returned is bad."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(adapter), "__code__", None)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    if code and not own:
        return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    frame = (own or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _explain(error: BaseException, sample: Iterable[str], left_out: Mapping[str, str]) -> str:
    reason = f"{type(error).__name__}: {error}"[: MAX_REASON_CHARACTERS // 2]
    if isinstance(error, KeyError):  # most often a column that the data does not have
        reason += f" (the sample has {', '.join(sample)})"
        reason += "".join(
            f"; {name} is a {kind}, no plain value" for name, kind in left_out.items()
        )
    return reason


def _read_result(name: str, result: object, max_reward: float) -> Outcome:
    """A dict with a reward, or the reward alone."""
    parts = result if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in parts:
        raise TypeError(f"an adapter's dict must have a 'reward', got {result!r}")
    format_reward = parts.get("format_reward")
    return Outcome(
        name,
        "scored",
        reward=_number("reward", parts["reward"]),
        format_reward=None if format_reward is None else _number("format_reward", format_reward),
        max_reward=float(max_reward),
    )


def _number(key: str, value: object) -> float:
    """Of a Python number or boolean, or of numpy's and torch's scalars."""
    if getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"an adapter's {key} must be a finite number, got {value!r}")
    return float(value)
