"""Finding reward adapters by name. Used inside verifier processes only: it imports users' code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import run_file, run_module, text_of
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.sources import candidates

Adapter = Callable[[dict[str, Any]], float | Mapping[str, float]]


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
    paths = candidates(source, search_paths)
    for path in paths:
        if path.is_file():
            return path
    looked = ", ".join(dict.fromkeys(map(str, paths)))
    raise ConfigError(f"{option} must name a file that exists, got {source!r}: looked at {looked}")
