"""Load the reward adapters in a fork server, and run one on the samples of a request in its child.

Only verifier processes import this module: it imports users' code, the reward adapters, by name.
A child sends plain records and nothing else, see `tasks`.
"""

from __future__ import annotations

import errno
import functools
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
from types import ModuleType
from typing import TYPE_CHECKING, Any

from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode, run_file, run_module, split_arguments, text_of
from async_grpo.verification.config import MAX_PROCESSES, VerifierConfig, candidates, path_of
from async_grpo.verification.graders import SHIPPED, TIMEOUT_VARIABLE, UnscorableError
from async_grpo.verification.jail import limit
from async_grpo.verification.tasks import MAX_REASON_CHARACTERS, Outcome, encode_answer, overrun

if TYPE_CHECKING:  # without numpy a fork server is small, and each fork is quick
    from async_grpo.types import FailureCause

JAILER = "async_grpo.verification.jailer"
MAX_LOAD_ERROR_CHARACTERS = 4000
MAX_OPEN_FILES = 1024
NUM_REHEARSALS = 50  # calls after which Python has specialised a function, for all forked children
CONNECTION_ERRNOS = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
# Exceptions of these libraries mean that another machine failed; they may not be installed here.
CLIENT_LIBRARIES = frozenset(
    {"aiohttp", "anthropic", "botocore", "grpc", "http", "httpcore", "httpcore2", "httpx", "httpx2"}
    | {"openai", "redis", "requests", "socket", "ssl", "urllib", "urllib3", "websockets"}
)
Adapter = Callable[[Any], Any]  # of a sample, or, if it is groupwise, of a list of them


