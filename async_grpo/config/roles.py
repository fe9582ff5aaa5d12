"""The roles of workers: the only place that knows their names."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode, split_arguments

GENERATION = "generation"
REFERENCE = "reference"
VERIFIER = "verifier"
ENVIRONMENT = "environment"
TEACHER = "teacher"
JUDGE = "judge"
REWARD = "reward"  # the --mode of a sequence classifier, which is a service
SERVICE = "service"  # a class of the user, named in place of a mode
LOGPROB = "logprob"  # the --mode of reference workers, as in the predecessor
MODES = (GENERATION, LOGPROB, TEACHER, VERIFIER, ENVIRONMENT, JUDGE, REWARD)  # of a dispatcher
ENGINES = (GENERATION, JUDGE, REWARD)  # the modes whose workers are engines of vLLM

# `policy`: the newest weights, each batch. `reference`: those of the first or of a later batch.
# `own`: the weights that the worker was started with. `none`: the worker has no weights.
Follows = Literal["policy", "reference", "own", "none"]


@dataclass(frozen=True, slots=True)
class Role:
    """What the workers of one registry do."""

    name: str
    unit: str  # in which the cost of its work is counted
    follows: Follows  # whose weights it serves

    @property
    def loads_weights(self) -> bool:
        """Whether the trainer publishes weights to these workers."""
        return self.follows in ("policy", "reference")


_ROLES = (
    Role(GENERATION, "sequences", "policy"),
    Role(REFERENCE, "tokens", "reference"),
    Role(VERIFIER, "texts", "none"),
    Role(ENVIRONMENT, "episodes", "none"),
)


def teacher(name: str) -> str:
    """Name of the role whose workers serve one teacher."""
    return f"{TEACHER}:{name}"


def judge(name: str) -> str:
    """Name of the role whose workers serve one judge, which environments ask."""
    return f"{JUDGE}:{name}"


def service(name: str) -> str:
    """Name of the role of one service, which environments ask as `services["NAME"]`."""
    return f"{SERVICE}:{name}"


def is_service(role: str) -> bool:
    """Whether a role is that of a service."""
    return role.startswith(service(""))


def check_service(role: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for a service without workers; `known`: the roles that have some."""
    if is_service(role) and role not in known:
        names = sorted(each.removeprefix(service("")) for each in known if is_service(each))
        raise ConfigError(
            f"a service must be one of {', '.join(names) or 'those that have had a worker'}, got "
            f"services[{role.removeprefix(service(''))!r}]: correct the name, or start it with "
            "--mode path/to/file.py:Name (--name names it, else its class)"
        )


def name_of_class(mode: str) -> str:
    """The name of a service that is given no other: its class in snake case.

    >>> name_of_class("my/files.py:BM25Index"), name_of_class("mine.search:HTTPSearch")
    ('bm25_index', 'http_search')
    """
    between = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(between, "_", split_arguments(mode)[0].rpartition(":")[2]).lower()


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What the class of a service declares for each of its workers."""

    code: UserCode
    capacity: int  # requests that it answers at a time
    devices: int

    @classmethod
    def read(cls, mode: str) -> ServiceTerms:
        """Read the terms of the class that `mode` names from its source, without running it.

        Raises `ConfigError` where there is no such class, or where it lacks something.
        """
        return _terms(UserCode.read(mode, option="--mode", shipped=MODES))


@functools.cache
def _terms(code: UserCode) -> ServiceTerms:
    code.check_defined()
    code.check_arguments()
    capacity = _number(code, "capacity", least=1, what="requests a worker answers at a time")
    devices = _number(code, "devices", least=0, what="devices a worker takes", default=0)
    if not code.awaits("answer"):
        raise ConfigError(
            f"--mode {code.name} must have a method `async def answer(self, request)`, and has "
            "none: add it to its class"
        )
    return ServiceTerms(code, capacity, devices)


def _number(code: UserCode, name: str, *, what: str, least: int, default: int | None = None) -> int:
    found = code.states(name, default)
    if type(found) is not int or found < least:
        raise ConfigError(
            f"--mode {code.name} must say in its class how many {what}, as `{name} = 1`, got "
            f"{found!r}: give a whole number of at least {least}, in that file"
        )
    return found


def named(roles: Iterable[str], teacher_names: Sequence[str]) -> tuple[str, ...]:
    """The roles without repeats; `TEACHER` is replaced by the roles of all teachers of a run.

    >>> named(["reference", "teacher"], ["math", "code"])
    ('reference', 'teacher:math', 'teacher:code')
    """
    found = (map(teacher, teacher_names) if role == TEACHER else [role] for role in roles)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def role_of(name: str) -> Role:
    """The role of that name.

    >>> role_of("reference").unit, role_of(teacher("math")).follows
    ('tokens', 'own')
    """
    if name.startswith(f"{TEACHER}:") and name != teacher(""):
        return Role(name, "tokens", "own")
    if name.startswith(f"{JUDGE}:") and name != judge(""):
        return Role(name, "answers", "own")
    if is_service(name) and name != service(""):
        return Role(name, "requests", "own")
    for role in _ROLES:
        if role.name == name:
            return role
    known = ", ".join([*(role.name for role in _ROLES), judge("NAME"), service("NAME")])
    raise ConfigError(f"a role must be one of {known} or {teacher('NAME')}, got {name!r}")
