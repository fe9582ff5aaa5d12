"""From the name that `--environment` gives to the environment: shipped ones, modules and files.

The trainer reads the text of a user's environment once, without running it. Workers import it, and
refuse to when theirs is another.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import tokenize
from pathlib import Path
from types import ModuleType

from async_grpo.environments.base import Environment
from async_grpo.environments.single_turn import SingleTurn
from async_grpo.errors import ConfigError, WorkerError
from async_grpo.types import EnvironmentSource

SHIPPED = {"single_turn": SingleTurn}


def read_source(name: str) -> EnvironmentSource | None:
    """The text of the environment of that name; None for a shipped one.

    Raises `ConfigError` for a name that is none.
    """
    if name in SHIPPED:
        return None
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise _refused(name, "there is no environment of that name")
    try:
        return EnvironmentSource(name, _text(_file_of(place)))
    except (OSError, SyntaxError, ImportError, ValueError) as error:
        raise _refused(name, f"{place} cannot be read: {error}") from error


def load_environment(source: EnvironmentSource) -> Environment:
    """Import and make it: in the processes of environment workers only.

    Raises `WorkerError` for what cannot be imported, or is another text than the trainer's.
    """
    place, _, attribute = source.name.rpartition(":")
    try:
        module = _run_text(place, source.text) if place.endswith(".py") else _own(source, place)
        made = getattr(module, attribute)()
    except WorkerError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise WorkerError(f"environment {source.name} cannot be made: {error!r}") from error
    if not isinstance(made, Environment):
        raise WorkerError(f"environment {source.name} must be derived from Environment: it is not")
    return made


def _file_of(place: str) -> str:
    if place.endswith(".py"):
        return place
    spec = importlib.util.find_spec(place)
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {place}")
    return spec.origin


def _text(path: str) -> str:
    with tokenize.open(path) as file:  # in the encoding that the file declares
        return file.read()


def _own(source: EnvironmentSource, place: str) -> ModuleType:
    here = EnvironmentSource(source.name, _text(_file_of(place)))
    if here.digest != source.digest:
        raise WorkerError(
            f"environment {source.name} must be the trainer's ({source.digest}), got "
            f"{here.digest} on this node: install the same files"
        )
    return importlib.import_module(place)


def _run_text(path: str, text: str) -> ModuleType:
    """A module made of the text that the trainer has read, wherever this process runs."""
    module = ModuleType(Path(path).stem)
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--environment must be {', '.join(SHIPPED)}, package.module:Name or "
        f"path/to/file.py:Name, got {name!r}: {reason}"
    )
