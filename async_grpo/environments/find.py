"""From the name that `--environment` gives to the environment: a shipped one, or a user's.

The trainer reads the user's text once, without running it; environment workers run it.
"""

from __future__ import annotations

from async_grpo.environments.base import Environment
from async_grpo.environments.single_turn import SingleTurn
from async_grpo.errors import WorkerError
from async_grpo.user_code import UserCode

SHIPPED = {"single_turn": SingleTurn}


def users_environment(name: str) -> UserCode | None:
    """The text of the environment of that name; None for a shipped one.

    Raises `ConfigError` for a name that is none.
    """
    if name in SHIPPED:
        return None
    return UserCode.read(name, option="--environment", shipped=SHIPPED)


def make_environment(code: UserCode) -> Environment:
    """Import and make it: in the processes of environment workers only.

    Raises `ConfigError` for what is no environment, `WorkerError` for one that fails to be made.
    """
    environment = code.load(Environment)
    try:
        return environment()
    except Exception as error:  # the user's own code may raise anything
        raise WorkerError(f"environment {code.name} cannot be made: {error!r}") from error