def load(config: VerifierConfig) -> tuple[dict[str, Adapter], dict[str, object]]:
    """Import the adapters of a fork server; return them and the greeting to its pool.

    The limits of memory and file size hold from before the import until the server ends.
    """
    limit(resource.RLIMIT_AS, config.memory_mib << 20)
    limit(resource.RLIMIT_FSIZE, config.file_mib << 20)
    limit(resource.RLIMIT_CORE, 0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each running child takes two
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
        (outcome,) = run_adapter("", lambda sample: {"reward": 0.0}, [{}], config, left_out={})
        encode_answer("", outcome)
    # If the shipped graders are not imported yet, none is used: their import takes long.
    ours = getattr(sys.modules.get(SHIPPED), "SHIPPED", {}).values()
    jailer = sys.modules.get(JAILER)
    return adapters, {
        "load_error": "",
        "shipped": [name for name, adapter in adapters.items() if adapter in ours],
        "groupwise": [name for name, adapter in adapters.items() if is_groupwise(adapter)],
        "executing": [n for n, a in adapters.items() if getattr(a, "executes_text", False)],
        "confinement": jailer.confinement() if jailer else {},
    }


def is_groupwise(adapter: Adapter) -> bool:
    """Whether the adapter grades all outputs of a question in one call."""
    return bool(getattr(adapter, "groupwise", False))


def load_adapters(config: VerifierConfig) -> dict[str, Adapter]:
    """Import the adapters that the run names; raises `ConfigError` for one that is not usable.

    An adapter's attribute `prepare` is called once in each process, and may raise `ConfigError`.
    """
    for folder in reversed(config.search_paths):
        sys.path.insert(0, folder)
    adapters = {name: _load_adapter(name, config) for name in config.reward_names}
    for adapter in adapters.values():
        getattr(adapter, "prepare", lambda: None)()
    return adapters


def _load_adapter(name: str, config: VerifierConfig) -> Adapter:
    called, arguments = split_arguments(name)
    source, colon, function = called.rpartition(":")
    if not colon:
        return _from_registry(name, config)
    module = _load_module(source, config, option="--reward-fns")
    adapter = getattr(module, function, None)
    if not callable(adapter):
        raise ConfigError(
            f"--reward-fns must name a function, got {name!r}: {source} has no {function!r}"
        )
    if inspect.iscoroutinefunction(adapter):
        raise ConfigError(
            f"--reward-fns must be plain functions, got {name!r}, asynchronous: name it by "
            "--environment, for it runs in workers of --mode environment"
        )
    if not arguments:
        return adapter
    code = UserCode(called, "", arguments)
    code.check_arguments(inspect.signature(adapter), num_given=1)
    bound = functools.partial(adapter, **code.values)
    return functools.update_wrapper(bound, adapter)  # with `prepare`, `max_reward` and the like


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
    """Import a module; if the dispatcher has read its text, run that text."""
    text = config.sources.get(source)
    try:
        if source.endswith(".py"):
            if not (path := path_of(source, config.search_paths)):
                looked = dict.fromkeys(map(str, candidates(source, config.search_paths)))
                raise ConfigError(
                    f"{option} must name a file that exists, got {source!r}: looked at "
                    f"{', '.join(looked)}"
                )
            return run_file(str(path), text_of(str(path)) if text is None else text)
        spec = importlib.util.find_spec(source)
        if text is None or spec is None or source in sys.modules:
            return importlib.import_module(source)
        return run_module(spec, text)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the boundary of users' code: it may raise anything
        raise ConfigError(
            f"{option} names {source!r}, which cannot be imported "
            f"({type(error).__name__}: {error}): correct it or the name"
        ) from error


def grade(
    adapters: Mapping[str, Adapter], config: VerifierConfig, request: Mapping[str, Any]
) -> Iterator[bytes]:
    """Run an adapter on samples of one group, in a child; yield the answers as bytes for its pipe.

    The child stops before its next sample once it has run for as long as one sample may take.
    """
    # The limit must be hard, as the first process of a pid namespace ignores SIGXCPU, so it cannot
    # be raised for the next sample: it bounds the child's last one, and the server limits each.
    limit(resource.RLIMIT_CPU, math.ceil(2 * config.timeout_s) + 1)  # the kernel counts roughly
    limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    name, ends_at = request["adapter"], time.monotonic() + config.timeout_s
    given = request["tasks"]
    for tasks in [given] if is_groupwise(adapters[name]) else [[task] for task in given]:
        task_ids, samples, left_out = zip(*tasks, strict=True)
        outcomes = run_adapter(name, adapters[name], samples, config, left_out=left_out[0])
        yield b"".join(map(encode_answer, task_ids, outcomes))
        if time.monotonic() > ends_at:
            return


def run_adapter(
    name: str,
    adapter: Adapter,
    samples: Sequence[dict[str, object]],
    config: VerifierConfig,
    *,
    left_out: Mapping[str, str],
) -> list[Outcome]:
    """Grade one sample, or with a groupwise adapter those of one question; never raises.

    One call grades all samples, and fails for all. A groupwise adapter may return an
    `UnscorableError` as the result of a sample that holds no answer.
    """
    together = is_groupwise(adapter)
    try:
        results = list(adapter(list(samples))) if together else [adapter(samples[0])]
        if len(results) != len(samples):
            raise TypeError(
                f"a groupwise adapter must return {len(samples)} results, a sample each, it "
                f"returned {len(results)}"
            )
        most = getattr(adapter, "max_reward", 1.0)
        return [
            _unscorable(name, result)
            if together and isinstance(result, UnscorableError)
            else _read_result(name, result, most)
            for result in results
        ]
    except BaseException as error:  # the process boundary: classified here, once
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
    """The outcome of a sample on which the adapter raised an exception."""
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
    """Whether the exception, or one in its chain of causes, is of a connection.

    >>> cause_of(ConnectionRefusedError()), cause_of(FileNotFoundError(2, "no such file"))
    ('connection', 'exception')
    """
    while True:
        is_network = isinstance(error, OSError) and error.errno in CONNECTION_ERRNOS
        libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        is_network |= isinstance(error, ConnectionError | TimeoutError)
        if is_network or libraries & CLIENT_LIBRARIES:
            return "connection"
        if error.__cause__ is None:
            return "exception"
        error = error.__cause__


def _line(error: BaseException, adapter: Adapter) -> str:
    """The deepest line in the adapter's own file; its first, if its result is what is wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(adapter), "__code__", None)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    if code and not own:
        return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    frame = (own or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _explain(error: BaseException, sample: Iterable[str], left_out: Mapping[str, str]) -> str:
    reason = f"{type(error).__name__}: {error}"[: MAX_REASON_CHARACTERS // 2]
    if isinstance(error, KeyError):  # most often of a column that the data does not have
        reason += f" (the sample has {', '.join(sample)})"
        reason += "".join(
            f"; {name} is a {kind}, no plain value" for name, kind in left_out.items()
        )
    return reason


def _read_result(name: str, result: object, max_reward: float) -> Outcome:
    """The outcome from a dict with a reward, or from the reward alone; raises TypeError."""
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
    """A Python number or boolean, or a scalar of numpy or torch, as a float; raises TypeError."""
    if getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"an adapter's {key} must be a finite number, got {value!r}")
    return float(value)
