"""From the name that `--algorithm` gives to the algorithm: shipped ones, modules and files."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from async_grpo.algorithms.base import Algorithm
from async_grpo.algorithms.grpo import Grpo
from async_grpo.algorithms.sft import Sft
from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError

SHIPPED: dict[str, type[Algorithm]] = {"grpo": Grpo, "sft": Sft}


def find_algorithm(config: TrainConfig) -> Algorithm:
    """The run's algorithm, made of its options.

    Raises `ConfigError` for a name that is none, and for options that the algorithm refuses.
    """
    found = SHIPPED.get(config.algorithm) or _load(config.algorithm)
    if not found.learns_from_pairs:
        config.check_sampling()
    return found(config)


def is_shipped(name: str) -> bool:
    """Whether its rules may run in the controller's process."""
    return name in SHIPPED


def source_hash(name: str) -> str:
    """The sha256 of the file of an algorithm that is one; empty for others."""
    place = Path(name.partition(":")[0])
    return hashlib.sha256(place.read_bytes()).hexdigest() if place.suffix == ".py" else ""


def check_source(name: str, sha256: str) -> None:
    """Raise `ConfigError` unless this process reads the file that rank 0 has read."""
    if (found := source_hash(name)) != sha256:
        raise ConfigError(
            f"--algorithm {name} must be the same file everywhere, rank 0's sha256 is {sha256}, "
            f"got {found}: copy the one over the other, and start the run again"
        )


def _load(name: str) -> type[Algorithm]:
    place, _, attribute = name.partition(":")
    if not attribute:
        raise _refused(name, f"there is no algorithm of that name among {', '.join(SHIPPED)}")
    try:
        module = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the user's own code may raise anything
        raise _refused(name, f"{place} cannot be imported: {error!r}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise _refused(name, f"{place} has no class {attribute} derived from Algorithm")
    return found


def _from_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("users_algorithm", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--algorithm must be {', '.join(SHIPPED)}, package.module:Name or path/to/file.py:Name, "
        f"got {name!r}: {reason}"
    )
