"""Finds the environment that `--environment` names: a shipped one, or a user's.

The trainer reads the text of the user's code, without running it; environment workers run it.
"""

from __future__ import annotations

import functools
import inspect
import os
import shlex
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from async_grpo.environments.base import Environment, GradedTurn, SingleTurn
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import ConfigError
from async_grpo.util.ports import LOOPBACK, is_here
from async_grpo.util.user_code import UserCode, hash_imported, split_arguments, text_of

SHIPPED = {"single_turn": SingleTurn}
GRADED_BY = 3  # arguments that an asynchronous reward is given: question, episode, services
AGENT, VERIFIERS, OPENENV = "agent:", "verifiers:", "openenv:"
# Prefixes of names that add-ons play, each with an example of the words that follow it.
HOSTED = {
    AGENT: "python my_agent.py",  # or a URL, see `agent_address`
    VERIFIERS: "/path/to/its/python TASKSET",
    OPENENV: "http://127.0.0.1:8000",
}


def users_environment(name: str, *, option: str = "--environment") -> UserCode | None:
    """The code of the environment that `option` names; None for a shipped one.

    Raises `ConfigError` for a name without an environment.
    """
    if name in SHIPPED:
        return None
    if prefix := _prefix(name):
        return _hosted(name, prefix)
    code = UserCode.read(name, option=option, shipped=(*SHIPPED, *HOSTED))
    if code.is_function:
        raise ConfigError(
            f"{option} must be a class, or an `async def` reward, got the plain function {name}: "
            "name it in --reward-fns, or have it await a service"
        )
    code.check_arguments(num_given=GRADED_BY if code.is_coroutine else 0)
    return code


def hash_files(code: UserCode, *, what: str) -> dict[str, str]:
    """`UserCode.hashes`; for a command, of its files and what they import from their folders."""
    if not _prefix(code.name):
        return code.hashes(what)
    found = {what: code.sha256}
    for word in _words(code.name):
        found |= hash_imported(word, what=what) if word.endswith(".py") else {}
    return found


def check_environments(names: Iterable[str]) -> None:
    """Raise `ConfigError` for a name without an environment."""
    for name in sorted(names):
        code = users_environment(name)
        if code and not _prefix(name):
            code.check_defined()


def grades_itself(name: str) -> bool:
    """Whether the environment of that name needs no reward function, judged by its text."""
    code, prefix = users_environment(name), _prefix(name)
    if code is None or prefix in (VERIFIERS, OPENENV):
        return code is not None
    if prefix == AGENT:
        return agent_address(_words(name)) is not None
    return (code.defines("grade") or code.is_coroutine) and not code.asks("verify")


def asked_services(name: str) -> tuple[str, ...]:
    """The names that the environment uses as `services["..."]`, judged by its text."""
    code = users_environment(name)
    return () if code is None or _prefix(name) else code.keys_of("services")


def agent_address(words: Sequence[str]) -> tuple[str, str] | None:
    """The URL of an agent served elsewhere, and where gateways listen; None: words of a command.

    Raises `ValueError` for an agent that could not reach a gateway.

    >>> agent_address(["https://agents:8000/run", "--listen", "0.0.0.0"])
    ('https://agents:8000/run', '0.0.0.0')
    """
    if not words or not words[0].startswith(("http://", "https://")):
        return None
    url, *more = words
    host = urlsplit(url).hostname
    if not host or len(more) not in (0, 2) or more[:1] not in ([], ["--listen"]):
        raise ValueError(f"after a URL may stand --listen and an address, got {' '.join(words)}")
    listens = more[1] if more else LOOPBACK
    if listens == LOOPBACK and not is_here(url):
        raise ValueError(
            f"an agent on {host} cannot reach gateways that listen on {LOOPBACK}: add `--listen "
            "0.0.0.0` (every interface) or the workers' own address behind the URL"
        )
    return url, listens


def make_environment(code: UserCode) -> Environment:
    """Import the class, or the reward, and make its object; called in environment workers only.

    Raises `ConfigError` for a class that is no environment, or that cannot be made.
    """
    if prefix := _prefix(code.name):
        code.require_same(_hosted(code.name, prefix))
        return add_on(f"environment.{prefix[:-1]}")(_words(code.name))
    if inspect.iscoroutinefunction(reward := code.run()):
        code.check_arguments(inspect.signature(reward), num_given=GRADED_BY)
        bound = functools.update_wrapper(functools.partial(reward, **code.values), reward)
        return GradedTurn(bound, name=code.name.rpartition(":")[2])
    environment = code.load(Environment)
    try:
        return code.make(environment)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        line = code.line_in(traceback.extract_tb(error.__traceback__))
        raise ConfigError(
            f"environment {code.name} cannot be made, {error!r} at {line}: correct it"
        ) from error


def _prefix(name: str) -> str:
    """The one in `HOSTED` that begins the name; empty: none."""
    return next(filter(name.startswith, HOSTED), "")


def _hosted(name: str, prefix: str) -> UserCode:
    """The words after the prefix, and the texts of the files among them.

    Raises `ConfigError` if there are no words, or a file cannot be read on this machine.
    """
    if arguments := split_arguments(name)[1]:
        raise ConfigError(
            f"--environment {prefix} must be followed by words, got the arguments ({arguments}) "
            "too: write them as words of its command"
        )
    try:
        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in _words(name)]
        if prefix == AGENT and agent_address(words):
            return UserCode(prefix + shlex.join(words), "")
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
