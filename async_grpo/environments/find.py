"""From the name that `--environment` gives to the environment: a shipped one, or a user's.

The trainer reads the user's text once, without running it; environment workers run it.
"""

from __future__ import annotations

import importlib
import os
import shlex

from async_grpo.environments.base import Environment
from async_grpo.environments.single_turn import SingleTurn
from async_grpo.errors import ConfigError, WorkerError
from async_grpo.user_code import UserCode, text_of

SHIPPED = {"single_turn": SingleTurn}
AGENT = "agent:"  # and a command: see gateway/agent.py


def users_environment(name: str) -> UserCode | None:
    """The text of the environment of that name; None for a shipped one.

    Raises `ConfigError` for a name that is none.
    """
    if name in SHIPPED:
        return None
    if name.startswith(AGENT):
        return _agent(name)
    return UserCode.read(name, option="--environment", shipped=SHIPPED)


def make_environment(code: UserCode) -> Environment:
    """Import and make it: in the processes of environment workers only.

    Raises `ConfigError` for what is no environment, `WorkerError` for one that fails to be made.
    """
    if code.name.startswith(AGENT):
        code.require_same(_agent(code.name))
        room = importlib.import_module("async_grpo.gateway.agent")  # which is above this one
        made: Environment = room.AgentEnvironment(_words(code.name))
        return made
    environment = code.load(Environment)
    try:
        return environment()
    except Exception as error:  # the user's own code may raise anything
        raise WorkerError(f"environment {code.name} cannot be made: {error!r}") from error


def _agent(name: str) -> UserCode:
    """A command with the texts of its Python files, which must be there wherever it is run."""
    try:
        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in _words(name)]
        texts = [text_of(word) for word in words if word.endswith(".py")]
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f'--environment {AGENT} must name a command, for example "{AGENT}python my_agent.py", '
            f"got {name!r}: {error}"
        ) from error
    return UserCode(AGENT + shlex.join(words), "\n".join(texts))


def _words(name: str) -> list[str]:
    words = shlex.split(name.removeprefix(AGENT))
    if not words:
        raise ValueError("there is none")
    return words
