"""From the name that `--environment` gives to the environment: a shipped one, or a user's.

The trainer reads the user's text once, without running it; environment workers run it.
"""

from __future__ import annotations

import os
import shlex
import traceback
from collections.abc import Iterable
from pathlib import Path

from async_grpo.environments.base import Environment, SingleTurn
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode, hash_imported, text_of

SHIPPED = {"single_turn": SingleTurn}
AGENT, VERIFIERS, OPENENV = "agent:", "verifiers:", "openenv:"
# Names with words behind them, with an example of these; add-ons play them.
HOSTED = {
    AGENT: "python my_agent.py",
    VERIFIERS: "/path/to/its/python TASKSET",
    OPENENV: "http://127.0.0.1:8000",
}


def users_environment(name: str, *, option: str = "--environment") -> UserCode | None:
    """The text of the environment that `option` names; None for a shipped one.

    Raises `ConfigError` for a name that is none.
    """
    if name in SHIPPED:
        return None
    if prefix := _prefix(name):
        return _hosted(name, prefix)
    return UserCode.read(name, option=option, shipped=(*SHIPPED, *HOSTED))


def hash_files(code: UserCode, *, what: str) -> dict[str, str]:
    """`UserCode.hashes`, of a command too: what its files import out of their own folders."""
    if not _prefix(code.name):
        return code.hashes(what)
    found = {what: code.sha256}
    for word in _words(code.name):
        found |= hash_imported(word, what=what) if word.endswith(".py") else {}
    return found


def check_environments(names: Iterable[str]) -> None:
    """Raise `ConfigError` for one that cannot be had."""
    for name in sorted(names):
        code = users_environment(name)
        if code and not _prefix(name):
            code.check_defined()


def grades_itself(name: str) -> bool:
    """Whether the environment of that name asks no reward of the run's, by its text alone."""
    code = users_environment(name)
    if code is None or _prefix(name):
        return _prefix(name) in (VERIFIERS, OPENENV)
    return code.defines("grade") and not code.asks("verify")


def asked_services(name: str) -> tuple[str, ...]:
    """Whom the environment of that name asks as `services["..."]`, by its text alone."""
    code = users_environment(name)
    return () if code is None or _prefix(name) else code.keys_of("services")


def make_environment(code: UserCode) -> Environment:
    """Import and make it: in the processes of environment workers only.

    Raises `ConfigError` for what is no environment, or one that fails to be made.
    """
    if prefix := _prefix(code.name):
        code.require_same(_hosted(code.name, prefix))
        made: Environment = add_on(f"environment.{prefix[:-1]}")(_words(code.name))
        return made
    environment = code.load(Environment)
    try:
        return environment()
    except Exception as error:  # the user's own code may raise anything
        line = code.line_in(traceback.extract_tb(error.__traceback__))
        raise ConfigError(
            f"environment {code.name} cannot be made, {error!r} at {line}: correct it"
        ) from error


def _prefix(name: str) -> str:
    """Of `HOSTED`; empty for other names."""
    return next(filter(name.startswith, HOSTED), "")


def _hosted(name: str, prefix: str) -> UserCode:
    """The words with the texts of those that are files, which must be there wherever it is used."""
    try:
        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in _words(name)]
        texts = [text_of(word) for word in words if word.endswith(".py")]
        texts += [Path(word).read_text("utf-8") for word in words if word.endswith(".toml")]
    except (OSError, SyntaxError, ValueError) as error:
        example = prefix + HOSTED[prefix]
        raise ConfigError(
            f'--environment {prefix} must be followed by words as in "{example}", got {name!r}: '
            f"{error}"
        ) from error
    return UserCode(prefix + shlex.join(words), "\n".join(texts))


def _words(name: str) -> list[str]:
    words = shlex.split(name[len(_prefix(name)) :])
    if not words:
        raise ValueError("there is none")
    return words
